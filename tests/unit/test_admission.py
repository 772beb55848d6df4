"""Places for generations: who gets one, who waits, and what those hear that are refused."""

import asyncio
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry

from orchestrator.admission import Admission, Asked, Place
from outrider.errors import InvalidRequest, ResourceExhausted, Unavailable


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def soon() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def taking(admission: Admission, key_id: str = "") -> "asyncio.Task[Place]":
    return asyncio.get_running_loop().create_task(admission.take(Asked(key_id)))


async def test_places_are_given_at_once_then_one_for_each_that_comes_back() -> None:
    admission = Admission(2)
    first, second = await admission.take(Asked()), await admission.take(Asked())
    third, fourth = taking(admission), taking(admission)
    await soon()
    assert (third.done(), admission.num_waiting) == (False, 2)
    first.give_back()
    first.give_back()
    await soon()
    assert (third.done(), fourth.done()) == (True, False)
    second.give_back()
    (await fourth).give_back()
    (await third).give_back()
    assert admission.num_waiting == 0


async def test_nobody_passes_those_who_wait() -> None:
    admission = Admission(1)
    place = await admission.take(Asked("a"))
    waiting = taking(admission, "b")
    await soon()
    late = taking(admission, "c")
    place.give_back()
    await soon()
    assert (waiting.done(), late.done()) == (True, False)
    (await waiting).give_back()
    (await late).give_back()


async def test_a_full_line_is_refused_with_a_delay() -> None:
    admission = Admission(1, max_waiting=0)
    place = await admission.take(Asked())
    with pytest.raises(ResourceExhausted, match="1 generations are under way") as caught:
        await admission.take(Asked())
    assert caught.value.retry_delay_s >= 1.0
    place.give_back()
    (await admission.take(Asked())).give_back()


async def test_a_key_that_fills_the_line_makes_room_for_another() -> None:
    admission = Admission(1, max_waiting=2)
    place = await admission.take(Asked("greedy"))
    greedy = [taking(admission, "greedy") for _ in range(2)]
    await soon()
    modest = taking(admission, "modest")
    with pytest.raises(ResourceExhausted):
        await greedy[1]
    place.give_back()
    for task in (greedy[0], modest):
        (await task).give_back()


async def test_what_cannot_begin_in_time_is_refused_early_with_the_estimate() -> None:
    clock = Clock()
    admission = Admission(1, clock=clock, max_wait_s=10_000.0)
    for _ in range(60):
        place = await admission.take(Asked())
        clock.now_s += 800.0
        place.give_back()
    place = await admission.take(Asked())
    expected = r"expected in 800\.0 s, and may be waited for no longer than 300\.0 s"
    async with asyncio.timeout(10.0):  # what is not refused early would wait for all of its time
        with pytest.raises(ResourceExhausted, match=expected) as caught:
            await admission.take(Asked(max_wait_s=300.0))
    assert caught.value.retry_delay_s == pytest.approx(500.0, abs=1.0)
    assert admission.num_waiting == 0
    place.give_back()


async def test_a_wait_that_was_too_long_ends() -> None:
    admission = Admission(1)
    place = await admission.take(Asked())
    with pytest.raises(ResourceExhausted, match=r"no longer than 0\.0 s"):
        await admission.take(Asked(max_wait_s=0.01))
    assert admission.num_waiting == 0
    place.give_back()
    (await admission.take(Asked())).give_back()


async def test_a_client_that_leaves_the_line_takes_no_place_with_it() -> None:
    admission = Admission(1)
    place = await admission.take(Asked())
    gone, patient = taking(admission), taking(admission)
    await soon()
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    place.give_back()
    (await patient).give_back()
    given, last = await admission.take(Asked()), taking(admission)
    await soon()
    given.give_back()
    last.cancel()  # at the very moment at which it is given its place
    with suppress(asyncio.CancelledError):
        await last
    (await asyncio.wait_for(admission.take(Asked()), 60.0)).give_back()


async def test_a_stopping_process_sends_those_who_wait_elsewhere() -> None:
    admission = Admission(1)
    place, waiting = await admission.take(Asked()), taking(admission)
    await soon()
    admission.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await admission.take(Asked())
    place.give_back()


async def test_a_block_that_fails_gives_its_place_back() -> None:
    admission = Admission(1)
    with pytest.raises(ValueError, match="broken"):
        async with admission.place(Asked()):
            raise ValueError("broken")
    async with admission.place(Asked()) as place:
        pass
    with pytest.raises(ResourceExhausted):
        await admission.take(Asked(max_wait_s=0.0))
    place.give_back()


def test_a_priority_above_the_keys_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"priority: 3 is not allowed; expected -8 \.\. 2"):
        Asked("key", priority=3, max_priority=2)


async def test_waits_show_in_the_metrics() -> None:
    registry = CollectorRegistry()
    admission = Admission(1, registry=registry)
    place, waiting = await admission.take(Asked()), taking(admission)
    await soon()
    assert registry.get_sample_value("outrider_num_requests_waiting") == 1
    place.give_back()
    (await waiting).give_back()
    assert registry.get_sample_value("outrider_num_requests_waiting") == 0
    assert registry.get_sample_value("outrider_admission_wait_seconds_count") == 2
