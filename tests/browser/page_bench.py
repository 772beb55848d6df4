"""A real Chromium that looks at the page."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, Playwright, Request

ARGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_MS = 60_000


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
