"""The commit function: everything ends at one token, and no way of cutting the tokens into runs changes anything."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.commit import Commit, Ends, visible
from orchestrator.text import Decoder, Detokenizer
from outrider.generation import Chunk
from outrider.ids import FinishReason, TokenKind
from outrider.messages import TokenLogprobs
from outrider.model.toy import ToyTokenizer

TOKENIZER = ToyTokenizer()
DECODER = Decoder(TOKENIZER)
PROMPT_LEN = 5
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return [1 + value for value in text.encode()]


def commit(max_tokens: int = 100, mute_until: int = 0, **ends: object) -> Commit:
    known = {"stop_ids": frozenset({EOS}), "eos_ids": frozenset({EOS}), **ends}
    return Commit(Ends(PROMPT_LEN + max_tokens, **known), Detokenizer(DECODER), mute_until)  # type: ignore[arg-type]


class Taken:
    """Everything that came of a sequence, whatever the runs."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.kinds: list[TokenKind] = []
        self.finish: FinishReason | None = None
        self.matched = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def key(self) -> tuple[object, ...]:
        return (self.ids, self.text, self.logprobs, self.kinds, self.finish, self.matched)


def take(committer: Commit, token_ids: Sequence[int], cuts: Sequence[int] = ()) -> Taken:
    taken = Taken()
    for start, end in pairwise([0, *cuts, len(token_ids)]):
        run = token_ids[start:end]
        if not run or taken.finish is not None:
            continue
        kinds = [TokenKind(1 + position % 4) for position in range(start, end)]
        logprobs = [TokenLogprobs(-float(position)) for position in range(start, end)]
        outcome = committer.take(PROMPT_LEN + start, run, kinds, logprobs)
        assert outcome.chunk.start == PROMPT_LEN + len(taken.ids)
        assert len(outcome.chunk.kinds) == len(outcome.chunk.logprobs) == len(outcome.chunk.token_ids)
        taken.ids += outcome.chunk.token_ids
        taken.texts.append(outcome.chunk.text)
        taken.logprobs += outcome.chunk.logprobs
        taken.kinds += outcome.chunk.kinds
        taken.finish, taken.matched = outcome.finish, outcome.matched
    return taken


def test_a_stop_before_the_limit_ends_with_stop_and_one_after_it_with_length() -> None:
    """Case 1."""
    stop = frozenset({260})
    early = take(commit(5, stop_ids=stop), [*ids("ab"), 260, *ids("cde")])
    assert (len(early.ids), early.finish, early.matched, early.text) == (3, FinishReason.STOP, "260", "ab")
    late = take(commit(5, stop_ids=stop), [*ids("abcde"), 260])
    assert (len(late.ids), late.finish, late.text) == (5, FinishReason.LENGTH, "abcde")


def test_a_stop_at_the_last_token_has_priority_over_the_length() -> None:
    assert take(commit(3, stop_ids=frozenset({260})), [*ids("ab"), 260]).finish is FinishReason.STOP
    assert take(commit(3, stop_strings=("bc",)), ids("abc")).finish is FinishReason.STOP


def test_a_stop_string_inside_a_run_ends_everything_at_the_token_that_completes_it() -> None:
    """Case 2: text before the string, ids and log-probabilities up to and including its last token."""
    taken = take(commit(stop_strings=("END",)), ids("one END two"))
    assert taken.text == "one "
    assert taken.ids == ids("one END")
    assert len(taken.logprobs) == len(taken.ids)
    assert (taken.finish, taken.matched) == (FinishReason.STOP, "END")


@pytest.mark.parametrize("offset", range(9))
def test_nothing_comes_after_an_end_of_sequence_at_any_offset(offset: int) -> None:
    """Case 3."""
    token_ids = ids("abcdefgh")
    token_ids[offset:offset] = [EOS]
    taken = take(commit(), token_ids)
    assert taken.ids == token_ids[: offset + 1]
    assert (taken.text, taken.matched, taken.finish) == ("abcdefgh"[:offset], "", FinishReason.STOP)


