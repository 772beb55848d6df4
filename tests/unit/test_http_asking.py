"""Bodies of HTTP requests become the requests that gRPC's clients make."""

import json
from typing import Any

import pytest

from orchestrator.http.asking import TOOL_END, Asked, chat_asked, completion_asked
from orchestrator.http.errors import told
from orchestrator.http.figures import speculation
from orchestrator.http.invalid import param_of
from orchestrator.http.reading import read_json
from orchestrator.http.schema import IGNORED, REFUSED, ChatRequest, CompletionRequest
from outrider.errors import (
    HandedOver,
    Internal,
    InvalidRequest,
    LeaseLost,
    LimitReached,
    OutriderError,
    ResourceExhausted,
    StoreUnavailable,
    Unauthenticated,
    Unavailable,
)
from outrider.generation import ChatPrompt, Figures, TextPrediction, TokenPrompt
from outrider.messages import Grammar, GrammarKind

USER: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ANY = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


def chat(calls_known: bool = True, **fields: Any) -> Asked:
    return chat_asked(ChatRequest.model_validate({**USER, **fields}), "m", calls_known=calls_known)


def completion(**fields: Any) -> Asked:
    return completion_asked(CompletionRequest.model_validate({"prompt": "x", **fields}), "m")


def test_a_request_that_says_nothing_gets_openais_defaults() -> None:
    [text] = completion().requests
    assert (text.max_tokens, text.sampling.temperature, text.num_logprobs) == (16, 1.0, None)
    [spoken] = chat().requests
    assert (spoken.max_tokens, spoken.seed, spoken.stop) == (None, None, ())


@pytest.mark.parametrize("name", IGNORED)
def test_a_field_that_changes_nothing_is_taken(name: str) -> None:
    assert completion(**{name: "x"}).requests == completion().requests


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_is_not_supported_is_refused_by_name_unless_it_means_nothing(name: str) -> None:
    harmless, _ = REFUSED[name]
    for value in (None, *harmless):
        assert completion(**{name: value}).requests == completion().requests
    with pytest.raises(InvalidRequest, match="not supported") as refused:
        completion(**{name: {"some": "thing"}})
    assert refused.value.field == name


def test_a_misspelt_field_is_refused_with_the_field_it_may_be() -> None:
    with pytest.raises(InvalidRequest, match="did you mean max_tokens"):
        completion(max_token=3)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}'),
        ),
        ({"guided_json": {"type": "object"}}, ANY),
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"guided_choice": ["ä", "b"]}, Grammar(GrammarKind.CHOICES, '["ä", "b"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, ANY),
        ({"structured_outputs": {"json_object": True}}, ANY),
        ({"structured_outputs": {"regex": "a"}}, Grammar(GrammarKind.REGEX, "a")),
    ],
    ids=["text", "object", "schema", "guided json", "regex", "choice", "lark", "within", "any object", "within regex"],
)
def test_every_way_to_say_what_the_answer_must_match_is_one_grammar(
    fields: dict[str, Any], grammar: Grammar | None
) -> None:
    assert chat(**fields).requests[0].sampling.grammar == grammar


def test_samples_and_prompts_are_numbered_prompt_by_prompt() -> None:
    asked = completion(prompt=[[1, 2], [3]], n=2)
    assert asked.num_samples == 2
    assert [(each.prompt, each.sample_index) for each in asked.requests] == [
        (TokenPrompt((1, 2)), 0), (TokenPrompt((1, 2)), 1), (TokenPrompt((3,)), 0), (TokenPrompt((3,)), 1),
    ]  # fmt: skip


def test_echoed_log_probabilities_are_those_of_the_prompt_too() -> None:
    assert completion(echo=True, logprobs=2).requests[0].num_prompt_logprobs == 2
    assert completion(echo=True).requests[0].num_prompt_logprobs is None
    scored = completion(echo=True, logprobs=1, max_tokens=0).requests[0]
    assert (scored.max_tokens, scored.num_prompt_logprobs) == (0, 1)


def test_a_negative_seed_is_a_seed_of_its_own() -> None:
    assert completion(seed=-1).requests[0].seed == 2**64 - 1
    assert completion(seed=5).requests[0].seed == 5


def test_a_priority_has_vllms_sign_at_the_top_and_grpcs_within() -> None:
    assert completion(priority=-3).requests[0].priority == 3
    [within] = completion(outrider={"priority": 3, "max_wait_s": 1.5}).requests
    assert (within.priority, within.max_wait_s) == (3, 1.5)
    with pytest.raises(InvalidRequest, match=r"nothing beside outrider\.priority"):
        completion(priority=-3, outrider={"priority": 3})


def test_messages_keep_their_calls_and_parts() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [],
         "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]  # fmt: skip
    [request] = chat(messages=messages, tools=[TOOL], chat_template_kwargs={"x": True}).requests
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0].content == "ab"
    assert prompt.messages[1].tool_calls[0].name == "add"
    assert prompt.messages[2].tool_call_id == "c"
    assert json.loads(prompt.tools) == [TOOL]
    assert json.loads(prompt.template_arguments) == {"x": True}


