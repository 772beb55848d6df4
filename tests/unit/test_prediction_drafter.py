"""What the drafter of predictions offers, at which place, and when it offers nothing."""

import random
from dataclasses import replace

import pytest

from draft_service.drafters import prediction as prediction_module
from draft_service.drafters.prediction import PredictionDrafter
from draft_service.drafters.protocol import Guessed, Plan, Work
from draft_service.window import FOREVER
from outrider.ids import Mode, SessionId
from outrider.messages import COUNT_TOTAL, SparseRow
from tests.unit.drafter_bench import EPOCH, draw, session

S = SessionId("s")
PROMPT = [7, 7, 7, 7]
PREDICTED = tuple(range(20, 40))


def opened(ids: list[int], predicted: tuple[int, ...] = PREDICTED, mode: Mode = Mode.GREEDY) -> PredictionDrafter:
    drafter = PredictionDrafter(100, context_len=1000)
    drafter.open(replace(session(mode=mode), prediction=predicted), ids)
    return drafter


def test_an_answer_that_has_not_begun_is_the_predictions_begin() -> None:
    assert draw(opened(PROMPT), "s", PROMPT, 4)[0] == [20, 21, 22, 23]


def test_the_prompt_is_no_part_of_the_answer() -> None:
    prompt = [20, 21, 22, 23]
    assert draw(opened(prompt), "s", prompt, 2)[0] == [20, 21]


def test_a_deviation_is_waited_for_and_then_the_prediction_goes_on() -> None:
    drafter = opened(PROMPT)
    ids = [*PROMPT, 20, 21, 90]
    assert drafter.plan(S, ids, 4) == Plan(0, len(ids) + 1, "not_aligned")
    ids += [91]
    assert drafter.plan(S, ids, 4) == Plan(0, len(ids) + 2, "not_aligned")
    ids += [24]
    assert draw(drafter, "s", ids, 3)[0] == [25, 26, 27]


def test_at_the_predictions_end_less_is_offered_and_then_nothing() -> None:
    drafter = opened(PROMPT)
    ids = [*PROMPT, *PREDICTED[:-2]]
    assert drafter.plan(S, ids, 5) == Plan(2)
    assert drafter.plan(S, [*ids, *PREDICTED[-2:]], 5) == Plan(0, len(ids) + 3, "not_aligned")


def test_without_a_prediction_nothing_will_ever_be_offered() -> None:
    assert opened(PROMPT, ()).plan(S, PROMPT, 4) == Plan(0, FOREVER, "no_prediction")
    assert opened(PROMPT, ()).draw([Work(S, EPOCH, PROMPT, 0)]) == [Guessed()]


def test_rows_are_one_hot_in_modes_that_need_rows() -> None:
    tokens, rows = draw(opened(PROMPT, mode=Mode.REJECTION), "s", PROMPT, 3)
    assert rows == [SparseRow((token,), (COUNT_TOTAL,)) for token in tokens]


def test_a_plan_depends_on_the_ids_alone_however_they_came_about() -> None:
    rng = random.Random(3)
    drafter, ids = opened(PROMPT), list(PROMPT)
    for _ in range(300):
        length = rng.randint(len(PROMPT), len(ids))
        drafter.rewind(S, length)
        ids = ids[:length] + [rng.randrange(18, 42) for _ in range(rng.randint(0, 5))]
        assert drafter.plan(S, ids, 5) == opened(ids).plan(S, ids, 5)


def test_a_long_answer_is_followed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_module, "MAX_INDEXED", 6)
    ids = [*PROMPT, *PREDICTED[:15]]
    drafter, work = opened(ids), Work(S, EPOCH, ids, 0)
    assert drafter.plan(S, ids, 2) is None
    assert drafter.draw([work]) == [Guessed(caught_up=False)]
    assert drafter.draw([work]) == [Guessed(caught_up=False)]
    assert drafter.draw([work]) == [Guessed()]
    assert drafter.plan(S, ids, 2) == Plan(2)
