"""Every list and string that arrives has a limit: what is at it passes, what is one past it is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest

from outrider.codec import decode, draft, generation, propose, types
from outrider.codec.chat import (
    MAX_CHAT_MESSAGES,
    MAX_JSON_DEPTH,
    MAX_PROMPT_CHARS,
    MAX_TEMPLATE_CHARS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MAX_TOOLS_CHARS,
)
from outrider.codec.checks import MAX_NAME_CHARS, MAX_SESSION_CHARS, MAX_TEXT_CHARS
from outrider.codec.generation import MAX_PROMPT_TOKENS, MAX_STOP_CHARS, MAX_STOPS
from outrider.codec.types import MAX_ATTRIBUTES, MAX_LOGIT_BIAS
from outrider.errors import InvalidRequest, ProtocolError
from outrider.v1 import draft_pb2, generation_pb2, types_pb2, verify_pb2


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    prompt = {} if {"token_ids", "chat", "text"} & fields.keys() else {"text": "the"}
    return generation_pb2.GenerateRequest(**{**prompt, **fields})


def worker(**fields: Any) -> types_pb2.WorkerDescription:
    known: dict[str, Any] = {
        "worker_id": "w",
        "role": types_pb2.WORKER_ROLE_VERIFY,
        "address": "h:1",
        "guarantee": types_pb2.GUARANTEE_BITWISE,
        "vocabulary": types_pb2.Vocabulary(fingerprint="f", size=1),
    }
    return types_pb2.WorkerDescription(**{**known, **fields})


def chat(count: int, chars: int) -> generation_pb2.Chat:
    each = generation_pb2.ChatMessage(role="user", content="x" * chars)
    return generation_pb2.Chat(messages=[each] * count)


def calls(count: int, name: int) -> generation_pb2.Chat:
    each = generation_pb2.ToolCall(name="f" * name, id="c" * name)
    return generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="assistant", tool_calls=[each] * count)])


def aside(**fields: Any) -> generation_pb2.Chat:
    whose: dict[str, Any] = {"role": "tool", "content": "x", **fields}
    return generation_pb2.Chat(messages=[generation_pb2.ChatMessage(**whose)])


def options(**fields: Any) -> generation_pb2.Chat:
    return generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="x")], **fields)


def biases(count: int) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(logit_bias=[types_pb2.LogitBias(token_id=i, bias=1.0) for i in range(count)])


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


CLIENTS: list[tuple[str, int, Callable[[int], Any], str]] = [
    ("text", MAX_PROMPT_CHARS, lambda n: request(text="x" * n), "text"),
    ("ids", MAX_PROMPT_TOKENS, lambda n: request(token_ids={"token_ids": [3] * n}), "token_ids"),
    ("one message", MAX_PROMPT_CHARS, lambda n: request(chat=chat(1, n)), "chat.messages"),
    ("messages", MAX_CHAT_MESSAGES, lambda n: request(chat=chat(n, 1)), "chat.messages"),
    ("calls", MAX_TOOL_CALLS, lambda n: request(chat=calls(n, 1)), "chat.messages[0].tool_calls"),
    ("a call's name", MAX_NAME_CHARS, lambda n: request(chat=calls(1, n)), "chat.messages[0].tool_calls[0].name"),
    ("a speaker's name", MAX_NAME_CHARS, lambda n: request(chat=aside(name="x" * n)), "chat.messages[0].name"),
    (
        "an answer's call",
        MAX_NAME_CHARS,
        lambda n: request(chat=aside(tool_call_id="x" * n)),
        "chat.messages[0].tool_call_id",
    ),
    ("tools", MAX_TOOLS, lambda n: request(chat=options(tools=f"[{','.join(['{}'] * n)}]")), "chat.tools"),
    ("tools' text", MAX_TOOLS_CHARS, lambda n: request(chat=options(tools="[{}]".ljust(n))), "chat.tools"),
    ("depth", MAX_JSON_DEPTH, lambda n: request(chat=options(template_arguments=nested(n))), "chat.template_arguments"),
    (
        "arguments",
        MAX_TEMPLATE_CHARS,
        lambda n: request(chat=options(template_arguments="{}".ljust(n))),
        "chat.template_arguments",
    ),
    ("template", MAX_TEMPLATE_CHARS, lambda n: request(chat=options(chat_template="x" * n)), "chat.chat_template"),
    ("model", MAX_NAME_CHARS, lambda n: request(model="x" * n), "model"),
    ("drafter", MAX_NAME_CHARS, lambda n: request(drafter="x" * n), "drafter"),
    ("session", MAX_SESSION_CHARS, lambda n: request(session_id="x" * n), "session_id"),
    ("stops", MAX_STOPS, lambda n: request(stop=["x"] * n), "stop"),
    ("stop", MAX_STOP_CHARS, lambda n: request(stop=["a", "x" * n]), "stop[1]"),
    ("stop ids", MAX_STOPS, lambda n: request(stop_token_ids=[3] * n), "stop_token_ids"),
    ("biases", MAX_LOGIT_BIAS, lambda n: request(sampling=biases(n)), "sampling.logit_bias.token_id"),
]


@pytest.mark.parametrize(("limit", "make", "field"), [each[1:] for each in CLIENTS], ids=[each[0] for each in CLIENTS])
def test_what_a_client_sends_is_taken_up_to_the_limit_and_refused_by_name_past_it(
    limit: int, make: Callable[[int], Any], field: str
) -> None:
    generation.request_from_proto(make(limit))
    with pytest.raises(InvalidRequest) as refused:
        generation.request_from_proto(make(limit + 1))
    assert refused.value.field == field
    assert str(limit) in refused.value.allowed
    assert len(refused.value.message) < 1000


@pytest.mark.parametrize("name", ["a b", "a/b", "{a}", "a\nb", "ä", "a*", "\x00", " "])
def test_a_sessions_name_has_no_characters_that_mean_something_elsewhere(name: str) -> None:
    with pytest.raises(InvalidRequest, match="session_id"):
        generation.request_from_proto(request(session_id=name))
    with pytest.raises(InvalidRequest, match="session_id"):
        generation.resume_from_proto(generation_pb2.ResumeRequest(session_id=name, next_position=3))


def attached(name: str) -> Any:
    return decode.decode_request_from_proto(verify_pb2.DecodeRequest(attach=verify_pb2.DecodeAttach(worker_id=name)))


def passed(name: str) -> Any:
    turn = verify_pb2.Pass(session_id=name, until_len=1)
    return propose.propose_request_from_proto(verify_pb2.ProposeRequest(pass_turn=turn))


def reported(name: str) -> Any:
    return draft.draft_response_from_proto(draft_pb2.DraftResponse(status=draft_pb2.DraftStatus(drafter=name)))


def noticed(text: str) -> Any:
    notice = generation_pb2.Notice(reason="r", text=text)
    return generation.event_from_proto(generation_pb2.GenerationEvent(notice=notice))


PEERS: list[tuple[str, int, Callable[[str], Any]]] = [
    ("worker id", MAX_NAME_CHARS, lambda s: types.description_from_proto(worker(worker_id=s))),
    ("address", MAX_NAME_CHARS, lambda s: types.description_from_proto(worker(address=s))),
    ("model", MAX_TEXT_CHARS, lambda s: types.description_from_proto(worker(model=s))),
    ("dtype", MAX_NAME_CHARS, lambda s: types.description_from_proto(worker(dtype=s))),
    ("kind of drafter", MAX_NAME_CHARS, lambda s: types.description_from_proto(worker(drafter=s))),
    ("fingerprint", MAX_TEXT_CHARS, lambda s: types.description_from_proto(worker(fingerprint=s))),
    ("attribute's name", MAX_NAME_CHARS, lambda s: types.description_from_proto(worker(attributes={s: ""}))),
    ("attribute", MAX_TEXT_CHARS, lambda s: types.description_from_proto(worker(attributes={"a": s}))),
    ("reason to drain", MAX_TEXT_CHARS, lambda s: types.draining_from_proto(types_pb2.Draining(reason=s))),
    ("attached worker", MAX_NAME_CHARS, attached),
    ("session", MAX_NAME_CHARS, passed),
    ("reported drafter", MAX_NAME_CHARS, reported),
    ("notice", MAX_TEXT_CHARS, noticed),
]


@pytest.mark.parametrize(("limit", "read"), [each[1:] for each in PEERS], ids=[each[0] for each in PEERS])
def test_what_a_peer_sends_is_taken_up_to_the_limit_and_refused_past_it(limit: int, read: Callable[[str], Any]) -> None:
    read("x" * limit)
    with pytest.raises(ProtocolError, match=str(limit)):
        read("x" * (limit + 1))


def test_a_worker_has_a_limited_number_of_attributes() -> None:
    types.description_from_proto(worker(attributes={str(i): "" for i in range(MAX_ATTRIBUTES)}))
    with pytest.raises(ProtocolError, match=r"worker\.attributes"):
        types.description_from_proto(worker(attributes={str(i): "" for i in range(MAX_ATTRIBUTES + 1)}))
