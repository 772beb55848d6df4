"""Incremental text with tokenizers of every kind: every chunk is UTF-8, and all chunks together are the text."""

from collections.abc import Sequence
from functools import cache
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.commit import Commit, Ends
from orchestrator.text import REPLACEMENT, Decoder, Detokenizer, Tokenizer
from outrider.ids import FinishReason
from tests.unit.tokenizer_shop import CORPUS, KINDS, bought

LIMIT = 1 << 20
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, database=None)
SCRIPTS = (
    "".join(CORPUS) + "👨\u200d👩\u200d👧\u200d👦🏳️\u200d🌈 क्षि ﷺ \u202e\u200f\ufeff\u0000 zalgo\u0335\u0321 𝒳 \ufffd"
)
ALL = pytest.mark.parametrize("kind", list(KINDS))


@cache
def decoder(kind: str, skip: bool = True) -> Decoder:
    return Decoder(cast(Tokenizer, bought(kind)), skip_special=skip)


@st.composite
def tokens(draw: st.DrawFn, kind: str, most: int = 30) -> list[int]:
    """Draw ids: any, such as no text has, mixed with those of texts and with bytes in their order."""
    tokenizer, found = bought(kind), list[int]()
    pieces = st.one_of(
        st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=6),
        st.text(st.sampled_from(SCRIPTS), min_size=1, max_size=6).map(tokenizer.encode),
        st.sampled_from(["<|end|>", "<|reserved|>", "<tool>"]).map(tokenizer.encode),
    )
    for piece in draw(st.lists(pieces, min_size=1, max_size=6)):
        found += piece[draw(st.integers(0, 1)) :]
    return found[:most] or [0]


def pushed(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    given = [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]
    for text in given:
        text.encode()
    return given


@ALL
@pytest.mark.parametrize("skip", [True, False], ids=["without-special", "with-special"])
@EXAMPLES
@given(data=st.data())
def test_what_is_given_out_adds_up_to_the_text_of_all_tokens(kind: str, skip: bool, data: st.DataObject) -> None:
    token_ids = data.draw(tokens(kind))
    assert "".join(pushed(Detokenizer(decoder(kind, skip)), token_ids)) == decoder(kind, skip).decode(token_ids)


@ALL
@EXAMPLES
@given(data=st.data())
def test_behind_a_prompt_the_text_is_what_the_whole_has_more_than_the_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = bought(kind)
    prompt = data.draw(st.text(st.sampled_from("the cat mat. 你好😀"), min_size=1, max_size=12))
    prompt_ids = tokenizer.encode(prompt)
    before = decoder(kind).decode(prompt_ids)
    token_ids = data.draw(tokens(kind))
    whole = decoder(kind).decode(prompt_ids + token_ids)
    if not before.strip() or before.endswith(REPLACEMENT) or not whole.startswith(before):
        return  # nothing before, or a prompt whose own text changes with what follows
    assert "".join(pushed(Detokenizer(decoder(kind), prompt_ids), token_ids)) == whole[len(before) :]


@ALL
@EXAMPLES
@given(data=st.data())
def test_no_character_of_a_text_is_shown_as_broken(kind: str, data: st.DataObject) -> None:
    text = data.draw(st.text(st.sampled_from(SCRIPTS.replace(REPLACEMENT, "")), max_size=20))
    token_ids = bought(kind).encode(text)
    given = pushed(Detokenizer(decoder(kind)), token_ids)
    assert not any(REPLACEMENT in chunk for chunk in given)


@ALL
@EXAMPLES
@given(data=st.data())
def test_a_stop_string_ends_at_the_first_token_that_completes_it(kind: str, data: st.DataObject) -> None:
    token_ids = data.draw(tokens(kind))
    whole = decoder(kind).decode(token_ids)
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[at : at + data.draw(st.integers(1, 4))].replace(REPLACEMENT, "") or "no such text"
    texts = [decoder(kind).decode(token_ids[: count + 1]) for count in range(len(token_ids))]
    end = next((count for count, text in enumerate(texts) if stop in text), None)
    commit = Commit(Ends(LIMIT, stop_strings=(stop,)), Detokenizer(decoder(kind)))
    text, start, finish = "", 0, None
    while start < len(token_ids) and finish is None:
        size = data.draw(st.integers(1, 8))
        outcome = commit.take(start, token_ids[start : start + size], (), ())
        text, finish, start = text + outcome.chunk.text, outcome.finish, start + len(outcome.chunk.token_ids)
    if end is None:
        assert finish is None
        assert whole.startswith(text)
    else:
        assert (finish, start) == (FinishReason.STOP, end + 1)
        assert text == texts[end][: texts[end].index(stop)]


@pytest.mark.parametrize("kind", ["llama-2", "llama-2-not-legacy", "unigram-with-bytes"])
@pytest.mark.parametrize("prompt", ["the cat😀", "😀", "😀" * 20], ids=["words", "bytes", "many-bytes"])
def test_a_word_behind_a_prompt_that_ends_in_bytes_keeps_its_space(kind: str, prompt: str) -> None:
    prompt_ids = bought(kind).encode(prompt)
    token_ids = bought(kind).encode("the dog")
    assert "".join(pushed(Detokenizer(decoder(kind), prompt_ids), token_ids)) == " the dog"


def test_a_special_token_without_a_role_splits_no_run_of_bytes() -> None:
    tokenizer = bought("llama-2")
    first, *rest = [f"<0x{value:02X}>" for value in "😀".encode()]
    token_ids = cast("list[int]", tokenizer.convert_tokens_to_ids([first, "<|reserved|>", *rest]))
    assert "".join(pushed(Detokenizer(decoder("llama-2")), token_ids)) == "😀"


def test_a_line_end_in_bytes_stops_at_once() -> None:
    tokenizer = bought("llama-2")
    token_ids = [*tokenizer.encode("cat\n"), *tokenizer.encode("dog")]
    commit = Commit(Ends(LIMIT, stop_strings=("\n",)), Detokenizer(decoder("llama-2")))
    outcome = commit.take(0, token_ids, (), ())
    assert (outcome.chunk.text, outcome.finish) == ("cat", FinishReason.STOP)
    assert outcome.chunk.token_ids == tuple(tokenizer.encode("cat\n"))
