"""OpenAI's API over HTTP, as its own client package sees it, beside gRPC on the same orchestrator."""

import asyncio
import json
import random
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from openai import AsyncOpenAI, OpenAI

from outrider.generation import ChatMessage, ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from outrider.ids import Mode
from outrider.keys import KeyLimits, make_key, write_record
from outrider.messages import Grammar, GrammarKind, SamplingParams
from outrider.model.toy import ToyTokenizer
from tests.integration.cluster_bench import Bench, hear, until
from tests.integration.http_door import FREE, Door, door

ROOT = Path(__file__).parents[2]
PROMPT = "the cat sat on "
MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a mat. "}]
SPOKEN = ChatPrompt((ChatMessage("system", "be brief"), ChatMessage("user", "a mat. ")))
GOES_ON: dict[str, Any] = {"ignore_eos": True}
WAYS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "seed": 11}}


@pytest.fixture(scope="module")
async def shared(valkey_url: str) -> AsyncIterator[Door]:
    """A cluster that no test harms."""
    async with Bench(valkey_url) as bench, door(bench) as opened:
        yield opened


@pytest.fixture
async def bench(valkey_url: str) -> AsyncIterator[Bench]:
    async with Bench(valkey_url) as made:
        yield made


@pytest.fixture
async def client(shared: Door) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def sampling(way: dict[str, Any], **rest: Any) -> SamplingParams:
    return SamplingParams(temperature=way["temperature"], **rest)


# --- the same text through both doors -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_text_through_http_is_the_text_through_grpc(shared: Door, client: AsyncOpenAI, way: str) -> None:
    told = WAYS[way]
    heard = await hear(
        shared.grpc,
        GenerationRequest(
            TextPrompt(PROMPT), max_tokens=40, sampling=sampling(told), seed=told.get("seed"), ignore_eos=True
        ),
    )
    whole = await client.completions.create(model="toy", prompt=PROMPT, max_tokens=40, extra_body=GOES_ON, **told)
    stream = await client.completions.create(
        model="toy", prompt=PROMPT, max_tokens=40, extra_body=GOES_ON, stream=True, **told
    )
    streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == streamed == heard.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ToyTokenizer().encode(PROMPT)), 40)


@pytest.mark.parametrize("way", WAYS)
async def test_a_conversation_through_http_is_the_one_through_grpc(shared: Door, client: AsyncOpenAI, way: str) -> None:
    told = WAYS[way]
    heard = await hear(
        shared.grpc,
        GenerationRequest(SPOKEN, max_tokens=30, sampling=sampling(told), seed=told.get("seed"), ignore_eos=True),
    )
    whole = await client.chat.completions.create(
        model="toy", messages=MESSAGES, max_completion_tokens=30, extra_body=GOES_ON, **told
    )
    stream = await client.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        max_tokens=30,
        extra_body=GOES_ON,
        stream=True,
        stream_options={"include_usage": True},
        **told,
    )
    chunks = [chunk async for chunk in stream]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == streamed == heard.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_the_synchronous_client_is_answered_too(shared: Door) -> None:
    def ask() -> tuple[str, str]:
        with OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
            known: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 20, "extra_body": GOES_ON}
            whole = client.chat.completions.create(messages=MESSAGES, **known)
            stream = client.chat.completions.create(messages=MESSAGES, stream=True, **known)
            assert [model.id for model in client.models.list()] == ["toy"]
            assert client.models.retrieve("toy").id == "toy"
            return whole.choices[0].message.content or "", "".join(
                chunk.choices[0].delta.content or "" for chunk in stream
            )

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed != ""


