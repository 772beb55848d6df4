"""The race in a real browser: the same request with drafts and without."""

import pytest
from playwright.async_api import expect

from tests.browser.page_bench import Watched


@pytest.mark.parametrize(
    "order", ["one after the other", "both at once: they share the machines"], ids=["turns", "both"]
)
async def test_both_texts_are_equal_and_times_are_told(seen: Watched, order: str) -> None:
    page = seen.page
    await page.get_by_role("link", name="Race").click()
    await page.locator("#set-tokens").fill("40")
    await page.get_by_label(order).check()
    await page.get_by_role("button", name="Start the race").click()
    await expect(page.locator("#race-status")).to_contain_text("The texts are equal, all 40 tokens of them.")
    kinds = {
        lane: set(await page.locator(f"#{lane} .token").evaluate_all("(t) => t.map((e) => e.dataset.kind)"))
        for lane in ("lane-with", "lane-without")
    }
    assert "accepted" in kinds["lane-with"]
    assert kinds["lane-without"] == {"plain"}
    for lane in kinds:
        await expect(page.locator(f"#{lane} .figures")).to_contain_text("40 tokens · ")
        await expect(page.locator(f"#{lane} .figures")).to_contain_text("tokens/s")


async def test_two_draws_without_a_seed_may_differ_and_are_not_called_wrong(seen: Watched) -> None:
    page = seen.page
    await page.get_by_role("link", name="Race").click()
    await page.locator("#set-temperature").fill("2")
    await page.locator("#set-tokens").fill("40")
    await page.get_by_role("button", name="Start the race").click()
    await expect(page.locator("#race-status")).to_contain_text("The texts differ, as they may")


async def test_a_race_that_is_stopped_says_so(seen: Watched) -> None:
    page = seen.page
    await page.get_by_role("link", name="Race").click()
    await page.locator("#set-tokens").fill("4000")
    await page.get_by_role("button", name="Start the race").click()
    await expect(page.locator("#lane-with .token").first).to_be_attached()
    await page.locator("#race-stop").click()
    await expect(page.locator("#race-status")).to_have_text("You stopped the race.")
    await expect(page.get_by_role("button", name="Start the race")).to_be_enabled()
