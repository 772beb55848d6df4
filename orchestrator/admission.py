"""Places for generations: given at once, waited for in a line of bounded length, or refused with when to try again."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, Histogram

from orchestrator.line import Line, Waiter
from outrider.errors import InvalidRequest, ResourceExhausted, Unavailable
from outrider.telemetry import WAIT_BUCKETS_S

RETRY_DELAY_S = 1.0
"""What a client is told to wait at least."""
MIN_PRIORITY = -8
RESUMING = 8
"""Priority of a generation that goes on: its client has waited once."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides about a generation's place."""

    key_id: str = ""
    weight: int = 1
    priority: int = 0
    max_priority: int = 8
    max_wait_s: float | None = None
    """Longest wait; None: the process's."""

    def __post_init__(self) -> None:
        """Refuse a priority that the key does not allow.

        Raises:
            InvalidRequest: it is higher.
        """
        if self.priority > self.max_priority:
            raise InvalidRequest("priority", self.priority, f"{MIN_PRIORITY} .. {self.max_priority} with this API key")


class Place:
    """A place that is held; given back once."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        """Hold it."""
        self._give_back: Callable[[], None] | None = give_back

    def give_back(self) -> None:
        """Let the next one have it; idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Admission:
    """The places of one process; used on its event loop."""

    def __init__(
        self,
        num_places: int,
        *,
        max_waiting: int = 256,
        max_wait_s: float = 30.0,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with all places free.

        Args:
            num_places: generations at one time, >= 1.
            max_waiting: most that wait, >= 0.
            max_wait_s: longest wait of a request that does not say.
            registry: for metrics; None: of nobody's.
            clock: rising seconds.
        """
        registry = registry or CollectorRegistry()
        self._num_places, self._max_wait_s, self._clock = num_places, max_wait_s, clock
        self._line = Line(num_places, max_waiting)
        self._grants: dict[int, asyncio.Future[None]] = {}
        """By number in line: who waits."""
        self._num_taken = 0
        self._closed = False
        self._waiting = Gauge("outrider_num_requests_waiting", "Generations that wait for a place", registry=registry)
        self._waited_s = Histogram(
            "outrider_admission_wait_seconds", "Wait for a place", registry=registry, buckets=WAIT_BUCKETS_S
        )

    @property
    def num_waiting(self) -> int:
        """Generations in line."""
        return len(self._line)

    def close(self) -> None:
        """Give no more places; who waits is told to go elsewhere."""
        self._closed = True
        for grant in self._grants.values():
            if not grant.done():
                grant.set_exception(Unavailable("the orchestrator is stopping"))

    async def take(self, asked: Asked) -> Place:
        """Take a place, waiting for it if need be.

        Raises:
            ResourceExhausted: the line is full, or the wait would be, or was, too long.
            Unavailable: the process is stopping.
        """
        if self._closed:
            raise Unavailable("the orchestrator is stopping")
        began_s = self._clock()
        waiter, dismissed = self._line.join(asked.key_id, asked.weight, asked.priority)
        if self._num_taken < self._num_places and len(self._line) <= 1:
            self._line.leave(waiter)
            self._line.serve(waiter)
            self._num_taken += 1
        else:
            await self._wait(waiter, dismissed, asked)
        self._waited_s.observe(self._clock() - began_s)
        taken_s = self._clock()
        return Place(lambda: self._back(taken_s))

    @asynccontextmanager
    async def place(self, asked: Asked) -> AsyncIterator[Place]:
        """Hold a place for the block; it is given back if the block fails, and the block's to give back if not.

        Raises:
            ResourceExhausted: there is none in time.
            Unavailable: the process is stopping.
        """
        place = await self.take(asked)
        try:
            yield place
        except BaseException:
            place.give_back()
            raise

    async def _wait(self, waiter: Waiter, dismissed: Waiter | None, asked: Asked) -> None:
        if dismissed is not None:
            if dismissed is waiter:
                raise self._full()
            self._refuse(dismissed, self._full())
        allowed_s = self._max_wait_s if asked.max_wait_s is None else min(asked.max_wait_s, self._max_wait_s)
        expected_s = self._line.wait_s(waiter)
        if expected_s > allowed_s:
            self._line.leave(waiter)
            raise self._late(expected_s, allowed_s)
        grant = self._grants[waiter.number] = asyncio.get_running_loop().create_future()
        self._waiting.set(len(self._line))
        try:
            async with asyncio.timeout(allowed_s):
                await grant
        except TimeoutError:
            if _is_given(grant):
                return
            raise self._late(self._line.wait_s(waiter), allowed_s) from None
        except asyncio.CancelledError:
            if _is_given(grant):
                self._next()
            raise
        finally:
            del self._grants[waiter.number]
            self._line.leave(waiter)
            self._waiting.set(len(self._line))

    def _back(self, taken_s: float) -> None:
        self._line.held(self._clock() - taken_s)
        self._next()

    def _next(self) -> None:
        """Pass a place that is free on to who is next."""
        self._num_taken -= 1
        while (waiter := self._line.next()) is not None:
            grant = self._grants.get(waiter.number)
            if grant is not None and not grant.done():
                grant.set_result(None)
                self._num_taken += 1
                return

    def _refuse(self, waiter: Waiter, error: ResourceExhausted) -> None:
        grant = self._grants.get(waiter.number)
        if grant is not None and not grant.done():
            grant.set_exception(error)

    def _full(self) -> ResourceExhausted:
        delay_s = max(RETRY_DELAY_S, self._line.wait_s())
        return ResourceExhausted(f"{self._num_taken} generations are under way, and {len(self._line)} wait", delay_s)

    def _late(self, expected_s: float, allowed_s: float) -> ResourceExhausted:
        delay_s = max(RETRY_DELAY_S, expected_s - allowed_s)
        text = f"a place is expected in {expected_s:.1f} s, and may be waited for no longer than {allowed_s:.1f} s"
        return ResourceExhausted(text, delay_s)


def _is_given(grant: "asyncio.Future[None]") -> bool:
    return grant.done() and not grant.cancelled() and grant.exception() is None