@pytest.mark.parametrize("page", ["README.md", "docs/openai.md"])
async def test_the_example_of_the_page_is_answered(shared: Door, page: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    told = "http://127.0.0.1:8000"
    assert told in code
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code.replace(told, shared.url), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert out.strip()


async def test_token_ids_and_lists_of_prompts_are_each_continued(client: AsyncOpenAI) -> None:
    ids = ToyTokenizer().encode(PROMPT)
    known: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 12, "extra_body": GOES_ON}
    [text] = (await client.completions.create(prompt=PROMPT, **known)).choices
    for prompt in (ids, [PROMPT, "a mat "], [ids, ids]):
        choices = (await client.completions.create(prompt=prompt, **known)).choices
        assert choices[0].text == text.text
        assert [choice.index for choice in choices] == list(range(2 if isinstance(prompt[0], list | str) else 1))


# --- samples ------------------------------------------------------------------------------------------------------


async def test_samples_differ_and_each_is_the_one_of_its_index(shared: Door, client: AsyncOpenAI) -> None:
    known: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": 16, "seed": 5, "extra_body": GOES_ON}
    whole = await client.completions.create(n=3, **known)
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 3
    for index, text in enumerate(texts):
        heard = await hear(
            shared.grpc,
            GenerationRequest(TextPrompt(PROMPT), max_tokens=16, seed=5, ignore_eos=True, sample_index=index),
        )
        assert text == heard.text
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ToyTokenizer().encode(PROMPT)), 48)


async def test_streamed_samples_are_told_by_their_index(client: AsyncOpenAI) -> None:
    known: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": 16, "seed": 5, "extra_body": GOES_ON}
    whole = await client.completions.create(n=3, **known)
    texts, ends = [""] * 3, [""] * 3
    async for chunk in await client.completions.create(n=3, stream=True, **known):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason or ""
    assert texts == [choice.text for choice in whole.choices]
    assert ends == ["length"] * 3


async def test_samples_of_a_conversation_are_told_by_their_index_too(client: AsyncOpenAI) -> None:
    known: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "max_tokens": 12, "seed": 5, "extra_body": GOES_ON}
    whole = await client.chat.completions.create(n=3, **known)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [""] * 3
    async for chunk in await client.chat.completions.create(n=3, stream=True, **known):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3


# --- parameters ---------------------------------------------------------------------------------------------------

GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top_p": ({"top_p": 0.6}, {"sampling": SamplingParams(top_p=0.6)}),
    "top_k": ({"top_k": 3}, {"sampling": SamplingParams(top_k=3)}),
    "top_k of all": ({"top_k": -1}, {}),
    "min_p": ({"min_p": 0.2}, {"sampling": SamplingParams(min_p=0.2)}),
    "temperature": ({"temperature": 1.7}, {"sampling": SamplingParams(temperature=1.7)}),
    "presence_penalty": ({"presence_penalty": 1.5}, {"sampling": SamplingParams(presence_penalty=1.5)}),
    "frequency_penalty": ({"frequency_penalty": -1.5}, {"sampling": SamplingParams(frequency_penalty=-1.5)}),
    "repetition_penalty": ({"repetition_penalty": 1.4}, {"sampling": SamplingParams(repetition_penalty=1.4)}),
    "logit_bias": (
        {"logit_bias": {"7": 6.5, "9": -100}},
        {"sampling": SamplingParams(logit_bias=((7, 6.5), (9, -100.0)))},
    ),
    "allowed_token_ids": (
        {"allowed_token_ids": [5, 6, 7, 8]},
        {"sampling": SamplingParams(allowed_token_ids=(5, 6, 7, 8))},
    ),
    "guided_choice": (
        {"ignore_eos": False, "guided_choice": ["the cat", "a mat"]},
        {"ignore_eos": False, "sampling": SamplingParams(grammar=Grammar(GrammarKind.CHOICES, '["the cat", "a mat"]'))},
    ),
    "guided_regex": (
        {"ignore_eos": False, "guided_regex": "[ab]{9}"},
        {"ignore_eos": False, "sampling": SamplingParams(grammar=Grammar(GrammarKind.REGEX, "[ab]{9}"))},
    ),
    "min_tokens": (
        {"min_tokens": 9, "ignore_eos": False, "logit_bias": {"0": 50}},
        {"ignore_eos": False, "sampling": SamplingParams(min_tokens=9, logit_bias=((0, 50.0),))},
    ),
    "stop_token_ids": ({"stop_token_ids": list(range(40))}, {"stop_token_ids": tuple(range(40))}),
    "drafter": ({"outrider": {"drafter": "toy"}}, {"drafter": "toy"}),
    "mode": ({"outrider": {"mode": "coupled"}}, {"mode": Mode.COUPLED}),
    "gamma and window": ({"outrider": {"gamma": 2, "window": 4}}, {}),
    "off": ({"outrider": {"off": True}}, {}),
    "nothing of it": ({"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}, {}),
    "a null for each": ({"top_p": None, "stop": None, "n": None, "logit_bias": None, "suffix": None}, {}),
}


@pytest.mark.parametrize("name", GIVEN)
async def test_a_parameter_means_what_it_means_over_grpc(shared: Door, name: str) -> None:
    given, fields = GIVEN[name]
    told = await shared.whole(**{"prompt": PROMPT, "max_tokens": 16, "seed": 3, "ignore_eos": True, **given})
    request = GenerationRequest(TextPrompt(PROMPT), **{"max_tokens": 16, "seed": 3, "ignore_eos": True, **fields})
    assert told["choices"][0]["text"] == (await hear(shared.grpc, request)).text


async def test_a_stop_string_ends_text_logprobs_and_usage_together(shared: Door) -> None:
    """Case 2, over HTTP."""
    known: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    whole = await shared.whole(**known)
    text = whole["choices"][0]["text"]
    stop = text[20:22]
    for stops in (stop, [stop, "never"]):
        told = await shared.whole(**known, stop=stops, logprobs=0)
        [choice] = told["choices"]
        assert choice["text"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert len(choice["logprobs"]["tokens"]) == told["usage"]["completion_tokens"]
        assert len(choice["logprobs"]["token_logprobs"]) == told["usage"]["completion_tokens"]


async def test_logprobs_without_top_ones_have_empty_lists(client: AsyncOpenAI) -> None:
    """Case 30, over HTTP."""
    told = await client.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=0, extra_body=GOES_ON
    )
    assert told.choices[0].logprobs is not None
    entries = told.choices[0].logprobs.content or []
    assert len(entries) == 6
    assert all(entry.top_logprobs == [] and entry.bytes for entry in entries)
    known: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    plain = await client.completions.create(**known, logprobs=0, extra_body=GOES_ON)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.top_logprobs == [{}] * 6


async def test_the_likeliest_tokens_are_told_with_each_token_streamed_or_not(client: AsyncOpenAI) -> None:
    known: dict[str, Any] = {
        "model": "toy", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3,
        "extra_body": GOES_ON,
    }  # fmt: skip
    told = await client.chat.completions.create(**known)
    assert told.choices[0].logprobs is not None
    whole = told.choices[0].logprobs.content or []
    streamed: list[Any] = []
    async for chunk in await client.chat.completions.create(**known, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == whole
    assert all(len(entry.top_logprobs) == 3 for entry in whole)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in whole), "greedy takes the likeliest"


async def test_every_chunk_is_valid_utf8_and_the_chunks_are_the_text(shared: Door) -> None:
    """Case 27, over HTTP: the toy's bytes are cut anywhere."""
    said = "你好, naïve 🙂 e\u0301"
    ids = ToyTokenizer().encode(said)
    bias = {str(token): 30.0 for token in set(ids)}
    for seed in range(3):
        known: dict[str, Any] = {
            "prompt": said, "seed": seed, "max_tokens": 40, "ignore_eos": True, "logit_bias": bias
        }  # fmt: skip
        chunks = await shared.chunks(**known)
        whole = (await shared.whole(**known))["choices"][0]["text"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
        assert whole.encode().decode() == whole


async def test_a_prediction_is_counted_in_the_usage(client: AsyncOpenAI) -> None:
    known: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    said = (await client.chat.completions.create(**known, extra_body=GOES_ON)).choices[0].message.content or ""
    told = await client.chat.completions.create(
        **known, extra_body=GOES_ON, prediction={"type": "content", "content": said}
    )
    assert told.choices[0].message.content == said
    assert told.usage is not None
    details = told.usage.completion_tokens_details
    assert details is not None
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None
    assert rejected is not None
    assert accepted + rejected == len(ToyTokenizer().encode(said))


async def test_prompt_tokens_whose_kv_was_there_are_in_the_usage_of_both_doors(shared: Door) -> None:
    lot = random.Random(3)
    first, other = ([lot.randrange(5, 200) for _ in range(200)] for _ in range(2))

    async def cached(prompt: list[int], stream: bool) -> int:
        known: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        if stream:
            told = (await shared.chunks(**known, stream_options={"include_usage": True}))[-1]
        else:
            told = await shared.whole(**known)
        assert told["usage"]["prompt_tokens"] == 200
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(first, False), await cached(first, False), await cached(first, True)] == [0, 192, 192]
    assert [await cached(other, True), await cached([*other[:100], *first[:100]], False)] == [0, 64]
    request = GenerationRequest(TokenPrompt(tuple(first)), max_tokens=4, ignore_eos=True)
    assert (await hear(shared.grpc, request)).finished.usage.cached_tokens == 192


# --- what is told beside the text ---------------------------------------------------------------------------------


async def test_an_answer_says_how_it_was_made(shared: Door) -> None:
    known: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    told = await shared.whole(**known, outrider={"return_token_origin": True, "gamma": 4, "window": 8})
    ours = told["outrider"]
    assert ours["session_id"]
    assert (ours["mode"], ours["guarantee"]) == ("greedy", "bitwise")
    figures, kinds = ours["figures"], told["choices"][0]["outrider"]["kinds"]
    assert figures["num_accepted"] == kinds.count("accepted") > 0
    assert len(kinds) == len(told["choices"][0]["outrider"]["token_ids"]) == 30
    speculation = told["metrics"]["speculative_decoding"]
    histogram = speculation["acceptance_histogram"]
    assert sum(histogram) == speculation["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == speculation["num_accepted_draft_tokens"]
    assert speculation["num_accepted_draft_tokens"] == figures["num_accepted"]
    assert len(histogram) == speculation["num_spec_tokens"] + 1
    assert 1.0 <= speculation["mean_acceptance_length"] <= speculation["num_spec_tokens"] + 1


async def test_times_are_told_per_token_not_per_round(shared: Door) -> None:
    """Case 29, over HTTP: the mean time between tokens is that of one token."""
    told = await shared.whole(prompt=PROMPT, temperature=0, max_tokens=30, ignore_eos=True)
    metrics = told["metrics"]
    assert metrics["mean_itl_ms"] == pytest.approx(1000 / metrics["tokens_per_second"])
    assert metrics["mean_itl_ms"] * 29 <= metrics["generation_time_ms"] * 1.001


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_queue_time_is_the_wait_for_a_place(bench: Bench, stream: bool) -> None:
    async with door(bench, drafts=False, verifier={"toy_delay_s": 0.01}, max_sessions=1) as opened:
        sessions, value = opened.app.sessions, opened.app.metrics.registry.get_sample_value
        assert sessions is not None
        first = asyncio.create_task(opened.ask(prompt=PROMPT, max_tokens=40, **GOES_ON))
        await until(lambda: len(sessions) == 1)
        known: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, **GOES_ON}
        told = (await opened.chunks(**known))[-1] if stream else await opened.whole(**known)
        waits_ms = [each["metrics"]["queue_time_ms"] for each in ((await first).json(), told)]
        assert waits_ms[0] < waits_ms[1] < told["metrics"]["time_to_first_token_ms"]
        assert sum(waits_ms) / 1000 >= (value("outrider_admission_wait_seconds_sum") or 0.0) > 0
        assert told["outrider"]["figures"]["queue_s"] < waits_ms[1] / 1000, "that is what its passes were waited for"


async def test_a_stream_is_a_chunk_per_round_and_its_last_one_has_the_figures(shared: Door) -> None:
    chunks = await shared.chunks(
        prompt=PROMPT, temperature=0, max_tokens=30, ignore_eos=True, outrider={"return_token_origin": True}
    )
    first, *rounds, last = chunks
    figures = last["outrider"]["figures"]
    assert first["outrider"]["session_id"] == last["outrider"]["session_id"]
    assert len(rounds) == figures["num_rounds"]
    assert [t for chunk in rounds for t in chunk["choices"][0]["outrider"]["token_ids"]]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == figures["num_accepted"]


async def test_a_session_goes_on_over_http_and_is_the_one_of_grpc(shared: Door) -> None:
    known: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
    first = await shared.whole(prompt=PROMPT, **known)
    session_id = first["outrider"]["session_id"]
    second = await shared.whole(prompt="a mat", **known, outrider={"session_id": session_id, "request_id": "r"})
    again = await shared.whole(prompt="a mat", **known, outrider={"session_id": session_id, "request_id": "r"})
    assert again["choices"][0]["text"] == second["choices"][0]["text"]
    summary = await shared.grpc.session(session_id, include_token_ids=True)
    whole = GenerationRequest(
        TokenPrompt(summary.token_ids[:-10]), max_tokens=10, sampling=SamplingParams(temperature=0), ignore_eos=True
    )
    assert list(summary.token_ids[-10:]) == (await hear(shared.grpc, whole)).token_ids
    assert second["usage"]["prompt_tokens"] == len(summary.token_ids) - 10


# --- refusals -----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -1}, "temperature"),
    "no number": ({"temperature": "hot"}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "stop": ({"stop": [""]}, "stop[0]"),
    "stops": ({"stop": [1]}, "stop[0]"),
    "n": ({"n": 0}, "n"),
    "many": ({"n": 129}, "n"),
    "suffix": ({"suffix": "a"}, "suffix"),
    "best_of": ({"best_of": 3}, "best_of"),
    "beams": ({"use_beam_search": True}, "use_beam_search"),
    "an unknown field": ({"temprature": 1}, "temprature"),
    "a gamma": ({"outrider": {"gamma": 0}}, "outrider.gamma"),
    "an unknown one of ours": ({"outrider": {"gama": 1}}, "outrider.gama"),
    "off and gamma": ({"outrider": {"off": True, "gamma": 2}}, "outrider.off"),
    "a mode": ({"outrider": {"mode": "greedy"}}, "temperature"),
    "a token": ({"prompt": [5, 70000]}, "prompt[1]"),
    "no prompt": ({"prompt": []}, "prompt"),
    "a bias": ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    "options": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "a session of several": ({"n": 2, "outrider": {"session_id": "s"}}, "outrider.session_id"),
    "two grammars": ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_bad_field_is_named(shared: Door, name: str) -> None:
    given, field = REFUSED[name]
    response = await shared.ask(**{"prompt": PROMPT, **given})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert field in error["message"]


CHAT_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    "a role": ({"messages": [{"role": "prophet", "content": "x"}]}, "messages[0].role"),
    "no messages": ({"messages": []}, "messages"),
    "audio": ({"audio": {"voice": "v"}}, "audio"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "effort": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "top without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "two lengths": ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
}


@pytest.mark.parametrize("name", CHAT_REFUSED)
async def test_a_bad_field_of_a_conversation_is_named(shared: Door, name: str) -> None:
    given, field = CHAT_REFUSED[name]
    response = await shared.ask("/v1/chat/completions", **{"messages": MESSAGES, **given})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


async def test_errors_are_the_classes_that_the_openai_package_knows(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="toy", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="session"):
        await client.completions.create(model="toy", prompt="x", extra_body={"outrider": {"session_id": "nobody"}})
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="toy", prompt="x", stream=True, temperature=-1)


async def test_what_is_no_json_is_refused_and_refusals_are_counted(shared: Door) -> None:
    before = await _refused(shared, "invalid_request")
    bodies = (
        b"{",
        b"[]",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b"\xff",
        b"[" * 5000,
        b'{"seed": 1' + b"0" * 5000,
    )
    for body in bodies:
        response = await shared.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, body[:20]
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await shared.ask(prompt=PROMPT, temperature=-1)).status_code == 400
    assert await _refused(shared, "invalid_request") >= before + 3


