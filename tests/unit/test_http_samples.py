"""One answer is told in OpenAI's shape, bit by bit and at once."""

from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator.http.parsing import Format, Parser
from orchestrator.http.samples import About, ChatSample, Sample, TextSample
from orchestrator.http.telling import Heading, Telling
from orchestrator.http.tokens import Tokens
from orchestrator.language import load_language
from outrider.generation import (
    Chunk,
    Finished,
    GenerationEvent,
    GenerationRequest,
    PromptLogprobs,
    Started,
    TextPrompt,
    Usage,
)
from outrider.ids import FinishReason, Mode, SessionId
from outrider.messages import TokenLogprobs
from outrider.model.toy import ToyTokenizer

TOKENS = Tokens(load_language("toy"))
TOY = ToyTokenizer()
STARTED = Started(SessionId("s"), 3, Mode.GREEDY, "bitwise")
STOPPED = Finished(FinishReason.STOP)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def about(**request: Any) -> About:
    return About(GenerationRequest(TextPrompt("x"), **request), TOKENS)


def chunk(text: str, start: int = 3, *, scored: bool = False) -> Chunk:
    ids = tuple(TOY.encode(text))
    entries = tuple(TokenLogprobs(-0.5, ((token, -0.5), (token + 1, -1.0))) for token in ids) if scored else ()
    return Chunk(start, ids, text, logprobs=entries)


def spoken(index: int = 0, *, keeps: bool, calls: bool = False) -> ChatSample:
    return ChatSample(index, about(), Parser(Format(calls=True)) if calls else None, TOKENS, keeps=keeps)


def written(index: int = 0, echo: str | None = None, *, keeps: bool, **request: Any) -> TextSample:
    return TextSample(index, about(**request), echo, TOKENS, keeps=keeps)


def told_by(sample: Sample, events: Sequence[GenerationEvent]) -> list[Any]:
    return [choice for event in events if (choice := sample.take(event)) is not None]


@pytest.mark.parametrize("index", [0, 5])
def test_every_choice_has_its_index(index: int) -> None:
    events: list[GenerationEvent] = [STARTED, chunk("the cat"), STOPPED]
    for make in (spoken, written):
        assert {choice["index"] for choice in told_by(make(index, keeps=False), events)} == {index}
        kept = make(index, keeps=True)
        told_by(kept, events)
        assert kept.choice()["index"] == index


def test_offsets_of_log_probabilities_go_on_from_chunk_to_chunk_and_begin_with_the_prompt() -> None:
    prompt = tuple(TOY.encode("on a"))
    scores = PromptLogprobs(0, prompt, (None, *(TokenLogprobs(-0.5),) * (len(prompt) - 1)))
    events: list[GenerationEvent] = [
        STARTED,
        scores,
        chunk("the cat", scored=True),
        chunk(" sat", scored=True),
        STOPPED,
    ]
    streamed = [choice["logprobs"] for choice in told_by(written(echo="on a", keeps=False), events)]
    found = [one for shown in streamed if shown for one in zip(shown["text_offset"], shown["tokens"], strict=True)]
    assert all("on athe cat sat"[offset:].startswith(token) for offset, token in found)
    assert "".join(token for _, token in found) == "on athe cat sat"
    kept = written(echo="on a", keeps=True)
    told_by(kept, events)
    whole = kept.choice()
    assert whole["text"] == "on athe cat sat"
    assert list(zip(whole["logprobs"]["text_offset"], whole["logprobs"]["tokens"], strict=True)) == found
    assert whole["logprobs"]["token_logprobs"][0] is None


def test_an_echo_is_told_first() -> None:
    texts = [choice["text"] for choice in told_by(written(echo="on ", keeps=False), [STARTED, chunk("a"), STOPPED])]
    assert texts == ["on ", "a", ""]


@pytest.mark.parametrize(
    ("matched", "stops", "wanted"),
    [("17", (), 17), ("17", ("17",), "17"), ("end", ("end",), "end"), ("", (), None)],
    ids=["id", "string of digits", "string", "neither"],
)
def test_what_stopped_an_answer_is_an_id_or_a_string(matched: str, stops: tuple[str, ...], wanted: object) -> None:
    end = Finished(FinishReason.STOP, matched)
    assert told_by(written(keeps=False, stop=stops), [STARTED, end])[-1]["stop_reason"] == wanted


@pytest.mark.parametrize(
    ("reason", "text", "wanted"),
    [
        (FinishReason.STOP, "a", "stop"),
        (FinishReason.LENGTH, "a", "length"),
        (FinishReason.STOP, CALL, "tool_calls"),
        (FinishReason.LENGTH, CALL, "length"),
    ],
    ids=["stop", "length", "called", "called and cut"],
)
def test_an_answer_ends_for_a_reason_of_openais(reason: FinishReason, text: str, wanted: str) -> None:
    events: list[GenerationEvent] = [STARTED, chunk(text), Finished(reason)]
    assert told_by(spoken(keeps=False, calls=True), events)[-1]["finish_reason"] == wanted
    kept = spoken(keeps=True, calls=True)
    told_by(kept, events)
    assert kept.choice()["finish_reason"] == wanted


def test_calls_have_ids_of_their_own_in_every_turn_of_a_session() -> None:
    ids: list[str] = []
    for prompt_len in (3, 90):
        kept = spoken(keeps=True, calls=True)
        told_by(kept, [Started(SessionId("s"), prompt_len, Mode.GREEDY, "bitwise"), chunk(CALL + CALL), STOPPED])
        ids += [call["id"] for call in kept.choice()["message"]["tool_calls"]]
    assert len(set(ids)) == 4


def test_the_likeliest_of_tokens_with_one_text_counts() -> None:
    halves = [token for token in range(len(TOY)) if TOKENS.text(token) == "\ufffd"][:2]
    entry = TokenLogprobs(-0.5, tuple(zip(halves, (-0.5, -2.0), strict=True)))
    assert TOKENS.completion_logprobs(halves[:1], [entry], 0)[0]["top_logprobs"] == [{"\ufffd": -0.5}]


@pytest.mark.parametrize("includes", [True, False], ids=["with usage", "without"])
def test_usage_is_null_until_the_end_and_only_where_it_was_asked_for(includes: bool) -> None:
    samples = [spoken(index, keeps=False) for index in range(2)]
    telling = Telling(Heading("i", "chat.completion", 0, "m"), samples, 2, includes_usage=includes)
    end = Finished(FinishReason.LENGTH, usage=Usage(9, 4, 2))
    frames = [telling.frame(index, event) for index in range(2) for event in (STARTED, chunk("a"), end)]
    assert all((b'"usage":null' in frame) == includes for frame in frames)
    *usage, done = telling.last_frames()
    assert done == b"data: [DONE]\n\n"
    assert [b'"prompt_tokens":9,"completion_tokens":8,"total_tokens":17' in frame for frame in usage] == [
        True
    ] * includes
    assert all(b'"cached_tokens":2' in frame for frame in usage)
