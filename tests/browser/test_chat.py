"""The playground in a real browser: a chat that streams, token by token, and everything that can go wrong with it."""

import json
import re
from typing import Any

from playwright.async_api import Browser, Page, Route, expect

from outrider.generation import ChatMessage, ChatPrompt, GenerationRequest
from outrider.messages import SamplingParams
from tests.browser.page_bench import Watched, watched
from tests.integration.announced_bench import Gateway, gateway
from tests.integration.cluster_bench import Heard, hear, until

PROMPT = "the cat sat on "
HTML = "<img src=x onerror=alert(1)><b>bold</b>"


async def ask(page: Page, text: str = PROMPT, **fields: str) -> None:
    """Fill the form and ask."""
    for name, value in {"tokens": "48", **fields}.items():
        await page.locator(f"#set-{name}").fill(value)
    await page.get_by_role("textbox", name="Your message").fill(text)
    await page.get_by_role("button", name="Ask").click()


async def answered(page: Page) -> str:
    """Wait for the end of the answer; return what is said of it."""
    status = page.locator("#chat-status")
    await expect(status).to_contain_text("complete")
    return await status.inner_text()


async def by_grpc(gateway: Gateway, *said: str, max_tokens: int = 48) -> Heard:
    """Return the answer to the same conversation by gRPC."""
    roles = ("user", "assistant")
    prompt = ChatPrompt(tuple(ChatMessage(roles[index % 2], text) for index, text in enumerate(said)))
    sampling = SamplingParams(temperature=0.0)
    return await hear(
        gateway.client, GenerationRequest(prompt, max_tokens=max_tokens, sampling=sampling, return_token_origin=True)
    )


async def texts(page: Page, selector: str) -> list[str]:
    """Return the texts of all elements, white space as it is."""
    return await page.locator(selector).all_text_contents()


async def changed(page: Page, **fields: Any) -> None:
    """Add fields to requests on their way to the server."""

    async def change(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}")
        await route.continue_(post_data=json.dumps({**body, **fields}))

    await page.route("**/v1/chat/completions", change)


# --- an answer --------------------------------------------------------------------------------------------------------


async def test_an_answers_tokens_add_up_to_the_text_of_the_same_request_by_grpc(seen: Watched, shared: Gateway) -> None:
    page = seen.page
    await ask(page)
    said = await answered(page)
    heard = await by_grpc(shared, PROMPT)
    assert "".join(await texts(page, ".tokens .token")) == heard.text
    assert (await texts(page, ".plain-text"))[0] == heard.text
    assert said == f"The answer is complete, {len(heard.token_ids)} tokens."


async def test_tokens_are_coloured_and_underlined_by_where_they_came_from(seen: Watched) -> None:
    page = seen.page
    await ask(page)
    await answered(page)
    look = """(tokens) => tokens.map((each) => {
      const { backgroundColor, textDecorationLine, textDecorationStyle } = getComputedStyle(each);
      return [each.dataset.kind, `${backgroundColor} ${textDecorationLine} ${textDecorationStyle}`];
    })"""
    found: list[list[str]] = await page.locator(".tokens .token").evaluate_all(look)
    kinds = [kind for kind, _ in found]
    assert kinds.count("accepted") > 0
    assert kinds.count("recovered") > 0
    looks: dict[str, set[str]] = {}
    for kind, looked in found:
        looks.setdefault(kind, set()).add(looked)
    assert all(len(each) == 1 for each in looks.values())
    lines = [next(iter(each)).split(")", 1)[1] for each in looks.values()]
    assert len(set(lines)) == len(looks)  # told apart without any colour too
    counts = f"{kinds.count('accepted')} accepted drafts, {kinds.count('recovered')} recovered"
    await expect(page.locator(".foot")).to_contain_text(counts)


async def test_letters_tell_origins_in_the_text_where_somebody_wants_them(seen: Watched) -> None:
    page = seen.page
    await ask(page)
    await answered(page)
    shown = "(token) => getComputedStyle(token, '::after').content"
    token = page.locator(".tokens .token[data-kind=accepted]").first
    assert await token.evaluate(shown) == "none"
    await page.get_by_label("show the letters in the text").check()
    assert await token.evaluate(shown) in ('"A"', "attr(data-letter)")


async def test_the_pointer_on_a_token_shows_its_probability_and_position(seen: Watched, shared: Gateway) -> None:
    page = seen.page
    await ask(page)
    await answered(page)
    await page.locator(".tokens .token").nth(2).hover()
    panel = page.locator(".panel")
    heard = await by_grpc(shared, PROMPT)
    start = heard.chunks[0].start
    await expect(panel).to_contain_text(f"token 3 of the answer, position {start + 2} of the session")
    await expect(panel).to_contain_text(re.compile(r"Probability\s*(\d+\.\d+ %|below)"))
    await expect(panel).to_contain_text(str(heard.token_ids[2]))
    assert await panel.locator(".likeliest li").count() == 5


