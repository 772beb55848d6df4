"""Takes the pictures of the web page that the documentation shows: python -m benchmarks.screenshots.

A local cluster of the packaged model with the gateway, and the Chromium of the system. Nothing is measured here.
"""

import asyncio
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, async_playwright, expect

from outrider.cli.local import LocalSettings
from outrider.cluster import LocalCluster
from outrider.model.names import DEFAULT_MODEL

FOLDER = Path(__file__).parents[1] / "docs" / "screenshots"
MAX_BYTES = 150_000
"""Of a picture."""
WAIT_MS = 90_000
"""Longest wait for anything to appear: a slow machine takes its time with an answer."""
ARGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--no-first-run")
DESK: dict[str, Any] = {"viewport": {"width": 1000, "height": 700}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 700}, "is_mobile": True, "has_touch": True, "color_scheme": "dark"
}  # fmt: skip
PROMPT = "Write this sentence three times: The outrider rides ahead of the coach, and the coach decides the road."


async def chat(page: Page) -> None:
    """Have a question answered, and point at a token."""
    await page.locator("#chat-prompt").fill(PROMPT)
    await page.locator("#set-tokens").fill("90")
    await page.get_by_role("button", name="Ask").click()
    await expect(page.locator("#chat-status")).to_contain_text("complete")
    drafted = page.locator(".tokens .token[data-kind=accepted]")
    await (drafted if await drafted.count() else page.locator(".tokens .token")).nth(3).hover()
    await page.locator("#chat-form textarea").evaluate("(area) => { area.rows = 1; }")


async def race(page: Page) -> None:
    """Run a race to its end."""
    await page.get_by_role("link", name="Race").click()
    await page.locator("#race-prompt").fill(PROMPT)
    await page.locator("#set-tokens").fill("90")
    await page.get_by_role("button", name="Start the race").click()
    await expect(page.locator("#race-status")).to_contain_text("The texts are equal")


async def cluster(page: Page) -> None:
    """Look at the cluster after something ran."""
    await page.get_by_role("link", name="Cluster").click()
    await expect(page.locator("#acceptance tbody tr")).not_to_have_count(0)
    await page.locator("#rounds-session").select_option(index=1)  # of the race, the one with drafts
    await expect(page.locator("svg.rounds .draft").or_(page.locator("svg.rounds .verify")).first).to_be_visible()


async def phone(page: Page) -> None:
    """Have a short question answered."""
    await chat(page)
    await page.locator("#turns").scroll_into_view_if_needed()


PICTURES = {"chat": (chat, DESK), "race": (race, DESK), "cluster": (cluster, DESK), "phone": (phone, PHONE)}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Run the system's Chromium with a profile of its own."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("there is no chromium on this machine")
    with tempfile.TemporaryDirectory() as home:
        async with async_playwright() as playwright:
            made = await playwright.chromium.launch(executable_path=program, args=ARGS, env={"HOME": home})
            yield made
            await made.close()


async def take(made: Browser, url: str, name: str) -> None:
    """Take one picture."""
    prepare, device = PICTURES[name]
    context = await made.new_context(locale="en-US", reduced_motion="reduce", **device)
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    await page.goto(url)
    await prepare(page)
    path = FOLDER / f"{name}.png"
    await page.screenshot(path=path, full_page=name != "phone")
    await context.close()
    size = path.stat().st_size
    print(f"{path.name}: {size} bytes")
    if size > MAX_BYTES:
        sys.exit(f"{path} is larger than {MAX_BYTES} bytes")


async def main() -> None:
    """Take all pictures."""
    expect.set_options(timeout=WAIT_MS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{free_port()}"
    settings = LocalSettings(DEFAULT_MODEL, "auto", threads=1, http_listen=address)
    async with LocalCluster(settings.specs()), browser() as made:
        for name in PICTURES:
            await take(made, f"http://{address}/", name)


if __name__ == "__main__":
    asyncio.run(main())