async def _refused(shared: Door, reason: str) -> float:
    text = (await shared.http.get("/metrics")).text
    for line in text.splitlines():
        if line.startswith(f'outrider_refused_calls_total{{reason="{reason}"}}'):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


async def test_a_request_has_a_name_in_the_response(shared: Door) -> None:
    response = await shared.http.get("/health", headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    odd = await shared.http.get("/health", headers={"x-request-id": "no spaces, no commas"})
    assert odd.headers["x-request-id"].startswith("req_")


async def test_unknown_places_and_methods_are_errors_of_the_same_shape(shared: Door) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        response = await shared.http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"]


async def test_the_schema_shows_every_route(shared: Door) -> None:
    schema = (await shared.http.get("/openapi.json")).json()
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/health", "/metrics"}
    assert paths <= set(schema["paths"])
    body = schema["components"]["schemas"]["ChatRequest"]
    assert body["additionalProperties"] is False
    assert {"messages", "user", "outrider", "tools"} <= set(body["properties"])


# --- keys, limits, ends -------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_frees_its_place_streaming_or_not(bench: Bench) -> None:
    """Case 22, over HTTP."""
    async with door(bench, verifier={"toy_delay_s": 0.01}) as opened:
        sessions = opened.app.sessions
        assert sessions is not None
        for stream in (True, False):
            body = {"prompt": PROMPT, "ignore_eos": True, "stream": stream, "max_tokens": 3900}
            asking = asyncio.create_task(opened.http.post("/v1/completions", json=body))
            await until(lambda: len(sessions) == 1)
            await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: len(sessions) == 0)
        burst = await asyncio.gather(
            *(opened.ask(prompt=PROMPT, max_tokens=4, ignore_eos=True) for _ in range(16)), return_exceptions=False
        )
        assert [each.status_code for each in burst] == [200] * 16


