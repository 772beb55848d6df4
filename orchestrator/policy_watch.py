"""Reads the operator's policy on drafters every second, and moves running generations off drafters that are detached.

A record that cannot be read, or a store that is away, changes nothing: the last policy that could be read holds.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrator.steering import Steering
from outrider.errors import StoreError, StoreUnavailable
from outrider.messages import WorkerDescription
from outrider.store.drafters import PolicyStore

log = logging.getLogger(__name__)

POLICY_S = 1.0
"""Pause between two looks."""


class Steered(Protocol):
    """A running generation."""

    @property
    def attached(self) -> WorkerDescription | None:
        """Its draft worker, also while nothing is asked of it."""
        ...

    def leave_drafter(self) -> None:
        """Give the draft worker up for another one; never waits."""
        ...


class PolicyWatch:
    """One per process."""

    def __init__(self, store: PolicyStore, steering: Steering, running: Callable[[], Sequence[Steered]]) -> None:
        """Read nothing yet.

        Args:
            store: has the policy.
            steering: follows it.
            running: returns the generations of the process.
        """
        self._store, self._steering, self._running = store, steering, running
        self._told = ""

    async def run(self, pause_s: float = POLICY_S) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(pause_s)

    async def look(self) -> None:
        """Read the policy once, and let generations leave drafters that it detaches."""
        try:
            self._steering.follow(await self._store.read())
            self._told = ""
        except StoreUnavailable as error:
            log.debug("the policy on drafters is not read: %s", error)
        except StoreError as error:
            if self._told != error.message:
                log.warning("drafters stay as they were: %s", error)
            self._told = error.message
        for generation in self._running():
            worker = generation.attached
            name = self._steering.policy.why_detached(worker) if worker is not None else ""
            if worker is not None and name:
                log.info("a generation leaves the draft worker %s: %s is detached", worker.worker_id, name)
                generation.leave_drafter()
