"""What the generations of a process see of the registry while they look for workers again and again: one read for all.

A generation without a draft worker looks every second, and all that lose one look at once. Their number must not be
the store's load.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.errors import StoreUnavailable
from outrider.messages import WorkerDescription

FRESH_S = 0.5
"""How old a read may be; announcements are older."""


class WorkerSource(Protocol):
    """Where workers are found."""

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        """Return the reachable workers of a role; waits for I/O. Repeatable."""
        ...


class SharedView:
    """A source that reads another one at most once in `FRESH_S` and role, however many ask."""

    def __init__(self, source: WorkerSource, clock: Callable[[], float] = time.monotonic) -> None:
        """Have read nothing yet; `clock` gives rising seconds."""
        self._source, self._clock = source, clock
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._read: dict[str, tuple[float, Sequence[WorkerDescription] | StoreUnavailable]] = {}
        """By role: when, and what came of it."""

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        """Return the workers of a role, as they were a moment ago at most.

        Raises:
            StoreUnavailable: the source could not be asked a moment ago; whoever waited is told, and asks no more.
        """
        async with self._reading[role]:
            read_s, found = self._read.get(role, (float("-inf"), ()))
            if self._clock() - read_s >= FRESH_S:
                found = await self._look(role)
                self._read[role] = self._clock(), found
        if isinstance(found, StoreUnavailable):
            raise StoreUnavailable(found.message)
        return found

    async def _look(self, role: str) -> Sequence[WorkerDescription] | StoreUnavailable:
        try:
            return await self._source.workers(role)
        except StoreUnavailable as error:
            return error
