"""The three real services in one process, over loopback, with the toy model."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol

import torch

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from orchestrator.app import OrchestratorApp
from orchestrator.config import OrchestratorSettings
from outrider.client import NO_RETRY, Client
from outrider.generation import Chunk, Finished, GenerationEvent, GenerationRequest
from outrider.rpc import RpcServer
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings

TOY: dict[str, Any] = {"toy_seed": 7}


class App(Protocol):
    """What the three services' apps have in common."""

    server: RpcServer
    address: str
    ready: asyncio.Event

    async def start(self) -> None: ...

    async def run(self) -> None: ...


class Running:
    """A service that runs until it is killed or its bench ends."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        torch.set_num_threads(1)
        await self.app.start()
        self._task = asyncio.create_task(self.app.run())
        ready = asyncio.create_task(self.app.ready.wait())
        await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if not ready.done():
            await self._task
        assert ready.done()

    async def kill(self) -> None:
        """End it at once, as a crash would: streams break without a word."""
        await self.app.server.stop(0)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


class Bench:
    """Services of one test."""

    def __init__(self, store_url: str) -> None:
        self.store_url = store_url
        self.verifiers: list[VerifyApp] = []
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> "Bench":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def verifier(self, **settings: Any) -> tuple[Running, VerifyApp]:
        app = VerifyApp(VerifySettings(model="toy", **{**TOY, **settings}))
        self.verifiers.append(app)
        return await self._run(app), app

    async def drafter(self, **settings: Any) -> tuple[Running, DraftApp]:
        app = DraftApp(DraftSettings(**{"drafter": "toy", "model": "toy", **TOY, **settings}))
        return await self._run(app), app

    async def orchestrator(
        self, verifiers: list[Running], drafters: list[Running], **settings: Any
    ) -> tuple[Running, OrchestratorApp, Client]:
        known: dict[str, Any] = {"model": "toy", "store_url": self.store_url, "default_max_tokens": 64}
        app = OrchestratorApp(
            OrchestratorSettings(
                verify_addresses=tuple(each.app.address for each in verifiers),
                draft_addresses=tuple(each.app.address for each in drafters),
                **{**known, **settings},
            )
        )
        running = await self._run(app)
        client = Client(app.address, timeout_s=60, retry=NO_RETRY)
        self._exits.push_async_callback(client.close)
        return running, app, client

    async def _run(self, app: App) -> Running:
        running = Running(app)
        self._exits.push_async_callback(running.kill)
        await running.start()
        return running


class Heard:
    """What a client heard of one generation."""

    def __init__(self, events: list[GenerationEvent]) -> None:
        self.events = events
        self.chunks = [event for event in events if isinstance(event, Chunk)]

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last


async def hear(client: Client, request: GenerationRequest) -> Heard:
    return Heard([event async for event in client.generate(request)])


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for something that nothing announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (the conditions are other components' counters)
            await asyncio.sleep(0.01)
