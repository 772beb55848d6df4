"""Keyword arguments become requests, each of them; events become answers."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

import outrider
from outrider.asking import CHAT, GRAMMARS, RENAMED, SAMPLING, Parameters, answer_of, request_of, samples_of
from outrider.codec.generation import request_from_proto, request_to_proto
from outrider.errors import InvalidRequest, ProtocolError
from outrider.generation import (
    ChatMessage,
    ChatPrompt,
    Chunk,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Notice,
    PromptLogprobs,
    SpeculationChoice,
    Started,
    TextPrediction,
    TextPrompt,
    TokenPrediction,
    TokenPrompt,
    ToolCall,
    Usage,
)
from outrider.ids import FinishReason, Mode, SessionId
from outrider.messages import Grammar, GrammarKind, SamplingParams, TokenLogprobs

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
PLAIN: dict[str, Any] = {
    "model": "m", "session_id": "s", "max_tokens": 5, "seed": 7, "stop": ["a", "b"], "stop_token_ids": [1, 2],
    "ignore_eos": True, "mode": Mode.COUPLED, "speculation": SpeculationChoice(gamma=3), "drafter": "d", "logprobs": 2,
    "prompt_logprobs": 1, "processed_logprobs": True, "return_token_origin": True, "sample_index": 3, "request_id": "r",
    "prediction": "p", "priority": 1, "max_wait_s": 2.0, "skip_special_tokens": False, "logit_bias": {3: 1.5},
    "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "temperature": 0.5, "top_k": 4,
    "top_p": 0.5, "min_p": 0.125, "allowed_token_ids": [3, 4], "min_tokens": 2, "regex": "a+",
}  # fmt: skip
CHATTY: dict[str, Any] = {
    "tools": TOOLS, "template_arguments": {"enable_thinking": False}, "add_generation_prompt": False,
    "continue_final_message": True, "chat_template": "x", "parse_special_tokens": True,
}  # fmt: skip
BY_THE_SERVER = {"end_token_ids", "grammar_end_ids"}


def made(prompt: Any, **parameters: Any) -> GenerationRequest:
    return request_of(prompt, parameters)  # type: ignore[arg-type]


def test_every_field_of_a_request_is_a_parameter() -> None:
    names = {RENAMED.get(name, name) for name in Parameters.__annotations__.keys() - GRAMMARS.keys()}
    fields = {
        entry.name for kind in (GenerationRequest, SamplingParams, ChatPrompt) for entry in dataclasses.fields(kind)
    }
    assert names == fields - {"prompt", "messages", "sampling", "grammar"} - BY_THE_SERVER
    assert PLAIN.keys() | CHATTY.keys() | GRAMMARS.keys() == Parameters.__annotations__.keys()


@pytest.mark.parametrize("name", sorted(PLAIN.keys() - {"regex", "speculation", "mode", "seed"} | CHATTY.keys()))
def test_each_parameter_reaches_the_request_and_nothing_else(name: str) -> None:
    value = {**PLAIN, **CHATTY}[name]
    chat = ChatPrompt((ChatMessage("user", "hi"),))
    field = RENAMED.get(name, name)
    request, plain = made(chat, **{name: value}), GenerationRequest(chat)
    for part in ((request.sampling, plain.sampling), (request.prompt, plain.prompt), (request, plain)):
        changed = {
            entry.name
            for entry in dataclasses.fields(part[0])
            if getattr(part[0], entry.name) != getattr(part[1], entry.name)
        }
        mine = part[0] is request.sampling if name in SAMPLING else part[0] is request.prompt if name in CHAT else None
        inner = {"sampling"} if name in SAMPLING else {"prompt"} if name in CHAT else {field}
        assert changed == ({field} if mine else inner if part[0] is request else set())


def test_all_of_them_pass_the_server_s_checks_together() -> None:
    parameters = PLAIN | {"prediction": [1, 2], "min_tokens": 0}  # which a grammar excludes
    request = made("the cat", **parameters)
    assert request_from_proto(request_to_proto(request)) == request
    assert request.prediction == TokenPrediction((1, 2))
    assert request.sampling.grammar == Grammar(GrammarKind.REGEX, "a+")
    chat = made([{"role": "assistant", "content": "hi"}], **CHATTY)
    assert request_from_proto(request_to_proto(chat)) == chat
    assert isinstance(chat.prompt, ChatPrompt)
    assert json.loads(chat.prompt.tools) == TOOLS


def test_values_take_the_shapes_that_people_write() -> None:
    request = made("x", stop="a", speculation="off", choices=["yes", "no"])
    assert (request.stop, request.speculation.off) == (("a",), True)
    assert request.sampling.grammar == Grammar(GrammarKind.CHOICES, '["yes", "no"]')
    assert made("x", json_schema={"type": "object"}).sampling.grammar == Grammar(
        GrammarKind.JSON_SCHEMA, '{"type": "object"}'
    )
    assert made("x", prediction="y").prediction == TextPrediction("y")
    assert made("x", prediction=None).prediction is None


def test_prompts_are_text_ids_messages_or_requests() -> None:
    assert made("x").prompt == TextPrompt("x")
    assert made([1, 2]).prompt == TokenPrompt((1, 2))
    assert made(TextPrompt("x")).prompt == TextPrompt("x")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x", "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "y", "tool_call_id": "c"},
        ChatMessage("user", "z"),
    ]
    assert made(messages).prompt == ChatPrompt((
        ChatMessage("user", "x", "n"),
        ChatMessage("assistant", "", tool_calls=(ToolCall("f", '{"a": 1}', "c"),), reasoning="hm"),
        ChatMessage("tool", "y", tool_call_id="c"),
        ChatMessage("user", "z"),
    ))  # fmt: skip
    before = GenerationRequest(TextPrompt("x"), max_tokens=3, sampling=SamplingParams(top_k=2))
    after = made(before, temperature=0.0, seed=1)
    assert after == dataclasses.replace(before, seed=1, sampling=SamplingParams(top_k=2, temperature=0.0))


@pytest.mark.parametrize(
    ("prompt", "parameters", "field"),
    [
        ("x", {"temprature": 1}, "parameters"),
        ("x", {"regex": "a", "lark": "b"}, "regex, lark"),
        ("x", {"tools": TOOLS}, "tools"),
        ([{"content": "x"}], {}, "messages[0]"),
        ([{"role": "user", "text": "x"}], {}, "messages[0]"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "messages[0].content"),
        (["x"], {}, "prompt"),
        (b"x", {}, "prompt"),
        ("x", {"stop": b"x"}, "stop"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_by_name(prompt: Any, parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(prompt, **parameters)
    assert refused.value.field == field


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a speculation that is none": ({"speculation": "maybe"}, "speculation", '"off"'),
    "a mode that is none": ({"mode": "fast"}, "mode", "greedy"),
    "a mode that is a number": ({"mode": 1}, "mode", "greedy"),
    "a temperature in words": ({"temperature": "hot"}, "sampling.temperature", "a number in 0 .. 100"),
    "log-probabilities in words": ({"logprobs": "a"}, "logprobs", "an integer in 0"),
    "half a token": ({"max_tokens": 2.5}, "max_tokens", "an integer in 1"),
    "a negative count": ({"max_tokens": -1}, "max_tokens", "an integer in 1"),
    "a stop that is a number": ({"stop": 5}, "stop", "a text, or several"),
    "stops of which one is a number": ({"stop": ["a", 5]}, "stop[1]", "text"),
    "stop ids as one": ({"stop_token_ids": 5}, "stop_token_ids", "token ids"),
    "a negative sample": ({"sample_index": -1}, "sample_index", "an integer in 0"),
    "a negative wait": ({"max_wait_s": -1}, "max_wait_s", "a number in 0"),
    "an endless wait": ({"max_wait_s": float("inf")}, "max_wait_s", "a number in 0"),
    "a flag in words": ({"ignore_eos": "no"}, "ignore_eos", "true or false"),
    "half a surrogate pair": ({"model": "\ud800"}, "model", "valid Unicode"),
    "biases without ids": ({"logit_bias": 5}, "sampling.logit_bias", "biases by token id"),
    "a bias of a word": ({"logit_bias": {"a": 1}}, "sampling.logit_bias", "an integer in 0"),
    "an allowed word": ({"allowed_token_ids": ["a"]}, "sampling.allowed_token_ids[0]", "an integer in 0"),
    "a schema that is no JSON": ({"json_schema": {"a": {1}}}, "json_schema", "what JSON can say"),
    "an expression that is a number": ({"regex": 5}, "sampling.grammar.regex", "text"),
    "choices as one text": ({"choices": "ab"}, "choices", "several texts"),
    "a choice that is a number": ({"choices": [1]}, "sampling.grammar.choices[0]", "text"),
    "a choice that JSON has no word for": ({"choices": [{1}]}, "choices", "what JSON can say"),
    "a prediction that is a number": ({"prediction": 5}, "prediction", "text, or token ids"),
    "a window in words": ({"speculation": SpeculationChoice(window="a")}, "speculation.window", "an integer"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_a_value_that_no_message_can_hold_is_refused_by_name_and_range(case: str) -> None:
    parameters, field, allowed = WRONG[case]
    with pytest.raises(InvalidRequest) as refused:
        request_to_proto(made("x", **parameters))
    assert refused.value.field == field
    assert allowed in refused.value.allowed


def test_a_mode_may_be_named_in_small_letters() -> None:
    assert made("x", mode="coupled").mode is Mode.COUPLED
    assert made("x", mode="auto").mode is None


@pytest.mark.parametrize("message", [
    {"role": "user"},
    {"role": "user", "content": None},
    {"role": "assistant"},
    {"role": "tool", "tool_call_id": "c"},
    {"role": "user", "tool_calls": [{"function": {"name": "f"}}]},
], ids=str)  # fmt: skip
def test_a_message_without_content_is_refused_unless_an_assistant_calls_tools(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="only beside tool_calls of an assistant") as refused:
        made([{"role": "user", "content": ""}, message])
    assert refused.value.field == "messages[1].content"


def test_samples_differ_in_their_index_only() -> None:
    request = GenerationRequest(TextPrompt("x"), seed=3)
    assert samples_of(request, 3) == [dataclasses.replace(request, sample_index=index) for index in range(3)]
    for count, session, field in ((0, "", "n"), (129, "", "n"), (2, "s", "session_id")):
        with pytest.raises(InvalidRequest) as refused:
            samples_of(dataclasses.replace(request, session_id=SessionId(session)), count)
        assert refused.value.field == field


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(-1.0, ((token, -1.0),))


def test_events_become_an_answer() -> None:
    started = Started(SessionId("s"), 3, Mode.GREEDY, model="m")
    prompt = [PromptLogprobs(0, (1, 2), (None, logprob(2))), PromptLogprobs(2, (3,), (logprob(3),))]
    events: list[GenerationEvent] = [
        started,
        *prompt,
        Chunk(3, (4, 5), "ab", (), (logprob(4), logprob(5))),
        Notice("drafter_lost"),
        *prompt,
        Chunk(5, (6,), "c", (), (logprob(6),)),
        Finished(FinishReason.STOP, "x", Usage(3, 3, 1)),
    ]
    answer = answer_of(events)
    assert (str(answer), answer.token_ids, answer.session_id) == ("abc", (4, 5, 6), "s")
    assert (answer.finish_reason, answer.matched, answer.usage.cached_tokens) == (FinishReason.STOP, "x", 1)
    assert answer.prompt_logprobs == (None, logprob(2), logprob(3))
    assert answer.logprobs == (logprob(4), logprob(5), logprob(6))
    assert [notice.reason for notice in answer.notices] == ["drafter_lost"]
    for part in (events[1:], events[:-1]):
        with pytest.raises(ProtocolError):
            answer_of(part)


def test_importing_the_package_loads_neither_grpc_nor_torch_and_a_client_never_loads_torch() -> None:
    code = (
        "import sys, outrider; assert not {'grpc', 'torch', 'numpy', 'google'} & sys.modules.keys(); "
        "outrider.Client, outrider.AsyncClient; assert 'grpc' in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_name_of_the_package_is_there() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    assert outrider.AsyncClient.__module__ == "outrider.client"
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        outrider.nobody  # noqa: B018