async def test_a_conversation_goes_on_with_what_was_said_and_begins_anew_without(
    seen: Watched, shared: Gateway
) -> None:
    page = seen.page
    await ask(page)
    await answered(page)
    first = (await by_grpc(shared, PROMPT)).text
    await ask(page, "and the mat?")
    await expect(page.locator(".turn")).to_have_count(2)
    await answered(page)
    second = (await by_grpc(shared, PROMPT, first, "and the mat?")).text
    assert "".join(await texts(page, ".turn:last-child .tokens .token")) == second
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator(".turn")).to_have_count(0)
    await ask(page)
    await answered(page)
    assert "".join(await texts(page, ".tokens .token")) == first


async def test_with_speculation_off_every_token_is_plain_and_it_says_why(seen: Watched) -> None:
    page = seen.page
    await page.get_by_label("Speculation").select_option("off")
    await ask(page)
    await answered(page)
    assert set(await page.locator(".tokens .token").evaluate_all("(t) => t.map((e) => e.dataset.kind)")) == {"plain"}
    await expect(page.locator(".foot .note")).to_have_text("The request asks for no drafts.")


async def test_what_looks_like_html_stays_text_in_question_and_answer(seen: Watched) -> None:
    page = seen.page
    await changed(page, guided_choice=[HTML], max_completion_tokens=100)
    await ask(page, f"say {HTML}")
    await answered(page)
    assert "".join(await texts(page, ".tokens .token")) == HTML
    assert await texts(page, ".question") == [f"say {HTML}"]
    assert await page.locator("#turns img, #turns b").count() == 0


async def test_an_answer_that_reaches_the_most_tokens_says_so(seen: Watched) -> None:
    page = seen.page
    await ask(page, tokens="3")
    await answered(page)
    await expect(page.locator(".foot")).to_contain_text("It ends here because of “most tokens”.")


# --- what can go wrong ------------------------------------------------------------------------------------------------


async def test_before_the_first_answer_it_says_what_to_do(seen: Watched) -> None:
    await expect(seen.page.locator("#chat-empty")).to_be_visible()
    await ask(seen.page, tokens="3")
    await answered(seen.page)
    await expect(seen.page.locator("#chat-empty")).to_be_hidden()


async def test_an_error_of_the_server_is_told_in_its_words_with_the_field(seen: Watched) -> None:
    seen.expected = ("400",)
    await changed(seen.page, temperature=-1)
    await ask(seen.page)
    alert = seen.page.get_by_role("alert")
    await expect(alert).to_contain_text("The server refused:")
    await expect(alert).to_contain_text("temperature")
    await expect(seen.page.locator("#chat-status")).to_have_text("No answer came.")
    await seen.page.unroute("**/v1/chat/completions")
    await ask(seen.page)
    await answered(seen.page)
    await expect(alert).to_have_count(0)


async def test_stopping_ends_the_session_and_keeps_what_came(chromium: Browser) -> None:
    async with gateway(delay_s=0.03) as made, watched(chromium) as seen:
        page = seen.page
        await page.goto(made.url)
        await ask(page, tokens="4000")
        await expect(page.locator(".tokens .token").nth(5)).to_be_attached()
        assert made.num_sessions == 2
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator("#chat-status")).to_contain_text("You stopped the answer after")
        await until(lambda: made.num_sessions == 0)
        assert await page.locator(".tokens .token").count() > 5
        await expect(page.get_by_role("button", name="Ask")).to_be_enabled()
        assert seen.unexpected() == []


async def test_a_server_that_cannot_be_reached_is_told_as_such(seen: Watched, shared: Gateway) -> None:
    seen.expected = ("ERR_",)
    await seen.page.context.set_offline(True)
    await ask(seen.page)
    await expect(seen.page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    await seen.page.context.set_offline(False)
    await ask(seen.page)
    await answered(seen.page)


async def test_without_draft_workers_the_answer_is_plain_and_says_why(chromium: Browser) -> None:
    async with gateway(drafters=0) as made, watched(chromium) as seen:
        await seen.page.goto(made.url)
        await ask(seen.page)
        await answered(seen.page)
        await expect(seen.page.locator(".foot .note")).to_contain_text("No draft worker is free")
        await seen.page.get_by_role("link", name="Cluster").click()
        await expect(seen.page.locator("#cluster-off")).to_contain_text("There is no draft worker in the cluster")
        assert seen.unexpected() == []
