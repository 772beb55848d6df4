"""Moves running generations from a busy draft worker to one that has room, such as one that has just joined.

At most one generation of the process moves per pause, whose length has chance in it, and no second one from a worker
that has not announced another load since: many orchestrators see the same loads, which are a little old, and must not
all act on them at once. What busy means, and who relieves whom, is
`orchestrator.choice`'s to say. A move costs a generation a few plain tokens, and none of its text.

Verifiers are not relieved of running generations, whose KV is there: their next turns go elsewhere (`placement`).
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrator.choice import is_left
from orchestrator.placement import Placement, Wanted
from outrider.errors import StoreUnavailable
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription

log = logging.getLogger(__name__)

SAME_LOAD_S = 5.0
"""A worker whose load has not changed for so long since a generation left it has been given another one."""


class Movable(Protocol):
    """A running generation."""

    @property
    def verifier(self) -> WorkerDescription:
        """Its verifier."""
        ...

    @property
    def drafter_id(self) -> WorkerId:
        """Its draft worker; empty: none."""
        ...

    @property
    def wanted(self) -> Wanted:
        """What it needs of a draft worker."""
        ...

    def leave_drafter(self) -> None:
        """Give the draft worker up for another one; never waits."""
        ...


class Rebalancer:
    """One per process."""

    def __init__(
        self,
        placement: Placement,
        running: Callable[[], Sequence[Movable]],
        pause_s: float,
        lot: random.Random | None = None,
    ) -> None:
        """Move nothing yet.

        Args:
            placement: knows the draft workers and their loads.
            running: returns the generations that have a draft worker.
            pause_s: mean seconds between two moves.
            lot: draws who moves, and the pauses.
        """
        self._placement, self._running, self._pause_s = placement, running, pause_s
        self._lot = lot or random.Random()
        self._left: dict[WorkerId, tuple[int, float]] = {}

    async def run(self) -> None:
        """Move generations one by one until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s * self._lot.uniform(0.5, 1.5))
            try:
                await self.move_one()
            except StoreUnavailable as error:
                log.debug("draft workers are not compared: %s", error)

    async def move_one(self) -> Movable | None:
        """Move one generation if one should; return it."""
        workers = await self._placement.workers("draft")
        # Usually there is none, and nothing more is asked, however many generations run.
        busy = {each.worker_id for each in workers if is_left(each, workers) and not self._was_left(each)}
        generations = [generation for generation in self._running() if generation.drafter_id in busy]
        self._lot.shuffle(generations)
        for generation in generations:
            others = await self._placement.drafters(generation.verifier, generation.wanted)
            own = [worker for worker in others if worker.worker_id == generation.drafter_id]
            if own and is_left(own[0], others):
                self._left[generation.drafter_id] = (own[0].load, time.monotonic())
                log.info("a generation leaves the busy draft worker %s", generation.drafter_id)
                generation.leave_drafter()
                return generation
        return None

    def _was_left(self, worker: WorkerDescription) -> bool:
        """Whether a generation has left a worker that has not told of it yet: its load is too old to go by."""
        load, left_s = self._left.get(worker.worker_id, (-1, 0.0))
        return load == worker.load and time.monotonic() - left_s < SAME_LOAD_S
