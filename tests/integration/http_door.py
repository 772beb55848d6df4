"""An orchestrator with both doors open, over loopback, with the toy model; and a client that knows only HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from orchestrator.app import OrchestratorApp
from outrider.client import Client
from tests.integration.cluster_bench import Bench, Running

FREE = "127.0.0.1:0"


@dataclass(frozen=True)
class Door:
    """A cluster, and how to reach it."""

    app: OrchestratorApp
    running: Running
    grpc: Client
    http: httpx.AsyncClient
    verifier: Running
    drafter: Running | None

    @property
    def url(self) -> str:
        """Where the HTTP door is."""
        return str(self.http.base_url).rstrip("/")

    async def ask(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """Post a request."""
        return await self.http.post(path, json=body)

    async def whole(self, path: str = "/v1/completions", **body: Any) -> Any:
        """Post a request that must be answered."""
        response = await self.ask(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def chunks(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """Post a request and return its chunks; the stream must end as it should."""
        told = [chunk async for chunk in self.stream(path, **body)]
        assert told[-1] == "[DONE]"
        return told[:-1]

    async def stream(self, path: str = "/v1/completions", **body: Any) -> AsyncIterator[Any]:
        """Post a request and yield what comes, the end too."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line:
                    assert line.startswith("data: ")
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def door(
    bench: Bench, *, drafts: bool = True, verifier: dict[str, Any] | None = None, **orchestrator: Any
) -> AsyncIterator[Door]:
    """Open both doors of a cluster of one verifier and, perhaps, a draft worker."""
    verify, _ = await bench.verifier(**{"max_sessions": 16, **(verifier or {})})
    draft = (await bench.drafter())[0] if drafts else None
    known = {"http_listen": FREE, **orchestrator}
    running, app, client = await bench.orchestrator([verify], [draft] if draft else [], **known)
    assert app.http is not None
    async with httpx.AsyncClient(base_url=f"http://{app.http.address}", timeout=60) as http:
        async with asyncio.timeout(60):
            while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield Door(app, running, client, http, verify, draft)
