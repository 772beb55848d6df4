"""Calls of tools over HTTP, from the model's text to what OpenAI's client package makes of it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.integration.cluster_bench import Bench
from tests.integration.http_door import Door, door

ASK: list[Any] = [{"role": "user", "content": "the mat"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
SIT: Any = {
    "type": "function",
    "function": {"name": "sit", "parameters": {"type": "object", "additionalProperties": False}},
}
CALL_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALL_SIT = '<tool_call>\n{"name": "sit", "arguments": {}}\n</tool_call>'
BAD = '<tool_call>{"name": "add", </tool_call>'


@pytest.fixture(scope="module")
async def shared(valkey_url: str) -> AsyncIterator[Door]:
    """A toy whose calls are known to be written as most models write them."""
    async with Bench(valkey_url) as bench, door(bench, http_markers="hermes+think") as opened:
        yield opened


@pytest.fixture
async def client(shared: Door) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def both(client: AsyncOpenAI, **asked: Any) -> Any:
    """Ask twice, whole and streamed; return the choice, on which the package's own sum of the stream must agree."""
    known: dict[str, Any] = {
        "model": "toy",
        "messages": ASK,
        "max_tokens": 300,
        "seed": 4,
        "tools": [ADD, SIT],
        **asked,
    }
    [whole] = (await client.chat.completions.create(**known)).choices
    async with client.chat.completions.stream(**known) as stream:
        [summed] = (await stream.get_final_completion()).choices
    for told in (whole, summed):
        assert len({call.id for call in told.message.tool_calls or ()}) == len(told.message.tool_calls or ())
    assert calls_of(summed) == calls_of(whole)
    assert (summed.message.content or "") == (whole.message.content or "")
    assert (summed.message.role, summed.finish_reason) == (whole.message.role, whole.finish_reason)
    return whole


def calls_of(choice: Any) -> list[tuple[str, str, Any]]:
    return [
        (call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()
    ]


def saying(text: str) -> dict[str, Any]:
    """Make the model say a text."""
    return {"extra_body": {"guided_choice": [text]}}


async def test_a_call_that_must_be_made_is_made(client: AsyncOpenAI) -> None:
    told = await both(client, tool_choice="required", temperature=0)
    [(kind, name, arguments)] = calls_of(told)
    assert kind == "function"
    assert (name, arguments) in (("add", {"a": 1}), ("add", {"a": 2}), ("sit", {}))
    assert (told.finish_reason, told.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("name", ["add", "sit"])
async def test_a_function_that_is_named_is_the_one_that_is_called(client: AsyncOpenAI, name: str) -> None:
    for seed in range(3):
        choice = {"type": "function", "function": {"name": name}}
        told = await both(client, tool_choice=choice, seed=seed)
        assert [called for _, called, _ in calls_of(told)] == [name]


async def test_calls_behind_each_other_are_told_one_by_one(client: AsyncOpenAI) -> None:
    told = await both(client, **saying(f"Two.\n{CALL_ADD}\n{CALL_SIT}"))
    assert calls_of(told) == [("function", "add", {"a": 1}), ("function", "sit", {})]
    assert (told.message.content, told.finish_reason) == ("Two.", "tool_calls")
    one = await both(client, parallel_tool_calls=False, **saying(f"Two.\n{CALL_ADD}\n{CALL_SIT}"))
    assert calls_of(one) == [("function", "add", {"a": 1})]
    assert one.finish_reason == "tool_calls"


async def test_what_is_no_call_stays_content(client: AsyncOpenAI) -> None:
    told = await both(client, **saying(f"So {BAD}."))
    assert (told.message.content, told.message.tool_calls, told.finish_reason) == (f"So {BAD}.", None, "stop")
    unseen = await both(client, tool_choice="none", **saying(CALL_SIT))
    assert (unseen.message.content, unseen.message.tool_calls, unseen.finish_reason) == (CALL_SIT, None, "stop")


async def test_a_call_that_the_length_cuts_is_content(shared: Door) -> None:
    known: dict[str, Any] = {"messages": ASK, "tools": [ADD], "max_tokens": 20, "guided_choice": [CALL_ADD]}
    [whole] = (await shared.whole("/v1/chat/completions", **known))["choices"]
    chunks = await shared.chunks("/v1/chat/completions", **known)
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert "tool_calls" not in whole["message"]
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == whole["message"]["content"] == CALL_ADD[:20]


async def test_a_streamed_call_has_its_place_and_its_name_at_once(shared: Door) -> None:
    chunks = await shared.chunks(
        "/v1/chat/completions",
        messages=ASK, tools=[ADD, SIT], guided_choice=[f"{CALL_ADD}\n{CALL_SIT}"], max_tokens=300, n=2, seed=1,
    )  # fmt: skip
    for index in range(2):
        deltas = [one["delta"] for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [(call["index"], call["type"], call["function"]["name"]) for call in calls] == [
            (0, "function", "add"), (1, "function", "sit"),
        ]  # fmt: skip
        assert all(call["id"] for call in calls)


async def test_thoughts_are_told_beside_the_content_or_not_at_all(shared: Door) -> None:
    known: dict[str, Any] = {"messages": ASK, "guided_choice": ["<think>hm</think>\n\nYes."], "max_tokens": 100}
    for shows in (True, False):
        whole = await shared.whole("/v1/chat/completions", **known, include_reasoning=shows)
        chunks = await shared.chunks("/v1/chat/completions", **known, include_reasoning=shows)
        message, deltas = whole["choices"][0]["message"], [chunk["choices"][0]["delta"] for chunk in chunks]
        for name, wanted in (("content", "Yes."), ("reasoning_content", "hm" if shows else None)):
            assert message.get(name) == wanted
            assert ("".join(delta.get(name, "") for delta in deltas) or None) == wanted
