"""What messages take beside the model is found from times alone, as soon as there is something to tell it from."""

import pytest

from orchestrator.beside import Beside


def fitted(*seen: tuple[int, int], per_session: float = 0.0007, per_draft: float = 0.0012) -> Beside:
    beside = Beside()
    for sessions, drafts in seen:
        beside.observe(sessions, drafts, per_session * sessions + per_draft * drafts)
    return beside


def test_nothing_seen_costs_nothing() -> None:
    assert Beside().costs == (0.0, 0.0)


def test_sessions_and_drafts_are_told_apart() -> None:
    beside = fitted(*[(8, 8), (8, 3), (8, 0), (4, 1)] * 20)
    assert beside.costs == pytest.approx((0.0007, 0.0012), rel=0.02)


def test_where_all_are_drafted_for_both_are_taken_to_cost_the_same() -> None:
    assert fitted((8, 8), (8, 8)).costs == pytest.approx((0.00095, 0.00095), rel=0.01)


def test_where_nobody_is_drafted_for_drafts_are_not_blamed() -> None:
    assert fitted((8, 0), (4, 0)).costs == pytest.approx((0.0007, 0.0), rel=0.01)


@pytest.mark.parametrize("drafts", [(0.0009, -0.0002), (-0.0002, 0.0009)])
def test_no_cost_is_negative(drafts: tuple[float, float]) -> None:
    per_session, per_draft = fitted(*[(8, 8), (8, 0)] * 20, per_session=drafts[0], per_draft=drafts[1]).costs
    assert per_session >= 0.0
    assert per_draft >= 0.0
    assert per_session + per_draft > 0.0


def test_older_times_count_less() -> None:
    beside = fitted(*[(8, 8), (8, 0)] * 20, per_draft=0.005)
    for _ in range(2000):
        beside.observe(8, 8, 0.0015 * 8)
        beside.observe(8, 0, 0.0007 * 8)
    assert beside.costs == pytest.approx((0.0007, 0.0008), rel=0.05)
