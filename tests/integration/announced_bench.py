"""A whole cluster of the toy model whose workers announce themselves, with the gateway, in one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from draft_service.app import DraftApp
from orchestrator.app import OrchestratorApp
from outrider.client import Client
from outrider.store.embedded import EmbeddedServer
from tests.integration.cluster_bench import Bench, Running
from verify_service.app import VerifyApp

FAST: dict[str, Any] = {"heartbeat_ttl_s": 2.0, "toy_delay_s": 0.004}


@dataclass
class Gateway:
    """A cluster whose workers announce themselves, and where its page is."""

    bench: Bench
    url: str
    app: OrchestratorApp
    client: Client
    verifier: VerifyApp
    drafters: list[tuple[Running, DraftApp]] = field(default_factory=list)

    async def drafter(self, **settings: Any) -> DraftApp:
        """Start a draft worker that joins the cluster."""
        known = {"store_url": self.bench.store_url, **FAST, "toy_delay_s": 0.0, **settings}
        running, app = await self.bench.drafter(**known)
        self.drafters.append((running, app))
        return app

    async def found(self, drafters: int) -> None:
        """Wait until the orchestrator knows the verifier and so many draft workers."""
        assert self.app.sessions is not None
        placement = self.app.sessions.tools.placement
        async with asyncio.timeout(60):
            counts = -1, 0
            while counts[0] != drafters or not counts[1]:
                counts = len(await placement.workers("draft")), len(await placement.workers("verify"))
                await asyncio.sleep(0.02)

    @property
    def num_sessions(self) -> int:
        """Generations that hold a place, at the orchestrator or at the verifier."""
        engine = self.verifier.engine
        return (len(self.app.sessions) if self.app.sessions else 0) + (engine.num_sessions if engine else 0)


@asynccontextmanager
async def gateway(*, drafters: int = 1, delay_s: float = 0.004, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a cluster of the toy model with a store of its own."""
    async with EmbeddedServer() as server, Bench(server.url) as bench:
        _, verifier = await bench.verifier(store_url=server.url, **{**FAST, "toy_delay_s": delay_s})
        known = {"heartbeat_ttl_s": 2.0, "http_listen": "127.0.0.1:0", **settings}
        _, app, client = await bench.orchestrator([], [], **known)
        assert app.http is not None
        made = Gateway(bench, f"http://{app.http.address}/", app, client, verifier)
        for _ in range(drafters):
            await made.drafter()
        await made.found(drafters)
        yield made
