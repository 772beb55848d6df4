"""The client for code without an event loop: `outrider.client.Client` on a loop of its own.

    with SyncClient(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
        answer = client.ask("Once upon a time", max_tokens=100, seed=7)
        for event in client.stream([{"role": "user", "content": "Hello"}], temperature=0):
            ...

It is `outrider.Client` from outside. For one thread at a time, in the process that made it, and not inside a running
event loop. The loop runs only while a method is waited for.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from outrider.asking import Answer, Parameters, Prompt
from outrider.client import CLOSED, DEFAULT_TIMEOUT_S, Client
from outrider.errors import Cancelled
from outrider.generation import GenerationEvent, GenerationRequest, ModelDescription, SessionSummary
from outrider.ids import SessionId
from outrider.resuming import RETRY, Retry
from outrider.rpc import ClientTls

T = TypeVar("T")


class SyncClient:
    """Orchestrators of one cluster. A context manager, or closed with `close`."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: Retry = RETRY,
        tls: ClientTls | None = None,
        api_key: str | None = None,
    ) -> None:
        """Connect with the first call; the arguments are those of `outrider.client.Client`."""

        async def made() -> Client:  # where there is an event loop, which channels need
            return Client(addresses, timeout_s=timeout_s, retry=retry, tls=tls, api_key=api_key)

        self._runner, self._closed = asyncio.Runner(), False
        try:
            self._client = _run(self._runner, made())
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close the channels; generations that run are called off, and whoever follows them is told. Idempotent."""
        if not self._closed:
            self._run(self._client.close())
            self._closed = True
            self._runner.close()

    def generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        """Yield the events of a new generation: `Started` first, `Finished` last; closing the iterator calls it off.

        Raises:
            OutriderError: it was refused, or failed.
        """
        return self._events(self._client.generate(request))

    def stream(self, prompt: Prompt, **parameters: Unpack[Parameters]) -> Generator[GenerationEvent, None, None]:
        """Yield the events of a new generation, as `generate` does.

        Args:
            prompt: text, token ids, messages, or a request whose fields the parameters change.
            **parameters: see `outrider.asking.Parameters`.

        Raises:
            OutriderError: it was refused, or failed.
        """
        return self._events(self._client.stream(prompt, **parameters))

    def ask(self, prompt: Prompt, **parameters: Unpack[Parameters]) -> Answer:
        """Return a whole answer; the arguments are those of `stream`.

        Raises:
            OutriderError: it was refused, or failed.
        """
        return self._run(self._client.ask(prompt, **parameters))

    def samples(self, prompt: Prompt, n: int, **parameters: Unpack[Parameters]) -> list[Answer]:
        """Return several answers to one request, generated side by side; with a seed, each is repeatable.

        Args:
            prompt: as for `stream`.
            n: how many, 1 .. 128; answer i is the one with `sample_index` i.
            **parameters: as for `stream`.

        Raises:
            OutriderError: one was refused, or failed; the others are called off.
        """
        return self._run(self._client.samples(prompt, n, **parameters))

    def resume(self, session_id: SessionId, next_position: int) -> Generator[GenerationEvent, None, None]:
        """Yield the events of a generation whose stream was lost, from the first token that was not seen.

        Raises:
            OutriderError: there is nothing to go on with, what was shown is lost, or it failed.
        """
        return self._events(self._client.resume(session_id, next_position))

    def session(self, session_id: SessionId, *, include_token_ids: bool = False) -> SessionSummary:
        """Return what is stored about a session.

        Raises:
            NotFound: there is none.
        """
        return self._run(self._client.session(session_id, include_token_ids=include_token_ids))

    def delete(self, session_id: SessionId) -> None:
        """Forget a session, and call off its generation.

        Raises:
            NotFound: there is none.
        """
        self._run(self._client.delete(session_id))

    def models(self) -> list[ModelDescription]:
        """Return the models that can be asked for now."""
        return self._run(self._client.models())

    def _events(self, events: AsyncGenerator[GenerationEvent, None]) -> Generator[GenerationEvent, None, None]:
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            if not self._closed:
                self._run(_close(events))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the loop until work is done.

        Raises:
            Cancelled: the client is closed.
        """
        if self._closed:
            work.close()
            raise Cancelled(CLOSED)
        return _run(self._runner, work)


def _run(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    """Run a loop of our own until work is done.

    Raises:
        RuntimeError: this thread has another loop that runs, or another thread runs ours.
    """
    if _inside_a_loop():
        work.close()
        raise RuntimeError("outrider.Client is not for use inside an event loop that runs; take outrider.AsyncClient")
    if runner.get_loop().is_running():
        work.close()
        raise RuntimeError("outrider.Client is for one thread at a time; give each thread its own")
    return runner.run(work)


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _next(events: AsyncGenerator[GenerationEvent, None]) -> GenerationEvent | None:
    """Return the next event, None at the end."""
    return await anext(events, None)


async def _close(events: AsyncGenerator[GenerationEvent, None]) -> None:
    await events.aclose()
