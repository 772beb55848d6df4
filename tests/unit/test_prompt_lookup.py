"""What prompt lookup copies, and that it depends on the text alone, however that was rewound."""

import random

import pytest

from draft_service.drafters.prompt_lookup import MAX_INDEXED, PromptLookup, Repetitions
from draft_service.drafters.protocol import DraftSession, Guessed, Plan, Work
from outrider.ids import Mode, SessionId
from outrider.messages import COUNT_TOTAL, SamplingParams, SparseRow
from tests.unit.drafter_bench import EPOCH, draw, session

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
        assert plan is not None
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


def test_no_agreeing_token_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="min_ngram = 0"):
        PromptLookup(100, context_len=10, min_ngram=0)


# --- where a copy ends ------------------------------------------------------------------------------------------------

ORIGINAL = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
EDITS = {
    "replaced": ([30, 6], [7, 8, 9]),
    "two replaced": ([30, 31, 7], [8, 9, 10]),
    "inserted": ([30, 5], [6, 7, 8]),
    "left out": ([8], [9, 10, 11]),
    "one replaced by two": ([30, 31, 6], [7, 8, 9]),
}
"""What is said instead of 5 6 7 8, up to the first token of the original; what follows."""


@pytest.mark.parametrize("edit", EDITS)
def test_after_an_edit_the_copy_goes_on_at_the_first_token_that_agrees_again(edit: str) -> None:
    said, follows = EDITS[edit]
    before = [*ORIGINAL, 20, 21, 1, 2, 3, 4]
    for count in range(1, len(said)):
        changed = [*before, *said[:count]]
        assert opened(changed).plan(S, changed, 3) == Plan(0, len(changed) + count, "no_match")
    ids = [*before, *said]
    assert draw(opened(ids), "s", ids, 3)[0] == follows


def test_one_agreeing_token_is_not_enough_far_from_where_a_copy_ended() -> None:
    ids = [*ORIGINAL, 20, 21, 22, 23, 24, 25, 1, 2, 3, 30, 22]
    assert opened(ids).plan(S, ids, 3) is not None
    assert opened(ids).plan(S, ids, 3) == Plan(0, len(ids) + 2, "no_match")


def test_a_copy_is_waited_for_a_few_tokens_only() -> None:
    changed = list(range(30, 37))
    ids = [*ORIGINAL, 20, 21, 1, 2, 3, *changed[:6], 9]
    assert draw(opened(ids), "s", ids, 2)[0] == [10, 11]
    ids = [*ORIGINAL, 20, 21, 1, 2, 3, *changed, 9]
    assert opened(ids).plan(S, ids, 3) == Plan(0, len(ids) + 8, "no_match")


def test_a_longer_match_elsewhere_is_believed_more_than_the_neighbourhood() -> None:
    ids = [*ORIGINAL, 40, 41, 5, 50, 1, 2, 3, 40, 41, 5]
    assert draw(opened(ids), "s", ids, 1)[0] == [50]


# --- whichever way the text came about --------------------------------------------------------------------------------


def test_repetitions_rewound_at_random_are_those_of_the_final_text() -> None:
    rng = random.Random(7)
    text, ids = Repetitions(2, 5), list[int]()
    for _ in range(400):
        if rng.random() < 0.4:
            length = rng.randint(0, len(ids))
            text.truncate(length)
            del ids[length:]
        else:
            more = [rng.randrange(5) for _ in range(rng.randint(0, 6))]
            text.extend(more)
            ids += more
        fresh = Repetitions(2, 5)
        fresh.extend(ids)
        assert (fresh.position, fresh.num_misses) == (text.position, text.num_misses)


def test_a_long_prompt_is_indexed_in_steps_and_nothing_is_offered_before() -> None:
    ids = [index % 90 for index in range(2 * MAX_INDEXED + 10)]
    drafter = opened(ids)
    work = Work(S, EPOCH, ids, 0)
    assert drafter.plan(S, ids, 4) is None
    assert drafter.draw([work]) == [Guessed(caught_up=False)]
    assert drafter.plan(S, ids, 4) is None
    assert drafter.draw([work]) == [Guessed(caught_up=False)]
    assert drafter.plan(S, ids, 4) == Plan(4)
    assert drafter.draw([work]) == [Guessed()]
