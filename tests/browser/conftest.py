"""One Chromium for all browser tests, one cluster for those that harm none, and a page for each."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, async_playwright, expect

from tests.browser.page_bench import CHROMIUM, Watched, launch, watched
from tests.integration.announced_bench import Gateway, gateway

expect.set_options(timeout=60_000)  # machines that run several tests at once are slow


@pytest.fixture(scope="session")
async def chromium(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """The system's Chromium; without one the tests are skipped."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await launch(playwright, tmp_path_factory.mktemp("chromium"))
        yield browser
        await browser.close()


@pytest.fixture(scope="session")
async def shared(chromium: Browser) -> AsyncIterator[Gateway]:
    """A cluster that no test harms."""
    async with gateway() as made:
        yield made


@pytest.fixture
async def seen(chromium: Browser, shared: Gateway) -> AsyncIterator[Watched]:
    """The page of the shared cluster, open. A request to anybody else, or a complaint, fails its test."""
    async with watched(chromium) as made:
        await made.page.goto(shared.url)
        yield made
        assert made.outside(shared.url) == []
        assert made.unexpected() == []
