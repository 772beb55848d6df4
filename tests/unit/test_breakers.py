"""Circuit breakers: when a worker is left out, for how long, and what brings it back."""

import random

from orchestrator.breakers import FIRST_BREAK_S, FORGOTTEN_S, JITTER, LONGEST_BREAK_S, Breakers
from outrider.ids import WorkerId

A, B = WorkerId("a"), WorkerId("b")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Told(list[tuple[WorkerId, str]]):
    def __call__(self, worker_id: WorkerId, state: str) -> None:
        self.append((worker_id, state))


def breakers(clock: Clock, threshold: int = 1) -> tuple[Breakers, Told]:
    told = Told()
    return Breakers(threshold, on_change=told, lot=random.Random(1), clock=clock), told


def test_a_circuit_opens_after_so_many_failures_in_a_row_and_a_success_between_them_counts() -> None:
    clock = Clock()
    circuits, told = breakers(clock, threshold=3)
    for _ in range(2):
        circuits.failed(A)
    assert circuits.allows(A)
    assert not circuits.doubts(A)
    clock.now_s += 1
    circuits.succeeded(A, clock.now_s)
    for count in range(3):
        assert circuits.allows(A), count
        circuits.failed(A)
    assert not circuits.allows(A)
    assert circuits.doubts(A)
    assert circuits.allows(B)
    assert told == [(A, "open")]


def test_a_worker_is_left_out_for_a_while_and_about_twice_as_long_each_time() -> None:
    clock = Clock()
    circuits, _ = breakers(clock)
    for count in range(8):
        circuits.failed(A)
        pause_s = min(LONGEST_BREAK_S, FIRST_BREAK_S * 2**count)
        clock.now_s += pause_s - 0.01
        assert not circuits.allows(A)
        clock.now_s += JITTER * pause_s + 0.02
        assert circuits.allows(A)
        assert circuits.doubts(A)


def test_all_streams_of_a_worker_breaking_at_once_are_one_failure() -> None:
    clock = Clock()
    circuits, told = breakers(clock)
    for _ in range(100):
        circuits.failed(A)
    clock.now_s += FIRST_BREAK_S * (1 + JITTER)
    assert circuits.allows(A)
    assert told == [(A, "open")]


def test_the_way_back_leads_over_half_open_and_each_step_is_told_once() -> None:
    clock = Clock()
    circuits, told = breakers(clock)
    circuits.failed(A)
    clock.now_s += FIRST_BREAK_S * (1 + JITTER)
    for _ in range(2):
        circuits.probing(A)
    circuits.failed(A)
    clock.now_s += 2 * FIRST_BREAK_S * (1 + JITTER)
    circuits.probing(A)
    circuits.succeeded(A, clock.now_s)
    assert [state for _, state in told] == ["open", "half_open", "open", "half_open", "closed"]
    assert circuits.allows(A)
    assert not circuits.doubts(A)


def test_a_stream_that_was_open_before_the_failure_proves_nothing() -> None:
    clock = Clock()
    circuits, _ = breakers(clock)
    opened_s = clock.now_s
    clock.now_s += 1
    circuits.failed(A)
    circuits.succeeded(A, opened_s)
    assert not circuits.allows(A)


def test_workers_that_left_for_good_are_forgotten() -> None:
    clock = Clock()
    circuits, told = breakers(clock)
    circuits.failed(A)
    clock.now_s += FORGOTTEN_S + 1
    circuits.failed(B)
    assert not circuits.doubts(A)
    assert told == [(A, "open"), (B, "open"), (A, "closed")]
