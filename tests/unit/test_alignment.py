"""Where a text stands in its prediction: after every kind of deviation, and however it was rewound."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.alignment import MAX_AGREEING, MAX_PLACES, REACH, Alignment, num_agreeing

PREDICTED = list(range(100, 140))


def aligned(text: list[int], prediction: list[int] = PREDICTED) -> Alignment:
    made = Alignment(prediction)
    made.extend(text)
    return made


def test_a_text_that_says_what_was_predicted_stands_where_it_ends() -> None:
    assert aligned([]).place == 0
    assert aligned(PREDICTED[:7]).place == 7
    assert aligned(PREDICTED).place is None, "there is nothing left"


DEVIATIONS = {
    "a word replaced": ([*PREDICTED[:5], 1], PREDICTED[6:], 6),
    "a word replaced by three": ([*PREDICTED[:5], 1, 2, 3], PREDICTED[6:], 6),
    "a sentence replaced": (PREDICTED[:5] + list(range(12)), PREDICTED[18:], 18),
    "a word put in": ([*PREDICTED[:5], 1], PREDICTED[5:], 5),
    "a word left out": (PREDICTED[:5], PREDICTED[6:], 6),
    "a paragraph left out": (PREDICTED[:5], PREDICTED[30:], 30),
    "something before the begin": ([1, 2, 3], PREDICTED[0:], 0),
    "a block moved to the front": (PREDICTED[20:30], PREDICTED[:20], 0),
}
"""What is said at first, what follows, and at which place of the prediction that is."""


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_text_is_found_again_within_three_tokens_of_agreeing(name: str) -> None:
    before, after, place = DEVIATIONS[name]
    text = aligned([*before, *after[:3]])
    assert text.place == place + 3
    assert text.matched[-1] == place + 2


def test_near_the_expected_place_one_agreeing_token_is_enough_and_far_away_it_is_not() -> None:
    assert aligned([*PREDICTED[:5], 1, PREDICTED[7]]).place == 8
    far = aligned([*PREDICTED[:5], PREDICTED[30]])
    assert far.place is None
    far.extend(PREDICTED[31:32])
    assert far.place == 32, "two, where it is not too far"


def test_of_equal_places_the_nearest_to_the_expected_one_is_taken() -> None:
    block = [1, 2, 3, 4]
    prediction = [*block, *PREDICTED[:9], *block, *PREDICTED[9:20], *block, *PREDICTED[20:]]
    text = aligned([*block, *PREDICTED[:9], 7, *block[1:]], prediction)
    assert text.place == len(block) + 9 + len(block)


def test_while_nothing_agrees_nothing_is_expected_and_the_tokens_are_counted() -> None:
    text = aligned([*PREDICTED[:5], 1, 2, 3])
    assert (text.place, text.num_apart) == (None, 3)
    assert text.matched[-3:] == [-1] * 3


tokens = st.lists(st.integers(0, 3), max_size=14)


@given(tokens, st.lists(st.tuples(st.integers(0, 8), tokens), max_size=8))
def test_the_place_depends_on_the_text_alone_however_it_came_about(
    prediction: list[int], edits: list[tuple[int, list[int]]]
) -> None:
    text, ids = Alignment(prediction), list[int]()
    for dropped, added in edits:
        length = max(0, len(ids) - dropped)
        text.truncate(length)
        text.extend(added)
        ids = ids[:length] + added
        fresh = aligned(ids, prediction)
        assert (text.ids, text.place, text.num_apart, text.matched) == (
            fresh.ids, fresh.place, fresh.num_apart, fresh.matched,
        )  # fmt: skip


@given(tokens, tokens)
def test_what_is_said_to_agree_does_agree(prediction: list[int], ids: list[int]) -> None:
    text = aligned(ids, prediction)
    for token, place in zip(ids, text.matched, strict=True):
        assert place == -1 or prediction[place] == token
    assert text.place is None or text.matched[-1:] in ([], [text.place - 1])


def test_a_prediction_that_repeats_one_token_costs_a_bounded_number_of_comparisons() -> None:
    text = Alignment([1, 2] * 5000)
    text.extend([1, 2] * 200)
    compared = 0
    agreeing = text._agreeing

    def counted(place: int) -> int:
        nonlocal compared
        compared += agreeing(place)
        return agreeing(place)

    text._agreeing = counted  # type: ignore[method-assign]
    text.extend([2])
    assert 0 < compared <= 2 * MAX_PLACES * MAX_AGREEING
    assert len([place for place in range(len(text.prediction)) if abs(place - 401) <= REACH]) > MAX_PLACES


def test_every_token_of_a_prediction_counts_once() -> None:
    assert num_agreeing(PREDICTED, PREDICTED) == 40
    assert num_agreeing(PREDICTED, [*PREDICTED[:10], 1, *PREDICTED[11:]]) == 39
    assert num_agreeing(PREDICTED, PREDICTED[:10] + PREDICTED[:10]) == 10
    assert num_agreeing(PREDICTED, [1, 2, 3]) == num_agreeing(PREDICTED, []) == num_agreeing([], [1]) == 0


def test_an_edited_text_agrees_nearly_everywhere() -> None:
    rng = random.Random(4)
    prediction = [rng.randrange(200) for _ in range(1000)]
    text = list(prediction)
    for _ in range(30):
        place = rng.randrange(len(text))
        text[place : place + rng.randrange(4)] = [rng.randrange(200) for _ in range(rng.randrange(4))]
    assert num_agreeing(prediction, text) > 850
