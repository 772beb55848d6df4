"""What clients are told of bodies that are no requests: the field they sent, and what it may hold."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from orchestrator.http.asking import chat_asked, completion_asked
from orchestrator.http.errors import told
from orchestrator.http.invalid import STRICT, invalid, renamed
from orchestrator.http.schema import ChatRequest, CompletionRequest, OutriderOptions, StreamOptions, Strict
from outrider.errors import InvalidRequest, NotFound
from outrider.parameters import MAX_TOKENS
from outrider.store.errors import SessionNotFound

SAID = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def refused(model: type[BaseModel], body: Any, content_type: str = "application/json") -> InvalidRequest:
    """Return what is said of a body that has no request's shape; its place begins with the body, as in the door."""
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    return invalid([{**error, "loc": ("body", *error["loc"])} for error in found.value.errors()], content_type)


def refused_chat(*messages: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as found:
        chat_asked(ChatRequest(messages=list(messages)), "m", calls_known=True)
    return found.value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt is missing; expected a value"),
        ({"prompt": "x", "outrider": {"gama": 3}}, "outrider.gama: there is no such field; did you mean gamma?"),
        (
            {"prompt": "x", "structured_outputs": {"regexp": "a"}},
            "structured_outputs.regexp: there is no such field; did you mean regex?",
        ),
        (
            {"prompt": "x", "structured_outputs": {"jsn": "a"}},
            "structured_outputs.jsn: there is no such field; did you mean json?",
        ),
        ({"prompt": "x", "outrider": {"Zzz": 1}}, "outrider.Zzz: there is no such field"),
        ({"prompt": "x", "stop": 5}, "stop: 5 is not allowed; expected a string or a list"),
        ({"prompt": "x", "outrider": 5}, "outrider: 5 is not allowed; expected an object"),
        ({"prompt": "x", "ignore_eos": "no"}, "ignore_eos: 'no' is not allowed; expected true or false"),
        (
            {"prompt": [-1]},
            "prompt[0]: -1 is not allowed; expected a string or a token id in 0 .. 2147483647 or a list",
        ),
        ({"prompt": ["x", [5]]}, "prompt[1]: [5] is not allowed; expected a string"),
    ],
)
def test_what_is_wrong_with_a_body_is_said_in_plain_words(body: Any, message: str) -> None:
    assert refused(CompletionRequest, body).message == message


def test_a_long_name_of_a_model_is_shown_in_part() -> None:
    error = refused(CompletionRequest, {"prompt": "x", "model": "m" * 9000})
    assert (error.field, error.allowed) == ("model", "at most 256 characters")
    assert len(error.message) < 300


OPTIONAL = [
    *(("chat", name) for name in ChatRequest.model_fields if name != "messages"),
    *(("completion", name) for name in CompletionRequest.model_fields if name != "prompt"),
    *(("chat", f"outrider.{name}") for name in OutriderOptions.model_fields),
    *(("chat", f"stream_options.{name}") for name in StreamOptions.model_fields),
]


@pytest.mark.parametrize(("kind", "field"), OPTIONAL)
def test_null_is_the_same_as_leaving_a_field_out(kind: str, field: str) -> None:
    model, least = (ChatRequest, {"messages": [SAID]}) if kind == "chat" else (CompletionRequest, {"prompt": "x"})
    holder, _, name = field.rpartition(".")
    without: dict[str, Any] = {**least, holder: {}} if holder else least
    null: dict[str, Any] = {**least, holder: {name: None}} if holder else {**least, name: None}
    assert model.model_validate(null) == model.model_validate(without)


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("top_k", (-2, 2**31), "an integer in -1 .. 2147483647; 0 and -1 keep all"),
        ("seed", (-(2**63) - 1, 2**64), "an integer in -9223372036854775808 .. 18446744073709551615"),
        ("n", (0, 129), "an integer in 1 .. 128"),
        ("priority", (-9, 9), "an integer in -8 .. 8"),
        ("min_tokens", (-1, 2**31), "an integer in 0 .. 2147483647"),
    ],
)
def test_a_range_is_told_whole_whichever_end_is_passed(field: str, values: tuple[int, ...], allowed: str) -> None:
    assert {refused(CompletionRequest, {"prompt": "x", field: value}).allowed for value in values} == {allowed}


@pytest.mark.parametrize("value", [-1, 0, 2**31, 2**40])
def test_max_tokens_has_one_sentence_through_both_doors(value: int) -> None:
    with pytest.raises(InvalidRequest) as found:
        completion_asked(CompletionRequest(prompt="x", max_tokens=value), "m")
    assert (found.value.field, found.value.allowed) == ("max_tokens", MAX_TOKENS)


@pytest.mark.parametrize("value", [-1, 86_401])
def test_a_wait_has_both_its_bounds_named(value: int) -> None:
    error = refused(CompletionRequest, {"prompt": "x", "outrider": {"max_wait_s": value}})
    assert (error.field, error.allowed) == ("outrider.max_wait_s", "seconds in 0 .. 86400")


def test_a_conversation_without_messages_is_told_so() -> None:
    assert refused(ChatRequest, {"messages": []}).message.endswith("[] is not allowed; expected at least 1 of them")


@pytest.mark.parametrize("prompt", [[1] * 1000 + ["x"], ["x"] * 1000 + [1], [[1]] * 1000 + [["x"]], [1] * 1000 + [-1]])
def test_a_long_prompt_is_read_to_its_first_mistake_as_each_of_what_it_could_be(prompt: list[object]) -> None:
    with pytest.raises(ValidationError) as found:
        CompletionRequest.model_validate({"prompt": prompt})
    assert found.value.error_count() == 4, "a string, strings, ids, lists of ids"