def test_an_ignored_end_of_sequence_is_a_token_without_text() -> None:
    """Case 4's other half: EOS that does not count does not end anything."""
    taken = take(commit(4, stop_ids=frozenset()), [*ids("a"), EOS, *ids("bc")])
    assert (taken.text, len(taken.ids), taken.finish) == ("abc", 4, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", range(1, 21))
@pytest.mark.parametrize("gamma", range(1, 9))
def test_exactly_max_tokens_are_delivered_for_every_gamma(max_tokens: int, gamma: int) -> None:
    """Case 5."""
    taken = take(commit(max_tokens), ids("x" * 40), range(gamma, 40, gamma))
    assert (len(taken.ids), taken.text, taken.finish) == (max_tokens, "x" * max_tokens, FinishReason.LENGTH)


def test_text_that_could_become_a_stop_string_is_held_back_and_released_when_it_does_not() -> None:
    committer = commit(stop_strings=("###",))
    texts = [committer.take(PROMPT_LEN + i, [token], (), ()).chunk.text for i, token in enumerate(ids("a##b"))]
    assert texts == ["a", "", "", "##b"]


def test_held_back_text_is_given_out_at_an_end_of_another_kind() -> None:
    assert take(commit(3, stop_strings=("###",)), ids("a##")).text == "a##"
    assert take(commit(stop_strings=("###",)), [*ids("a##"), EOS]).text == "a##"


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    """Case 27."""
    half = ids("a😀")[:3]
    assert take(commit(3), half).text == DECODER.decode(half)


def test_of_two_stop_strings_at_one_place_the_longer_matches() -> None:
    taken = take(commit(stop_strings=("好", "好!")), [TOKENIZER.encode("你好")[0], *ids("!")])
    assert (taken.text, taken.matched) == ("你", "好")
    both = take(commit(stop_strings=("a", "the ")), TOKENIZER.encode("the a"))
    assert (both.text, both.matched) == ("", "the ")


def test_empty_top_logprobs_stay_empty_lists() -> None:
    """Case 30."""
    outcome = commit().take(PROMPT_LEN, ids("ab"), (), [TokenLogprobs(-1.0), TokenLogprobs(-2.0)])
    assert outcome.chunk.logprobs == (TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ()))


WORDS = st.lists(st.sampled_from([*ids("ab#E"), *ids("é😀"), EOS, 1 + 0xFF, len(TOKENIZER) - 1]), max_size=24)


@given(WORDS, st.lists(st.integers(0, 24), max_size=6), st.integers(1, 24))
def test_the_outcome_does_not_depend_on_the_runs(token_ids: list[int], cuts: list[int], max_tokens: int) -> None:
    stops = ("ab#", "#E", "é", "bb")
    whole = take(commit(max_tokens, stop_strings=stops), token_ids)
    cut = take(commit(max_tokens, stop_strings=stops), token_ids, sorted(min(c, len(token_ids)) for c in cuts))
    assert cut.key() == whole.key()
    assert not any(stop in whole.text for stop in stops)


@given(WORDS, st.integers(0, 24))
def test_a_resuming_client_gets_exactly_the_text_it_has_not_seen(token_ids: list[int], seen: int) -> None:
    """What was given out before a position, and what a committer muted until it gives out, add up."""
    stops = ("ab#", "é😀")
    twin = take(commit(stop_strings=stops), token_ids, range(1, len(token_ids)))
    seen = min(seen, len(twin.ids))
    resumed = take(commit(stop_strings=stops, mute_until=PROMPT_LEN + seen), token_ids)
    assert "".join(twin.texts[:seen]) + resumed.text == twin.text


def test_only_the_unseen_part_of_a_chunk_is_visible() -> None:
    kinds = (TokenKind.PLAIN, TokenKind.ACCEPTED, TokenKind.BONUS)
    chunk = Chunk(10, (1, 2, 3), "text", kinds)
    assert visible(chunk, 5) == chunk
    assert visible(chunk, 12) == Chunk(12, (3,), "text", kinds[2:])
    assert visible(Chunk(10, (1, 2, 3), "", kinds), 13) is None
    assert visible(Chunk(10, (1, 2, 3), "rest", kinds), 13) == Chunk(13, (), "rest")
