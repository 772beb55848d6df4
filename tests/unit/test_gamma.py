"""The latency model reproduces the published table; the policy follows from it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.gamma import (
    PLAIN,
    AlphaEstimator,
    Costs,
    break_even_alpha,
    break_even_draft_s,
    choose,
    pipelined_rate,
    plain_rate,
    sequential_rate,
    upper_bound,
    words_per_pass,
    words_per_pipelined_pass,
)

REPEATABLE = settings(deadline=None, database=None, derandomize=True)
VERIFY_S = 0.03
TABLE = [
    (0.6, 2, 0.2, 60, 4, 62, 3, 15),
    (0.6, 6, 1, 46, 2, 51, 1, 5),
    (0.8, 2, 0.2, 94, 7, 103, 5, 15),
    (0.8, 6, 1, 61, 4, 76, 1, 5),
    (0.8, 6, 20, 46, 5, 59, 1, 5),
    (0.9, 6, 1, 78, 7, 104, 1, 5),
]


@pytest.mark.parametrize(("alpha", "draft_ms", "trip_ms", "rate", "gamma"), [row[:5] for row in TABLE])
def test_sequential_rounds_choose_the_gamma_of_the_table(
    alpha: float, draft_ms: float, trip_ms: float, rate: int, gamma: int
) -> None:
    plan = choose(alpha, draft_ms / 1e3, VERIFY_S, trip_ms / 1e3, 30, pipelined=False)
    assert (plan.gamma, plan.restart_gamma, plan.window) == (gamma, gamma, gamma)
    assert round(sequential_rate(alpha, gamma, Costs(draft_ms / 1e3, VERIFY_S, trip_ms / 1e3))) == rate


@pytest.mark.parametrize(
    ("alpha", "draft_ms", "trip_ms", "rate", "restart", "gamma"), [(*row[:3], *row[5:]) for row in TABLE]
)
def test_pipelined_rounds_choose_the_lengths_of_the_table(
    alpha: float, draft_ms: float, trip_ms: float, rate: int, restart: int, gamma: int
) -> None:
    plan = choose(alpha, draft_ms / 1e3, VERIFY_S, trip_ms / 1e3, 30, pipelined=True)
    costs = Costs(draft_ms / 1e3, VERIFY_S, trip_ms / 1e3)
    assert (plan.restart_gamma, plan.gamma) == (restart, gamma)
    assert round(pipelined_rate(alpha, restart, gamma, costs)) == rate
    assert pipelined_rate(alpha, restart, gamma, costs) < upper_bound(alpha, costs)


@pytest.mark.parametrize(
    ("alpha", "gamma", "speed_up", "best", "best_gamma"),
    [(0.8, 4, 2.40, 2.47, 6), (0.8, 8, 2.405, 2.47, 6), (0.6, 4, 1.65, 1.67, 3), (0.4, 4, 1.18, None, None)],
)
def test_speed_ups_without_overlap_at_a_cost_ratio_of_a_tenth(
    alpha: float, gamma: int, speed_up: float, best: float | None, best_gamma: int | None
) -> None:
    costs = Costs(0.1, 1.0)
    assert sequential_rate(alpha, gamma, costs) == pytest.approx(speed_up, abs=0.005)
    if best is not None and best_gamma is not None:
        assert choose(alpha, 0.1, 1.0, 0.0, 20, pipelined=False).gamma == best_gamma
        assert sequential_rate(alpha, best_gamma, costs) == pytest.approx(best, abs=0.005)


def test_four_proposals_at_alpha_point_eight_give_3_36_words() -> None:
    assert words_per_pass(0.8, 4) == pytest.approx(3.36, abs=0.005)


def test_plain_decoding_takes_one_pass_a_token() -> None:
    assert plain_rate(Costs(0.0, VERIFY_S)) == pytest.approx(33.3, abs=0.05)


def test_a_perfect_drafter_has_finite_rates() -> None:
    costs = Costs(0.002, VERIFY_S, 0.001)
    assert words_per_pass(1.0, 4) == 5.0
    assert pipelined_rate(1.0, 3, 15, costs) == pytest.approx(15 / 0.03)
    assert upper_bound(1.0, costs) == math.inf
    assert words_per_pass(1.0 - 1e-9, 4) == pytest.approx(5.0)


@pytest.mark.parametrize("pipelined", [False, True])
def test_speculation_is_off_where_plain_decoding_is_faster(pipelined: bool) -> None:
    assert choose(0.0, 0.006, VERIFY_S, 0.001, 8, pipelined) == PLAIN
    assert choose(0.5, 0.040, VERIFY_S, 0.001, 8, pipelined) == PLAIN
    assert choose(1.0, 0.001, VERIFY_S, 0.0, 0, pipelined) == PLAIN


def test_a_drafter_that_costs_nothing_drafts_as_far_as_it_may() -> None:
    assert choose(0.7, 0.0, VERIFY_S, 0.0, 6, pipelined=False).gamma == 6
    assert choose(0.7, 0.0, VERIFY_S, 0.0, 6, pipelined=True).gamma == 6


def test_the_window_covers_the_pass_and_the_way_back() -> None:
    hidden_trip = choose(0.8, 0.002, VERIFY_S, 0.001, 8, pipelined=True)
    assert (hidden_trip.gamma, hidden_trip.window) == (8, 16)
    exposed_trip = choose(0.8, 0.006, VERIFY_S, 0.020, 8, pipelined=True)
    assert (exposed_trip.gamma, exposed_trip.window) == (5, 15)
    long_trip = choose(0.9, 0.006, VERIFY_S, 0.050, 8, pipelined=True)
    assert (long_trip.gamma, long_trip.window) == (5, 20)


@REPEATABLE
@given(st.floats(0, 1), st.floats(0, 0.1), st.floats(1e-4, 0.1), st.floats(0, 0.2), st.integers(0, 12), st.booleans())
def test_every_choice_is_a_legal_speculation_and_beats_plain(
    alpha: float, draft_s: float, verify_s: float, trip_s: float, max_gamma: int, pipelined: bool
) -> None:
    plan = choose(alpha, draft_s, verify_s, trip_s, max_gamma, pipelined)
    if plan == PLAIN:
        return
    costs = Costs(draft_s, verify_s, trip_s)
    assert 1 <= plan.restart_gamma <= plan.gamma <= max_gamma
    assert plan.window % plan.gamma == 0
    rate = pipelined_rate(alpha, plan.restart_gamma, plan.gamma, costs) if pipelined else None
    assert (rate or sequential_rate(alpha, plan.gamma, costs)) > plain_rate(costs)


def test_break_even_is_where_the_choice_changes() -> None:
    alpha = break_even_alpha(0.006, VERIFY_S, 0.001, 8, pipelined=False)
    assert choose(alpha, 0.006, VERIFY_S, 0.001, 8, pipelined=False).enabled
    assert not choose(alpha - 0.001, 0.006, VERIFY_S, 0.001, 8, pipelined=False).enabled
    assert alpha == pytest.approx((0.006 + 0.001) / VERIFY_S, abs=0.001)
    assert break_even_alpha(0.05, VERIFY_S, 0.0, 8, pipelined=True) == math.inf


@pytest.mark.parametrize(("alpha", "restart", "gamma"), [(0.8, 4, 4), (0.6, 2, 5), (0.9, 1, 8), (0.0, 2, 3)])
def test_words_per_pipelined_pass_are_those_of_chains_followed_run_by_run(
    alpha: float, restart: int, gamma: int
) -> None:
    tokens, passes = 0.0, 1.0
    reached, lengths = 1.0, restart
    for _ in range(400):  # runs of a chain; what comes after them weighs nothing
        tokens += reached * sum(alpha**step for step in range(lengths))  # the token that ends it comes with each test
        reached *= alpha**lengths
        passes += reached * alpha  # the held row's test comes first
        tokens, reached, lengths = tokens + reached, reached * alpha, gamma - 1
    assert words_per_pipelined_pass(alpha, restart, gamma) == pytest.approx(tokens / passes)


def test_a_draft_token_may_cost_what_break_even_says_and_no_more() -> None:
    for pipelined in (False, True):
        limit = break_even_draft_s(0.7, VERIFY_S, 0.002, 8, pipelined)
        assert choose(0.7, limit - 2e-5, VERIFY_S, 0.002, 8, pipelined).enabled
        assert not choose(0.7, limit + 2e-5, VERIFY_S, 0.002, 8, pipelined).enabled
    # One token is drafted there: it pays as long as drafting and the trip take less than alpha passes.
    assert break_even_draft_s(0.7, VERIFY_S, 0.0, 8, False) == pytest.approx(0.7 * VERIFY_S, abs=2e-5)
    assert break_even_draft_s(0.0, VERIFY_S, 0.0, 8, False) == 0.0


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_an_impossible_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        choose(alpha, 0.001, 0.03, 0.0, 8, pipelined=True)


@pytest.mark.parametrize(
    ("field", "times"),
    [
        ("draft_s", (-1.0, 1.0, 0.0)),
        ("draft_s", (math.nan, 1.0, 0.0)),
        ("verify_s", (0.0, 0.0, 0.0)),
        ("verify_s", (0.0, math.inf, 0.0)),
        ("round_trip_s", (0.0, 1.0, math.inf)),
    ],
)
def test_impossible_times_are_refused(field: str, times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match=field):
        choose(0.5, *times, 8, pipelined=True)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="max_gamma"):
        choose(0.5, 0.001, 0.03, 0.0, -1, pipelined=True)


# --- the estimator --------------------------------------------------------------------------------------------------


def test_an_estimator_starts_at_its_prior_and_moves_to_the_evidence() -> None:
    estimator = AlphaEstimator(prior_alpha=0.6)
    assert estimator.alpha == pytest.approx(0.6)
    for _ in range(300):
        estimator = estimator.observe(9, 10)
    assert estimator.alpha == pytest.approx(0.9, abs=0.02)


def test_an_estimator_forgets_at_the_pace_of_its_memory() -> None:
    estimator = AlphaEstimator(memory_tests=50.0)
    for _ in range(100):
        estimator = estimator.observe(4, 4)
    faded = estimator
    for _ in range(100):
        faded = faded.observe(0, 1)
    assert faded.accepted == pytest.approx(estimator.accepted * math.exp(-100 / 50))
    assert faded.alpha < 0.3 < estimator.alpha


def test_a_judgement_without_tests_changes_nothing() -> None:
    estimator = AlphaEstimator().observe(3, 4)
    assert estimator.observe(0, 0) == estimator


@pytest.mark.parametrize(("accepted", "tested"), [(-1, 2), (3, 2)])
def test_impossible_counts_are_refused(accepted: int, tested: int) -> None:
    with pytest.raises(ValueError, match="tested"):
        AlphaEstimator().observe(accepted, tested)


@REPEATABLE
@given(st.lists(st.integers(0, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=30))
def test_the_estimate_is_a_probability(judgements: list[tuple[int, int]]) -> None:
    estimator = AlphaEstimator()
    for accepted, tested in judgements:
        estimator = estimator.observe(accepted, tested)
        assert 0.0 <= estimator.alpha <= 1.0
