"""The suffix automaton against a search through the text, rewound in every way, and what a token costs."""

import random
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters import suffix_automaton
from draft_service.drafters.suffix_automaton import NO_MATCH, Match, SuffixAutomaton

Edit = tuple[int, list[int]]
edits = st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=8)), max_size=12)


def searched(ids: list[int]) -> Match:
    """Return the latest earlier place of the longest suffix that has one."""
    for size in range(len(ids) - 1, 0, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                return Match(size, start + size)
    return NO_MATCH


@given(edits)
def test_what_is_found_is_what_a_search_finds_after_every_edit(changes: list[Edit]) -> None:
    text, ids = SuffixAutomaton(), list[int]()
    for dropped, added in changes:
        length = max(0, len(ids) - dropped)
        text.truncate(length)
        text.extend(added)
        ids = ids[:length] + added
        assert text.ids == ids
        assert text.match == searched(ids)


def test_a_text_rewound_further_than_its_steps_reach_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_automaton, "MAX_UNDO", 4)
    ids = [1, 2, 3, 1, 2, 3, 4, 5, 1, 2]
    text = SuffixAutomaton(ids)
    text.truncate(5)
    assert text.match == searched(ids[:5])
    text.extend(ids[5:])
    assert text.match == searched(ids)


def test_where_many_suffixes_repeat_the_length_is_exact_and_the_place_is_true() -> None:
    """A run of one token has as many kinds of suffixes as tokens: more than are written down at each."""
    rng = random.Random(5)
    for _ in range(15):
        ids = [token for _ in range(6) for token in [rng.randrange(2)] * rng.randint(1, 80)]
        match = SuffixAutomaton(ids).match
        assert match.length == searched(ids).length
        end = match.position
        assert end < len(ids)
        assert ids[end - match.length : end] == ids[len(ids) - match.length :]


def test_a_chain_that_is_drawn_and_dropped_leaves_nothing_behind() -> None:
    rng = random.Random(9)
    ids = [rng.randrange(50) for _ in range(400)]
    text = SuffixAutomaton(ids)
    size = sum(map(len, text._next)), len(text._link)
    for _ in range(200):
        text.extend([rng.randrange(50) for _ in range(8)])
        text.truncate(len(ids))
    assert (sum(map(len, text._next)), len(text._link)) == size


def lines_run(action: Callable[[], None]) -> int:
    """Return how many lines of the automaton an action runs: time, without a clock."""
    count = 0

    def trace(frame: object, event: str, _: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("alphabet", [3, 1000])
def test_a_token_costs_as_much_in_a_long_text_as_in_a_short_one(alphabet: int) -> None:
    rng = random.Random(13)
    ids = [rng.randrange(alphabet) for _ in range(12_000)]

    def cost_at(length: int) -> int:
        text = SuffixAutomaton(ids[:length])
        return lines_run(lambda: text.extend(ids[length : length + 300]))

    assert cost_at(11_000) < 1.6 * cost_at(1_000)