def test_tools_are_shown_to_the_model_unless_none_may_be_called() -> None:
    shown, hidden = chat(tools=[TOOL]), chat(tools=[TOOL], tool_choice="none")
    assert shown.parses_calls
    assert not hidden.parses_calls
    assert getattr(hidden.requests[0].prompt, "tools", None) == ""
    assert TOOL_END in chat(tools=[TOOL], parallel_tool_calls=False).requests[0].stop


def test_a_call_that_must_be_made_is_a_grammar() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        grammar = chat(tools=[TOOL], tool_choice=choice).requests[0].sampling.grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.LARK
        assert '"add"' in grammar.text
    with pytest.raises(InvalidRequest, match="not known how"):
        chat(calls_known=False, tools=[TOOL], tool_choice="required")
    with pytest.raises(InvalidRequest, match="name of one of the tools"):
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "sub"}})
    with pytest.raises(InvalidRequest, match="guided_regex"):
        chat(tools=[TOOL], tool_choice="required", guided_regex="a+")


def test_a_prediction_is_its_text() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(prediction={"type": "content", "content": content}).requests[0].prediction == TextPrediction("ab")


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling.top_p", "top_p"), ("text", "prompt"), ("token_ids[3]", "prompt[3]"), ("max_tokens", "max_tokens"),
        ("chat.messages[0].role", "messages[0].role"), ("speculation.gamma", "outrider.gamma"),
        ("session_id", "outrider.session_id"), ("stop_token_ids[1]", "stop_token_ids[1]"),
        ("chat.tools", "tools"), ("chat.template_arguments", "chat_template_kwargs"),
        ("chat.continue_final_message", "continue_final_message"), ("max_wait", "outrider.max_wait_s"),
        ("priority", "outrider.priority"), ("request_id", "outrider.request_id"), ("sample_index", "n"),
        ("prediction.text", "prediction.content"), ("processed_logprobs", "outrider.processed_logprobs"),
    ],
)  # fmt: skip
def test_fields_are_called_what_openai_calls_them(ours: str, theirs: str) -> None:
    assert param_of(ours) == theirs


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (InvalidRequest("sampling.top_p", 2, "less"), 400, "invalid_request", None),
        (Unauthenticated("no key"), 401, "unauthenticated", None),
        (LeaseLost("taken"), 409, "lease_lost", None),
        (ResourceExhausted("full", 2.2), 429, "resource_exhausted", "3"),
        (LimitReached("too many", 0.2, "requests_per_minute"), 429, "limit_reached", "1"),
        (Unavailable("gone"), 503, "unavailable", "1"),
        (StoreUnavailable("gone"), 503, "store_unavailable", "1"),
        (HandedOver("moved", "s", 7), 503, "handed_over", "1"),
        (Internal("secret detail"), 500, "internal", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, OutriderError) else None,
)
def test_an_error_has_its_status_shape_and_headers(
    error: OutriderError, status: int, code: str, retry: str | None
) -> None:
    found, body, headers = told(error)
    assert (found, body["error"]["code"], headers.get("retry-after")) == (status, code, retry)
    assert set(body["error"]) >= {"message", "type", "param", "code"}
    assert "secret" not in body["error"]["message"]


def test_the_limit_that_was_reached_is_in_the_headers() -> None:
    _, _, headers = told(LimitReached("too many", 1.5, "tokens_per_minute"))
    assert headers["x-ratelimit-remaining-tokens"] == "0"
    assert headers["x-ratelimit-reset-tokens"] == "1.5s"


@pytest.mark.parametrize("body", [b"{", b'"\\ud800"', b"NaN", b"[" * 9000, b"1" * 5000, b'{"a": -Infinity}', b"\xff"])
def test_what_has_no_meaning_everywhere_is_no_json(body: bytes) -> None:
    with pytest.raises(ValueError):
        read_json(body)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert read_json(b'"\\ud83d\\ude42"') == "🙂"


# --- figures ------------------------------------------------------------------------------------------------------


def test_speculation_is_told_by_chains() -> None:
    """Three chains: of 0, 2 and 3 accepted drafts."""
    told = speculation(
        Figures(num_drafted=10, tested_per_position=(3, 2, 2, 1), accepted_per_position=(2, 2, 1, 0), num_accepted=5)
    )
    assert told["acceptance_histogram"] == [1, 0, 1, 1, 0]
    assert (told["num_spec_steps"], told["num_accepted_draft_tokens"], told["num_draft_tokens"]) == (3, 5, 10)
    assert told["mean_acceptance_length"] == pytest.approx(1 + 5 / 3)
    assert told["draft_acceptance_rate"] == 0.5
    assert told["num_spec_tokens"] == 4


def test_speculation_that_never_was_has_no_steps() -> None:
    told = speculation(Figures())
    assert (told["acceptance_histogram"], told["num_spec_steps"], told["mean_acceptance_length"]) == ([0], 0, 1.0)
