"""The line for places: fair between keys, first by priority without starving anybody, and bounded."""

from collections import Counter
from collections.abc import Sequence

import pytest

from orchestrator.line import PRIORITY_TURNS, Line


def served(line: Line, num: int) -> list[str]:
    """Return the keys of the next so many."""
    taken = [line.next() for _ in range(num)]
    return [waiter.key_id for waiter in taken if waiter is not None]


def crowd(line: Line, key_id: str, num: int, weight: int = 1, priority: int = 0) -> None:
    for _ in range(num):
        line.join(key_id, weight, priority)


def test_one_key_is_served_in_the_order_of_arrival() -> None:
    line = Line(1, 10)
    waiters = [line.join("a", 1, 0)[0] for _ in range(4)]
    assert [line.next() for _ in range(5)] == [*waiters, None]


def test_a_key_that_asks_once_does_not_wait_for_all_of_a_key_that_asks_a_hundred_times() -> None:
    line = Line(1, 200)
    crowd(line, "greedy", 100)
    crowd(line, "modest", 1)
    assert served(line, 3).index("modest") <= 1


@pytest.mark.parametrize(("weights", "shares"), [((1, 1), (40, 40)), ((3, 1), (60, 20)), ((1, 7), (10, 70))])
def test_keys_share_places_by_their_weights(weights: Sequence[int], shares: Sequence[int]) -> None:
    line = Line(4, 400)
    for key_id, weight in zip("ab", weights, strict=True):
        crowd(line, key_id, 100, weight)
    counted = Counter(served(line, 80))
    assert [abs(counted[key_id] - share) <= 1 for key_id, share in zip("ab", shares, strict=True)] == [True, True]


def test_a_key_that_was_idle_gets_no_credit_for_it() -> None:
    line = Line(1, 400)
    crowd(line, "busy", 100)
    served(line, 50)
    crowd(line, "late", 100)
    assert abs(Counter(served(line, 40))["late"] - 20) <= 1


def test_a_priority_is_a_head_start() -> None:
    line = Line(1, 20)
    crowd(line, "a", 5)
    crowd(line, "b", 1, priority=1)
    assert served(line, 1) == ["b"]
    behind = Line(1, 20)
    crowd(behind, "a", 5)
    crowd(behind, "b", 1, priority=-1)
    assert served(behind, 6)[-1] == "b"


def test_a_stream_of_the_highest_priority_starves_nobody() -> None:
    line = Line(1, 400)
    crowd(line, "low", 1, priority=-8)
    bound = int(16 * PRIORITY_TURNS) + 2
    for turn in range(bound):
        crowd(line, "high", 2, priority=8)
        if served(line, 1) == ["low"]:
            assert turn > 8, "it was no priority at all"
            return
    pytest.fail(f"the lowest priority was not served within {bound} turns")


def test_a_full_line_turns_away_the_last_of_whoever_fills_it() -> None:
    line = Line(1, 3)
    waiters = [line.join("greedy", 1, 0)[0] for _ in range(3)]
    _, gone = line.join("modest", 1, 0)
    assert gone == waiters[-1]
    late, gone = line.join("greedy", 1, 0)
    assert gone == late
    assert len(line) == 3


def test_whoever_gives_up_and_asks_again_has_lost_no_turn() -> None:
    line = Line(1, 10)
    crowd(line, "steady", 4)
    for _ in range(50):
        waiters = [line.join("impatient", 1, 0)[0] for _ in range(2)]
        for waiter in waiters:
            line.leave(waiter)
    crowd(line, "impatient", 1)
    assert "impatient" in served(line, 2)


def test_whoever_is_turned_away_from_a_full_line_has_lost_no_turn() -> None:
    line = Line(1, 3)
    crowd(line, "modest", 1)
    crowd(line, "greedy", 50)
    assert served(line, 1) == ["modest"]
    crowd(line, "modest", 1)
    assert served(line, 2) == ["greedy", "greedy"]
    crowd(line, "greedy", 1)
    crowd(line, "modest", 1)
    assert served(line, 3) == ["modest", "greedy", "modest"]


def test_the_wait_to_expect_follows_what_places_were_held_for() -> None:
    line = Line(2, 10)
    first, _ = line.join("a", 1, 0)
    assert line.wait_s() == 0.0
    for _ in range(100):
        line.held(4.0)
    assert line.wait_s(first) == pytest.approx(2.0)
    assert line.wait_s() == pytest.approx(4.0)


def test_whoever_gives_up_is_not_served() -> None:
    line = Line(1, 10)
    first, second = (line.join("a", 1, 0)[0] for _ in range(2))
    line.leave(first)
    line.leave(first)
    assert (line.next(), line.next()) == (second, None)