async def test_a_client_that_does_not_read_pauses_its_session(bench: Bench) -> None:
    async with door(bench, drafts=False, verifier={"context_len": 1 << 16}) as opened:
        sessions = opened.app.sessions
        assert sessions is not None
        host, _, port = opened.url.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(
            {"prompt": PROMPT, "ignore_eos": True, "stream": True, "logprobs": 20, "max_tokens": 40000}
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        try:
            await until(lambda: len(sessions.running()) == 1)
            [driver] = sessions.running()
            lengths = [0, 1]
            while lengths[-1] != lengths[-2]:  # until it stands still
                await asyncio.sleep(0.5)
                lengths.append(len(driver._rounds.tokens))
            assert lengths[-1] < 40000
        finally:
            writer.transport.abort()
        await until(lambda: len(sessions) == 0)


async def test_a_client_that_does_not_read_for_too_long_is_cut_off(bench: Bench) -> None:
    """By the server, with all that still waits to be sent: the client never reads, and never closes."""
    async with door(bench, drafts=False, verifier={"context_len": 1 << 16}, http_stall_timeout_s=0.3) as opened:
        sessions, http = opened.app.sessions, opened.app.http
        assert sessions is not None
        assert http is not None
        connections: set[Any] = http._server.server_state.connections
        host, _, port = opened.url.removeprefix("http://").rpartition(":")
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect((host, int(port)))
            body = json.dumps(
                {"prompt": PROMPT, "ignore_eos": True, "stream": True, "logprobs": 20, "max_tokens": 40000}
            ).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            silent.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: len(sessions) == 1)
            await until(lambda: len(sessions) == 0, timeout_s=60)
            await until(lambda: silent.getsockname() not in {each.client for each in connections})


