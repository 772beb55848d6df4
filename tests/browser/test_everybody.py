"""The page for everybody: by keyboard, by screen reader, on a phone, in the dark; and with keys."""

import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from outrider.keys import KeyLimits, make_key, write_record
from tests.browser.page_bench import Watched, watched
from tests.integration.announced_bench import Gateway, gateway

AXE = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
}


async def violations(page: Page) -> list[str]:
    """Return what axe-core finds wrong with the page as it is."""
    await page.evaluate(AXE)
    found: dict[str, Any] = await page.evaluate("rules => axe.run(document, rules)", RULES)
    return [f"{each['id']}: {node['html'][:150]}" for each in found["violations"] for node in each["nodes"]]


async def ask(page: Page) -> None:
    """Have a short chat answered."""
    await page.locator("#set-tokens").fill("30")
    await page.get_by_role("button", name="Ask").click()
    await expect(page.locator("#chat-status")).to_contain_text("complete")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_view_breaks_a_rule_of_accessibility(chromium: Browser, shared: Gateway, scheme: Any) -> None:
    async with watched(chromium, color_scheme=scheme) as seen:
        page = seen.page
        await page.goto(shared.url)
        await ask(page)
        await page.locator(".tokens .token").nth(1).hover()
        await page.get_by_label("show the letters in the text").check()
        assert await violations(page) == []
        await page.get_by_role("link", name="Race").click()
        await page.get_by_role("button", name="Start the race").click()
        await expect(page.locator("#race-status")).to_contain_text("equal")
        assert await violations(page) == []
        await page.get_by_role("link", name="Cluster").click()
        await expect(page.locator("#acceptance tbody tr")).to_have_count(1)
        await page.get_by_text("As a table, in milliseconds").click()
        assert await violations(page) == []


async def test_everything_can_be_done_by_keyboard_alone(seen: Watched) -> None:
    page = seen.page
    focus = "document.activeElement.id || document.activeElement.textContent.trim().slice(0, 20)"
    stops = []
    for _ in range(8):
        await page.keyboard.press("Tab")
        stops.append(await page.evaluate(focus))
    assert stops == ["Skip to the content", "Chat", "Race", "Cluster", "key", "chat-prompt", "Ask", "chat-new"]
    await page.locator("#set-tokens").fill("20")
    await page.locator("#chat-prompt").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#chat-status")).to_contain_text("complete")
    await page.keyboard.press("Shift+Tab")
    while await page.evaluate("document.activeElement.getAttribute('role')") != "listbox":
        await page.keyboard.press("Shift+Tab")
    await expect(page.locator(".panel")).to_contain_text("token 1 of the answer")
    for key, number in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", 20), ("Home", 1)):
        await page.keyboard.press(key)
        await expect(page.locator(".panel")).to_contain_text(f"token {number} of the answer")
        active = await page.locator(".tokens").get_attribute("aria-activedescendant")
        assert await page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    await page.locator("nav a").nth(2).focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#cluster-title")).to_be_focused()


async def test_a_screen_reader_is_told_of_beginning_and_end_and_not_of_every_token(seen: Watched) -> None:
    page = seen.page
    await page.evaluate(
        """() => {
          window.told = [];
          const what = {childList: true, subtree: true};
          for (const region of document.querySelectorAll("[role=status], [aria-live]"))
            new MutationObserver(() => told.push(region.textContent)).observe(region, what);
        }"""
    )
    await ask(page)
    told = await page.evaluate("told")
    assert told[:2] == ["Waiting for the first token …", "Answering …"]
    assert len(told) == 3
    option = page.get_by_role("listbox").get_by_role("option").first
    assert "," in str(await option.get_attribute("aria-label"))


async def test_landmarks_and_headings_lead_through_the_page(seen: Watched) -> None:
    page = seen.page
    for role in ("banner", "navigation", "main", "contentinfo"):
        await expect(page.get_by_role(role)).to_have_count(1)
    await expect(page.get_by_role("heading", level=1)).to_have_count(1)


@pytest.mark.parametrize("view", ["chat", "race", "cluster"])
async def test_nothing_is_wider_than_a_phone(chromium: Browser, shared: Gateway, view: str) -> None:
    async with watched(chromium, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as seen:
        page = seen.page
        await page.goto(shared.url)
        await ask(page)
        await page.locator(".tokens .token").nth(1).tap()
        await expect(page.locator(".panel")).to_be_visible()
        await page.get_by_role("link", name=view.title()).click()
        if view == "cluster":
            await expect(page.locator("#acceptance tbody tr")).to_have_count(1)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360


async def test_nothing_moves_for_whoever_wants_it_still(chromium: Browser, shared: Gateway) -> None:
    moves = "getComputedStyle(document.querySelector('.bar')).transitionDuration"
    for wish, expected in (("reduce", "0s"), ("no-preference", "0.2s")):
        async with watched(chromium, reduced_motion=wish) as seen:
            await seen.page.goto(f"{shared.url}#cluster")
            await expect(seen.page.locator("#workers .bar").first).to_be_attached()
            assert await seen.page.evaluate(moves) == expected


async def test_with_keys_it_says_what_is_missing_and_keeps_the_key_in_memory_alone(
    chromium: Browser, tmp_path: Path
) -> None:
    key, record = make_key("test", KeyLimits(), time.time())
    file = tmp_path / "keys"
    file.write_bytes(write_record(record) + b"\n")
    async with gateway(require_keys=True, key_file=str(file)) as made, watched(chromium) as seen:
        seen.expected = ("401",)
        page = seen.page
        await page.goto(made.url)
        await page.get_by_role("button", name="Ask").click()
        await expect(page.get_by_role("alert")).to_contain_text("Put a valid API key into the field")
        await page.get_by_label("API key").fill(key)
        await ask(page)
        await page.get_by_role("link", name="Cluster").click()
        await expect(page.locator("#workers tbody tr").first).to_be_attached()
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert await page.evaluate(kept) == '[{},{},""]'
        await page.reload()
        assert await page.get_by_label("API key").input_value() == ""


async def test_a_foreign_script_or_markup_from_a_string_is_refused_by_the_browser(seen: Watched) -> None:
    seen.expected = ("Content Security Policy", "TrustedHTML")
    page = seen.page
    with pytest.raises(Exception, match="TrustedHTML"):
        await page.evaluate("document.body.innerHTML = '<b>x</b>'")
    await page.evaluate(
        "document.body.append(Object.assign(document.createElement('img'), {src: 'http://127.0.0.1:1/x'}))"
    )
    await page.wait_for_function("true")
    assert any("Content Security Policy" in text for text in seen.complaints)
    seen.requests[:] = [each for each in seen.requests if ":1/x" not in each.url]
