"""Which sorts of drafters are set aside: sequences of what sessions measured."""

from orchestrator.standings import LOSING, LOSSES, MAX_SORTS, PROBE_S, RETURNS, WINNING, Standing, Standings

BELOW, BETWEEN, ABOVE = LOSING - 0.01, (LOSING + WINNING) / 2, WINNING


def after(*gains: float, now_s: float = 0.0) -> Standing:
    standing = Standing()
    for gain in gains:
        standing.judge(gain, now_s)
    return standing


def test_a_sort_is_set_aside_once_several_sessions_in_a_row_agree_that_it_is_below_plain() -> None:
    standing = after(*[BELOW] * (LOSSES - 1))
    assert not standing.set_aside
    assert standing.judge(BELOW, 0.0)
    assert standing.set_aside


def test_one_session_that_does_not_agree_starts_the_count_again() -> None:
    for other in (BETWEEN, ABOVE):
        assert not after(*[BELOW] * (LOSSES - 1), other, *[BELOW] * (LOSSES - 1)).set_aside


def test_a_drafter_as_fast_as_plain_is_never_set_aside_and_does_not_come_back_either() -> None:
    assert not after(*[BETWEEN] * 100).set_aside
    assert after(*[BELOW] * LOSSES, *[BETWEEN] * 100).set_aside


def test_a_sort_that_is_set_aside_gets_a_new_session_now_and_then_only() -> None:
    standing = after(*[BELOW] * LOSSES, now_s=100.0)
    given = []
    for tenth in range(1000, 2000):
        now_s = tenth / 10
        if standing.admits(now_s):
            standing.given(now_s)
            given.append(now_s)
    assert given == [100.0 + PROBE_S, 100.0 + 2 * PROBE_S, 100.0 + 3 * PROBE_S]


def test_several_probes_in_a_row_have_to_win_before_it_is_in_use_again() -> None:
    standing = after(*[BELOW] * LOSSES)
    for _ in range(3):
        for _ in range(RETURNS - 1):
            assert not standing.judge(ABOVE, 50.0)
        assert not standing.judge(BELOW, 50.0)
    for _ in range(RETURNS - 1):
        assert not standing.judge(ABOVE, 50.0)
    assert standing.judge(ABOVE, 50.0)
    assert not standing.set_aside
    assert standing.admits(50.0)
    assert not standing.judge(BELOW, 60.0), "it begins with a clean record"


def test_behind_a_probe_that_won_the_next_one_follows_at_once_and_behind_one_that_lost_it_does_not() -> None:
    won, lost = after(*[BELOW] * LOSSES), after(*[BELOW] * LOSSES)
    for standing in (won, lost):
        standing.given(40.0)
    won.judge(ABOVE, 41.0)
    lost.judge(BELOW, 41.0)
    assert won.admits(41.0)
    assert not lost.admits(41.0)
    assert lost.admits(40.0 + PROBE_S)


def test_sorts_are_judged_apart_and_every_change_is_told_once() -> None:
    told: list[tuple[str, bool]] = []
    standings = Standings(lambda sort, aside: told.append((sort, aside)))
    for _ in range(LOSSES + 3):
        standings.judge("bad", BELOW, 0.0)
        standings.judge("good", 1.5, 0.0)
    assert told == [("bad", True)]
    for _ in range(RETURNS):
        standings.judge("bad", ABOVE, 1.0)
    assert told == [("bad", True), ("bad", False)]
    assert standings.of("good").gain == 1.5


def test_a_sort_nobody_has_heard_of_for_long_is_forgotten_and_told_to_be_in_use() -> None:
    told: list[tuple[str, bool]] = []
    standings = Standings(lambda sort, aside: told.append((sort, aside)))
    for _ in range(LOSSES):
        standings.judge("gone", BELOW, 0.0)
    for number in range(MAX_SORTS):
        standings.of(f"sort {number}")
    assert len(standings.all()) == MAX_SORTS
    assert told == [("gone", True), ("gone", False)]