async def test_a_drain_tells_streams_where_to_go_on_and_health_why_it_refuses(bench: Bench) -> None:
    async with door(bench, verifier={"toy_delay_s": 0.01}, hand_over_after_s=2.0) as opened:
        told: list[Any] = []

        async def listen() -> None:
            told.extend([chunk async for chunk in opened.stream(prompt=PROMPT, ignore_eos=True, max_tokens=3000)])

        listening = asyncio.create_task(listen())
        await until(lambda: len(opened.app.sessions or ()) == 1)
        draining = asyncio.create_task(opened.app.drain())
        await asyncio.sleep(0.05)
        health = await opened.http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "the orchestrator is stopping")
        assert health.headers["retry-after"] == "1"
        refused = await opened.ask(prompt=PROMPT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        await draining
        await listening
        assert told[-1]["error"]["code"] == "handed_over"
        assert told[-1]["error"]["outrider"]["session_id"] == told[0]["outrider"]["session_id"]
        position = told[-1]["error"]["outrider"]["next_position"]
        assert position > told[0]["outrider"]["prompt_len"]


async def test_without_a_verifier_health_and_requests_say_so(bench: Bench) -> None:
    async with door(bench, drafts=False, verifier_deadline_s=0.3) as opened:
        await opened.verifier.kill()
        async with asyncio.timeout(60):
            while (health := await opened.http.get("/health")).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert "no verifier of toy" in health.json()["reason"]
        refused = await opened.ask(prompt=PROMPT)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "service_unavailable_error"


async def test_a_body_or_head_that_is_too_large_or_slow_is_turned_away(bench: Bench) -> None:
    limits: dict[str, Any] = {
        "http_max_body_bytes": 4096, "http_max_head_bytes": 2048, "http_read_timeout_s": 1.5, "http_max_connections": 40
    }  # fmt: skip
    async with door(bench, drafts=False, **limits) as opened:
        assert (await opened.ask(prompt="x" * 5000)).status_code == 413

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield b" " * 1000

        chunked = await opened.http.post("/v1/completions", content=parts())
        assert chunked.status_code == 413
        assert chunked.json()["error"]["code"] == "body_too_large"
        for words in (b"", b"GET /health HTTP/1.1\r\nhost: h\r\nx: "):
            assert await _answer_to(opened, words) == b"", "closed without an answer"
        half = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{"
        assert b" 408 " in await _answer_to(opened, half)
        assert b" 400 " in await _answer_to(opened, b"GET /health HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 4000)
        assert (await opened.http.get("/health")).status_code == 200


async def _answer_to(opened: Door, words: bytes) -> bytes:
    """Return all that comes back until the connection is closed from the other side."""
    host, _, port = opened.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(words)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


async def test_keys_and_their_limits_are_those_of_grpc(bench: Bench, tmp_path: Path) -> None:
    key, record = make_key("k", KeyLimits(requests_per_minute=3, tokens_per_minute=5000), time.time())
    (tmp_path / "keys").write_bytes(write_record(record) + b"\n")
    known: dict[str, Any] = {"require_keys": True, "store_keys": False, "key_file": str(tmp_path / "keys")}
    async with door(bench, drafts=False, **known) as opened:
        assert (await opened.ask(prompt=PROMPT)).status_code == 401
        assert (await opened.http.get("/metrics")).status_code == 401
        async with AsyncOpenAI(base_url=f"{opened.url}/v1", api_key=f"{key[:-1]}x", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with AsyncOpenAI(base_url=f"{opened.url}/v1", api_key=key, max_retries=0) as client:
            told = await client.completions.with_raw_response.create(model="toy", prompt=PROMPT, max_tokens=4)
            assert told.headers["x-ratelimit-limit-requests"] == "3"
            with pytest.raises(openai.RateLimitError) as limited:
                for _ in range(4):
                    await client.completions.create(model="toy", prompt=PROMPT, max_tokens=4)
        assert int(limited.value.response.headers["retry-after"]) >= 1
        assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        session_id = told.parse().model_dump()["outrider"]["session_id"]
        refused = await opened.ask(prompt="x", outrider={"session_id": session_id})
        assert refused.status_code == 401


async def test_every_route_but_health_needs_a_key_and_counts_for_it(bench: Bench, tmp_path: Path) -> None:
    keys = [make_key(f"k{index}", KeyLimits(requests_per_minute=2, concurrent=2), time.time()) for index in range(9)]
    (tmp_path / "keys").write_bytes(b"".join(write_record(record) + b"\n" for _, record in keys))
    known: dict[str, Any] = {"require_keys": True, "store_keys": False, "key_file": str(tmp_path / "keys")}
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    }
    uncounted = {"/metrics", "/cluster/events"}
    async with door(bench, drafts=False, **known) as opened:
        paths = (await opened.http.get("/openapi.json")).json()["paths"]
        assert bodies.keys() | uncounted < paths.keys()
        for path, (key, _) in zip(sorted(paths.keys() - {"/health"}), keys, strict=False):
            [method] = paths[path]
            address, body = path.replace("{model}", "toy"), bodies.get(path)
            async with opened.http.stream(method, address, json=body) as refused:
                assert refused.status_code == 401, path
            if path in uncounted:
                continue
            bearer = {"authorization": f"Bearer {key}"}
            statuses = [
                (await opened.http.request(method, address, json=body, headers=bearer)).status_code for _ in range(3)
            ]
            assert statuses == [200, 200, 429], path


async def test_samples_of_a_key_run_no_more_at_once_than_it_allows(bench: Bench, tmp_path: Path) -> None:
    key, record = make_key("k", KeyLimits(concurrent=2), time.time())
    (tmp_path / "keys").write_bytes(write_record(record) + b"\n")
    known: dict[str, Any] = {"require_keys": True, "store_keys": False, "key_file": str(tmp_path / "keys")}
    async with door(bench, drafts=False, **known) as opened:
        opened.http.headers["authorization"] = f"Bearer {key}"
        told = await opened.whole(prompt=PROMPT, n=6, max_tokens=8, ignore_eos=True)
        assert [choice["index"] for choice in told["choices"]] == list(range(6))


async def test_tls_has_the_certificate_of_the_grpc_door_and_follows_its_files(bench: Bench, tmp_path: Path) -> None:
    authority, cert, key = trustme.CA(), tmp_path / "cert", tmp_path / "key"
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))

    def issue(made: trustme.CA) -> None:
        issued = made.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))

    issue(authority)
    verifier, _ = await bench.verifier()
    _, app, client = await bench.orchestrator(
        [verifier], [], http_listen=FREE, serve_tls_cert=str(cert), serve_tls_key=str(key)
    )
    await client.close()
    assert app.http is not None
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca"))
    async with httpx.AsyncClient(base_url=f"https://{app.http.address}", verify=trusted) as http:
        assert (await http.get("/v1/models")).status_code == 200
    issue(trustme.CA())  # of somebody else: whoever trusts the first is not served any more
    async with httpx.AsyncClient(base_url=f"https://{app.http.address}", verify=trusted) as http:
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await http.get("/v1/models")


async def test_only_named_origins_may_call_from_a_browser(bench: Bench, shared: Door) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in (await shared.http.options("/v1/completions", headers=ask)).headers
    async with door(bench, drafts=False, http_cors_origins=("https://a.example",)) as opened:
        allowed = await opened.http.options("/v1/completions", headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = await opened.http.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