def test_every_object_without_further_fields_has_its_names_at_hand() -> None:
    assert set(Strict.__subclasses__()) == set(STRICT.values())


def test_a_body_of_another_kind_is_refused_by_the_header_that_says_so() -> None:
    error = refused(CompletionRequest, b'{"prompt": "x"}', "application/x-www-form-urlencoded")
    assert error.field == "content-type"
    assert error.message.endswith("'application/x-www-form-urlencoded' is not allowed; expected application/json")


# --- messages -----------------------------------------------------------------------------------------------------


def test_a_misspelt_field_of_a_message_is_refused_with_the_field_it_may_be() -> None:
    error = refused_chat(SAID, {"role": "user", "contents": "x"})
    assert error.field == "messages[1].contents"
    assert error.message.endswith("did you mean content?")


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("rest", [{}, {"content": None}], ids=["unset", "null"])
def test_a_message_that_says_nothing_is_refused(role: str, rest: dict[str, Any]) -> None:
    assert refused_chat({"role": role, **rest}).field == "messages[0].content"


def test_only_an_assistant_with_calls_or_thoughts_may_say_nothing() -> None:
    assert refused_chat({"role": "user", "tool_calls": [CALL]}).field == "messages[0].content"
    for rest in ({"tool_calls": [CALL]}, {"reasoning_content": "hm"}):
        message: Any = {"role": "assistant", "content": None, **rest}
        chat_asked(ChatRequest(messages=[SAID, message]), "m", calls_known=True)


def test_an_answer_of_this_server_or_another_can_be_sent_back_as_it_came() -> None:
    message: Any = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "odd": None}
    chat_asked(ChatRequest(messages=[SAID, message]), "m", calls_known=True)


def test_a_tool_choice_is_shown_as_it_was_sent() -> None:
    chosen: Any = {"type": "function", "function": {"name": "add"}}
    with pytest.raises(InvalidRequest) as found:
        chat_asked(ChatRequest(messages=[SAID], tool_choice=chosen), "m", calls_known=True)
    assert "{'type': 'function', 'function': {'name': 'add'}} is not allowed" in found.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "greedy"}, "mode: there is no such field; did you mean outrider.mode?"),
        ({"text": "x"}, "text: there is no such field"),
        ({"processed_logprobs": True}, "processed_logprobs: there is no such field; did you mean "
         "outrider.processed_logprobs?"),
        ({"temprature": 1}, "temprature: there is no such field; did you mean temperature?"),
        ({"priority": 1, "outrider": {"priority": 1}}, "priority: 1 is not allowed; expected nothing beside "
         "outrider.priority"),
        ({"x" * 9000: 1}, f"{'x' * 200}…: there is no such field"),
    ],
)  # fmt: skip
def test_a_field_that_only_looks_like_one_of_grpcs_keeps_its_own_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        completion_asked(CompletionRequest.model_validate({"prompt": "x", **fields}), "m")
    error = told(found.value)[1]["error"]
    assert error["message"] == message
    assert error["param"] == message.partition(":")[0]


def test_a_priority_out_of_range_has_the_name_under_which_it_was_sent() -> None:
    error = refused(CompletionRequest, {"prompt": "x", "priority": -9})
    assert told(error)[1]["error"]["param"] == "priority"


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 500}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"7": 200}}, "logit_bias"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"messages": [{**SAID, "reasoning_content": "hm"}]}, "messages[0].reasoning_content"),
        (
            {"messages": [SAID, {"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
            "messages[1].tool_calls[0].function.name",
        ),
    ],
)
def test_a_refused_field_has_the_name_under_which_it_was_sent(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        chat_asked(ChatRequest.model_validate({"messages": [SAID], **fields}), "m", calls_known=True)
    error = told(found.value)[1]["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "field", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "sampling.grammar.json_schema", "response_format"),
        ({"guided_regex": "a"}, "sampling.grammar.regex", "guided_regex"),
        ({"structured_outputs": {"grammar": "a"}}, "sampling.grammar.lark", "structured_outputs.grammar"),
        ({}, "prompt", "messages"),
        ({}, "sampling.logit_bias.token_id[3]", "logit_bias"),
    ],
)
def test_what_the_sessions_refuse_later_has_it_too(fields: dict[str, Any], field: str, param: str) -> None:
    asked = chat_asked(ChatRequest.model_validate({"messages": [SAID], **fields}), "m", calls_known=True)
    error = renamed(InvalidRequest(field, "x", "something else"), asked.names)
    assert error.message == f"{param}: 'x' is not allowed; expected something else"
    assert error.field == param


def test_a_prompt_is_called_a_prompt_where_one_was_sent() -> None:
    asked = completion_asked(CompletionRequest(prompt="x", logprobs=2), "m")
    for field in ("prompt", "logprobs", "max_tokens"):
        assert renamed(InvalidRequest(field, 1, "2"), asked.names).field == field


def test_what_is_not_there_is_named_too() -> None:
    with pytest.raises(NotFound) as found:
        completion_asked(CompletionRequest(prompt="x", model="gpt-4"), "m")
    assert told(found.value)[1]["error"]["param"] == "model"
    assert told(SessionNotFound.of("s"))[1]["error"]["param"] == "outrider.session_id"
