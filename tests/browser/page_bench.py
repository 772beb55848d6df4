"""A whole cluster with the gateway, and a real Chromium that looks at its page."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, Playwright, Request

from draft_service.app import DraftApp
from orchestrator.app import OrchestratorApp
from outrider.client import Client
from outrider.store.embedded import EmbeddedServer
from tests.integration.cluster_bench import Bench, Running
from verify_service.app import VerifyApp

ARGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
FAST: dict[str, Any] = {"heartbeat_ttl_s": 1.0, "toy_delay_s": 0.004}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_MS = 10_000


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
        known = {"heartbeat_ttl_s": 1.0, "http_listen": "127.0.0.1:0", **settings}
        _, app, client = await bench.orchestrator([], [], **known)
        assert app.http is not None
        made = Gateway(bench, f"http://{app.http.address}/", app, client, verifier)
        for _ in range(drafters):
            await made.drafter()
        yield made


@dataclass
class Watched:
    """A page, and what it did that it should not have done."""

    page: Page
    requests: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()
    """Parts of complaints that a test provokes."""

    def outside(self, url: str) -> list[str]:
        """Return what was asked of anybody but the gateway."""
        return [request.url for request in self.requests if not request.url.startswith(url)]

    def unexpected(self) -> list[str]:
        """Return complaints of the browser that no test provoked."""
        return [text for text in self.complaints if not any(part in text for part in self.expected)]

    def keep(self, request: Request) -> None:
        """Keep a request."""
        self.requests.append(request)

    def note(self, message: ConsoleMessage) -> None:
        """Keep a complaint."""
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


async def launch(playwright: Playwright, folder: Path) -> Browser:
    """Start the system's Chromium with a profile of its own."""
    return await playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGS], env={"HOME": str(folder)})


@asynccontextmanager
async def watched(browser: Browser, **options: Any) -> AsyncIterator[Watched]:
    """Open a page in a fresh context, and note what it asks for and complains of."""
    context = await browser.new_context(locale="en-US", **options)
    context.set_default_timeout(WAIT_MS)
    try:
        made = Watched(await context.new_page())
        made.page.on("request", made.keep)
        made.page.on("console", made.note)
        made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
        yield made
    finally:
        await context.close()
