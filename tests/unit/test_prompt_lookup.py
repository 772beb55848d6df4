"""What prompt lookup finds, and that its index survives every way a text can be rewound."""

import random

import pytest

from draft_service.drafters.prompt_lookup import NgramIndex, PromptLookup
from draft_service.drafters.protocol import DraftSession, Plan
from outrider.ids import Mode, SessionId
from outrider.messages import COUNT_TOTAL, SamplingParams, SparseRow
from tests.unit.drafter_bench import draw, session

S = SessionId("s")


def opened(ids: list[int], mode: Mode = Mode.GREEDY, **sizes: int) -> PromptLookup:
    drafter = PromptLookup(100, context_len=1000, **sizes)
    drafter.open(session(mode=mode), ids)
    return drafter


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    ids = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert draw(opened(ids), "s", ids, 3)[0] == [4, 5, 9]


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    ids = [1, 2, 3, 7, 8, 2, 3, 6, 6, 1, 2, 3]
    assert draw(opened(ids), "s", ids, 1)[0] == [7]


def test_the_latest_of_equally_long_matches_wins() -> None:
    ids = [1, 2, 7, 5, 1, 2, 8, 6, 1, 2]
    assert draw(opened(ids), "s", ids, 1)[0] == [8]


def test_a_cycle_is_continued_past_the_end_of_the_text() -> None:
    ids = [9, 1, 2, 3, 1, 2]
    assert draw(opened(ids), "s", ids, 8)[0] == [3, 1, 2, 3, 1, 2, 3, 1]
    assert draw(opened([4, 4, 4]), "s", [4, 4, 4], 4)[0] == [4] * 4


def test_without_a_match_the_turn_is_passed_up_to_the_next_position() -> None:
    drafter = opened([1, 2, 3, 4])
    assert drafter.plan(S, [1, 2, 3, 4], 5) == Plan(0, 5, "no_match")
    assert drafter.plan(S, [1, 2, 3, 4, 2, 3], 5) == Plan(5)


def test_the_verifier_is_let_go_for_as_long_as_nothing_was_found() -> None:
    ids = [1, 2, 3, 4]
    drafter, asked, told = opened(ids), [], []
    while len(ids) < 40:
        plan = drafter.plan(S, ids, 5)
        asked.append(len(ids))
        told.append(plan.until_len - len(ids))
        ids += range(50 + len(ids), 50 + plan.until_len)
    assert told[:6] == [1, 2, 4, 8, 8, 8]
    assert asked[:5] == [4, 5, 7, 11, 19]


def test_a_match_ends_the_row_of_misses_and_a_prompt_is_no_part_of_it() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    drafter = PromptLookup(100, context_len=1000)
    drafter.open(DraftSession(S, Mode.GREEDY, SamplingParams(temperature=0.0), b"", len(ids)), ids)
    assert drafter.plan(S, ids, 5) == Plan(0, 10, "no_match")
    assert drafter.plan(S, [*ids, 20, 21], 5) == Plan(0, 14, "no_match")
    assert drafter.plan(S, [*ids, 20, 21, 2, 3], 5) == Plan(5)
    assert drafter.plan(S, [*ids, 20, 21, 2, 3, 30], 5) == Plan(0, 15, "no_match")


def test_a_plan_depends_on_the_ids_alone_however_they_came_about() -> None:
    rng = random.Random(23)
    drafter = opened([1, 2, 3, 4])
    ids = [1, 2, 3, 4]
    for _ in range(300):
        length = rng.randint(4, len(ids))
        drafter.rewind(S, length)
        ids = ids[:length] + [rng.randrange(12) for _ in range(rng.randint(0, 4))]
        assert drafter.plan(S, ids, 5) == opened(ids).plan(S, ids, 5)


def test_fewer_agreeing_tokens_than_the_minimum_are_no_match() -> None:
    ids = [1, 2, 3, 4, 2]
    assert opened(ids).plan(S, ids, 5) == Plan(0, 7, "no_match")
    assert opened(ids, min_ngram=1).plan(S, ids, 5) == Plan(5)


def test_a_text_shorter_than_the_ngrams_matches_nothing() -> None:
    assert opened([1]).plan(S, [1], 5) == Plan(0, 2, "no_match")


def test_rows_are_one_hot_in_modes_that_need_rows() -> None:
    ids = [1, 2, 3, 1, 2]
    tokens, rows = draw(opened(ids, Mode.REJECTION), "s", ids, 3)
    assert rows == [SparseRow((token,), (COUNT_TOTAL,)) for token in tokens]


def test_other_sessions_texts_are_not_looked_at() -> None:
    drafter = opened([1, 2, 3, 4, 5, 1, 2])
    drafter.open(session("other"), [1, 2])
    assert drafter.plan(SessionId("other"), [1, 2], 3) == Plan(0, 3, "no_match")


def test_contradicting_ngram_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 \.\. 2"):
        PromptLookup(100, context_len=10, min_ngram=3, max_ngram=2)


def test_an_index_rewound_at_random_equals_one_that_saw_only_the_final_text() -> None:
    rng = random.Random(7)
    index = NgramIndex(1, 4)
    for _ in range(300):
        if rng.random() < 0.4:
            index.truncate(rng.randint(0, len(index.ids)))
        else:
            index.extend([rng.randrange(3) for _ in range(rng.randint(0, 6))])
        fresh = NgramIndex(1, 4)
        fresh.extend(index.ids)
        assert fresh == index
        assert fresh.find() == index.find()


def test_what_is_found_is_the_latest_place_of_the_longest_suffix_by_brute_force() -> None:
    rng = random.Random(11)
    for _ in range(200):
        ids = [rng.randrange(3) for _ in range(rng.randint(1, 25))]
        index = NgramIndex(2, 5)
        index.extend(ids)
        assert index.find() == brute_force(ids, 2, 5)


def brute_force(ids: list[int], low: int, high: int) -> int | None:
    for size in range(min(high, len(ids) - 1), low - 1, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                return start + size
    return None
