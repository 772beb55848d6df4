"""The cluster view in a real browser: workers, sessions, acceptance and rounds, as they change."""

import re

import httpx
from playwright.async_api import Browser, Page, expect

from tests.browser.page_bench import Watched, watched
from tests.integration.announced_bench import Gateway, gateway

BODY = {"messages": [{"role": "user", "content": "the cat"}], "temperature": 0, "max_completion_tokens": 60}


async def rows(page: Page, place: str) -> list[str]:
    """Return the texts of a table's rows."""
    return [" ".join(text.split()) for text in await page.locator(f"#{place} tbody tr").all_inner_texts()]


async def generated(gateway: Gateway) -> None:
    """Have a chat answered, for there to be something to see."""
    async with httpx.AsyncClient(timeout=60) as client:
        (await client.post(f"{gateway.url}v1/chat/completions", json=BODY)).raise_for_status()


async def test_workers_are_listed_with_role_state_and_load(seen: Watched, shared: Gateway) -> None:
    page = seen.page
    await page.get_by_role("link", name="Cluster").click()
    await expect(page.locator("#cluster-status")).to_have_text("Model toy. Ready: 1 verifier, 1 draft worker.")
    found = await rows(page, "workers")
    assert any(re.search(rf"{shared.verifier.worker_id} verifier ready 0 of \d+ bitwise", row) for row in found)
    assert any(re.search(rf"{shared.drafters[0][1].worker_id} draft worker ready 0 of \d+ toy", row) for row in found)
    assert any("orchestrator ready" in row for row in found)


async def test_acceptance_and_rounds_of_what_ran_are_shown_and_no_text(seen: Watched, shared: Gateway) -> None:
    await generated(shared)
    page = seen.page
    await page.get_by_role("link", name="Cluster").click()
    await expect(page.locator("#acceptance tbody tr")).to_have_count(1)
    assert re.match(r"toy \d+ %", (await rows(page, "acceptance"))[0])
    picture = page.get_by_role("img", name=re.compile(r"The last \d+ rounds, \d+ milliseconds in all"))
    await expect(picture).to_be_visible()
    for lane in ("network", "verify", "commit"):
        assert await picture.locator(f"rect.{lane}").count() > 0
    await page.get_by_text("As a table, in milliseconds").click()
    assert len(await rows(page, "rounds")) > 1
    assert "the cat" not in await page.locator("#view-cluster").inner_text()


async def test_a_killed_draft_worker_disappears_and_it_says_why_nothing_is_drafted(chromium: Browser) -> None:
    async with gateway(drafters=2) as made, watched(chromium) as seen:
        page = seen.page
        await page.goto(f"{made.url}#cluster")
        workers = page.locator("#workers tbody tr", has_text="draft worker")
        await expect(workers).to_have_count(2)
        await made.drafters[0][0].kill()
        await expect(workers).to_have_count(1)
        await expect(page.locator("#cluster-status")).to_contain_text("Ready: 1 verifier, 1 draft worker.")
        await made.drafters[1][0].kill()
        await expect(page.locator("#cluster-off")).to_contain_text("There is no draft worker in the cluster")
        assert seen.outside(made.url) == []
        assert seen.unexpected() == []


async def test_a_session_is_shown_while_it_runs(chromium: Browser) -> None:
    async with gateway(delay_s=0.05) as made, watched(chromium) as seen:
        page = seen.page
        await page.goto(made.url)
        await page.locator("#set-tokens").fill("4000")
        await page.get_by_role("button", name="Ask").click()
        await expect(page.locator(".tokens .token").first).to_be_attached()
        await page.get_by_role("link", name="Cluster").click()
        await expect(page.locator("#sessions tbody tr")).to_have_count(1)
        await page.get_by_role("link", name="Chat").click()
        await page.get_by_role("button", name="Stop").click()
        await page.get_by_role("link", name="Cluster").click()
        await expect(page.locator("#sessions")).to_contain_text("No session runs")


async def test_pausing_leaves_what_is_shown_and_going_on_brings_it_up_to_date(seen: Watched) -> None:
    page = seen.page
    await page.get_by_role("link", name="Cluster").click()
    await expect(page.locator("#cluster-age")).to_have_text("up to date")
    await page.get_by_role("button", name="Pause").click()
    await expect(page.locator("#cluster-status")).to_contain_text("Paused")
    await expect(page.locator("#cluster-age")).to_contain_text("seconds ago")
    await page.get_by_role("button", name="Pause").click()
    await expect(page.locator("#cluster-age")).to_have_text("up to date")


async def test_a_server_that_goes_away_is_told_and_looked_for_again(seen: Watched) -> None:
    seen.expected = ("ERR_",)
    page = seen.page
    await page.get_by_role("link", name="Cluster").click()
    await expect(page.locator("#cluster-age")).to_have_text("up to date")
    await page.context.set_offline(True)
    await page.get_by_role("button", name="Pause").click()
    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    await page.context.set_offline(False)
    await expect(page.get_by_role("alert")).to_have_count(0)
