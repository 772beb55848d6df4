"""How each kind of fault is done, from outside the processes, and how it is seen that it was really there."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import psutil

from tests.chaos.clocks import NOTICED_S
from tests.chaos.fleet import START_S, Fleet
from tests.chaos.schedule import Edge, Fault, Kind
from tests.chaos.wire import Weather

SEEN_S = 15.0
"""How long it may take until a fault shows from outside; most of it is for machines that are busy."""
POLL_S = 0.02
CLOCK_TOLERANCE_S = 10.0
"""Of a clock that is read over HTTP on a busy machine; the least jump is three times as far."""


class Trace:
    """What is known of a fault that is under way."""

    def __init__(self) -> None:
        self.injected_s = 0.0
        """When it began, on the monotonic clock."""
        self.was_seen = False
        """Whether it was there: a cut of a connection that nobody has is no fault."""
        self.wrong = ""
        """What a process did that it must not do."""

    def begin(self) -> None:
        """Note that it begins now."""
        self.injected_s = time.monotonic()


async def strike(fleet: Fleet, fault: Fault, trace: Trace) -> None:
    """Do a fault, hold it, and heal it; what it has stopped runs again afterwards."""
    async with HOW[fault.kind](fleet, fault, trace):
        await asyncio.sleep(fault.hold_s)
    async with asyncio.timeout(START_S):
        for name in _named(fault):
            await fleet.ready(name)


def _named(fault: Fault) -> list[str]:
    return [fault.target] if isinstance(fault.target, str) else []


def _name(fault: Fault) -> str:
    assert isinstance(fault.target, str)
    return fault.target


# --- processes ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _killed(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    trace.begin()
    trace.was_seen = await fleet.kill(_name(fault)) == -signal.SIGKILL
    yield
    await fleet.start(_name(fault))


@asynccontextmanager
async def _frozen(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    name = _name(fault)
    trace.begin()
    fleet.signal(name, signal.SIGSTOP)
    try:
        trace.was_seen = await _seen(lambda: fleet.state(name) == psutil.STATUS_STOPPED)
        yield
    finally:
        fleet.signal(name, signal.SIGCONT)


@asynccontextmanager
async def _restarted(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    trace.begin()
    status = await fleet.stop(_name(fault))
    trace.was_seen = True
    if status != 0:
        trace.wrong = f"{fault.target}, told to stop, ended with status {status}"
    yield
    await fleet.start(_name(fault))


# --- connections --------------------------------------------------------------------------------------------------


def _weather(fleet: Fleet, fault: Fault) -> Weather:
    assert isinstance(fault.target, Edge)
    return fleet.weather(fault.target)


@asynccontextmanager
async def _changed(weather: Weather, trace: Trace, linger_s: float) -> AsyncIterator[None]:
    """Hold the weather that the caller has made, then clear it."""
    trace.begin()
    before = weather.num_touched
    weather.change()
    try:
        yield
        await _seen(lambda: weather.num_touched > before, linger_s)
    finally:
        weather.delay_s, weather.loss, weather.cut[:] = 0.0, 0.0, (False, False)
        trace.was_seen = weather.num_touched > before
        weather.change()


@asynccontextmanager
async def _delayed(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    weather = _weather(fleet, fault)
    weather.delay_s = fault.amount
    async with _changed(weather, trace, fault.linger_s):
        yield


@asynccontextmanager
async def _lossy(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    weather = _weather(fleet, fault)
    weather.loss = fault.amount
    weather.lot.seed(fault.number)
    async with _changed(weather, trace, fault.linger_s):
        yield


@asynccontextmanager
async def _parted(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    weather = _weather(fleet, fault)
    weather.cut[:] = (True, True)
    async with _changed(weather, trace, fault.linger_s):
        yield


@asynccontextmanager
async def _half_open(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    weather = _weather(fleet, fault)
    weather.cut[int(fault.amount)] = True
    async with _changed(weather, trace, fault.linger_s):
        yield


@asynccontextmanager
async def _reset(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    trace.begin()
    trace.was_seen = await _seen(lambda: _weather(fleet, fault).reset() > 0, fault.linger_s)
    yield


# --- the store's own ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def _full_memory(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    trace.begin()
    await fleet.store.fill_memory()
    try:
        trace.was_seen = await fleet.store.refusal() == "OOM"
        yield
    finally:
        await fleet.store.free_memory()


@asynccontextmanager
async def _full_disk(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    trace.begin()
    fleet.store.fill_disk()
    try:
        trace.was_seen = await _refused(fleet, "MISCONF")
        yield
    finally:
        fleet.store.free_disk()
        await fleet.store.write_file_anew()


@asynccontextmanager
async def _loading(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    """Kill the store, and let it take its time over the loading of what it had."""
    trace.begin()
    starting = await fleet.store.kill_and_load(fault.hold_s)
    trace.was_seen = await _refused(fleet, "LOADING")
    await starting
    yield


async def _refused(fleet: Fleet, word: str) -> bool:
    """Whether the store refuses a write with a word, before long."""
    until_s = time.monotonic() + SEEN_S
    while time.monotonic() < until_s:
        if await fleet.store.refusal() == word:
            return True
        await asyncio.sleep(POLL_S)
    return False


async def _seen(there: Callable[[], bool], within_s: float = SEEN_S) -> bool:
    until_s = time.monotonic() + within_s
    while not there():
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(POLL_S)
    return True


# --- clocks -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _jumped(fleet: Fleet, fault: Fault, trace: Trace) -> AsyncIterator[None]:
    """Let a clock jump, and jump back."""
    name = _name(fault)
    trace.begin()
    fleet.clocks[name].jump(fault.amount)
    try:
        trace.was_seen = await _off_by(fleet, name, fault.amount)
        yield
    finally:
        fleet.clocks[name].jump(0)
        await asyncio.sleep(NOTICED_S)


async def _off_by(fleet: Fleet, name: str, seconds: float) -> bool:
    """Whether a process's clock is before long as far off as it should be."""
    until_s = time.monotonic() + SEEN_S
    while time.monotonic() < until_s:
        await asyncio.sleep(NOTICED_S / 4)
        if abs(await fleet.time(name) - time.time() - seconds) < CLOCK_TOLERANCE_S:
            return True
    return False


HOW: dict[Kind, Callable[[Fleet, Fault, Trace], AbstractAsyncContextManager[None]]] = {
    Kind.KILL: _killed,
    Kind.FREEZE: _frozen,
    Kind.RESTART: _restarted,
    Kind.DELAY: _delayed,
    Kind.LOSS: _lossy,
    Kind.RESET: _reset,
    Kind.PARTITION: _parted,
    Kind.HALF_OPEN: _half_open,
    Kind.FULL_MEMORY: _full_memory,
    Kind.FULL_DISK: _full_disk,
    Kind.LOADING: _loading,
    Kind.CLOCK: _jumped,
}
