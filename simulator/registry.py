"""Where simulated workers announce themselves, and the real placement over it.

Announcements are as old here as in a real registry: a worker renews its own three times in their life, and one that is
gone stays in the list until its last one is too old.
"""

import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from orchestrator.breakers import Breakers
from orchestrator.channels import Channels
from orchestrator.metrics import Metrics
from orchestrator.placement import Placement
from orchestrator.steering import Steering
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription
from simulator.clock import Clock

TTL_S = 5.0
"""How long an announcement holds."""
RENEWALS = 3

Describe = Callable[[], WorkerDescription | None]
"""Returns what a worker says of itself; None: it is gone."""
T = TypeVar("T")


class Registry:
    """All announcements, by role."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, dict[WorkerId, tuple[WorkerDescription, float]]] = {"verify": {}, "draft": {}}
        self._lists: dict[str, tuple[WorkerDescription, ...] | None] = {"verify": None, "draft": None}
        self._describe: dict[WorkerId, Describe] = {}

    def join(self, describe: Describe, offset_s: float) -> None:
        """Announce a worker from now on; its renewals are `offset_s` behind the clock's full periods."""
        description = describe()
        if description is not None:
            self._describe[description.worker_id] = describe
            self._write(description)
            self._clock.after(offset_s, self._renew, description.worker_id)

    def is_alive(self, worker_id: WorkerId) -> bool:
        """Whether a worker answers now."""
        return worker_id in self._describe and self._describe[worker_id]() is not None

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        """Return the workers of a role whose announcements hold; does not wait."""
        found = self._lists[role]
        if found is None:
            found = self._lists[role] = tuple(description for description, _ in self._known[role].values())
        return found

    def _renew(self, worker_id: WorkerId) -> None:
        description = self._describe[worker_id]()
        if description is not None:
            self._write(description)
            self._clock.after(TTL_S / RENEWALS, self._renew, worker_id)

    def _write(self, description: WorkerDescription) -> None:
        known = self._known[description.role]
        until_s = self._clock.now_s + TTL_S
        self._lists[description.role] = None
        known[description.worker_id] = (description, until_s)
        self._clock.at(until_s, self._expire, description.role, description.worker_id, until_s)

    def _expire(self, role: str, worker_id: WorkerId, until_s: float) -> None:
        entry = self._known[role].get(worker_id)
        if entry is not None and entry[1] == until_s:
            del self._known[role][worker_id]
            self._lists[role] = None


class TimedPlacement(Placement):
    """The real placement; only the question whether a doubted worker answers is put to the simulation."""

    def __init__(self, registry: Registry, clock: Clock, metrics: Metrics, seed: int) -> None:
        """Place over a registry, with lots of a seed."""
        lot = random.Random(seed)
        super().__init__(
            registry,
            Channels({}),
            breakers=Breakers(lot=lot, clock=clock),
            steering=Steering(metrics, clock=clock),
            lot=lot,
        )
        self._registry = registry

    async def _answers(self, worker: WorkerDescription) -> bool:
        return self._registry.is_alive(worker.worker_id)


def at_once(choice: Coroutine[Any, Any, T]) -> T:
    """Run a choice of placement, which waits for nothing here.

    Raises:
        RuntimeError: it waits all the same.
    """
    try:
        choice.send(None)
    except StopIteration as result:
        found: T = result.value
        return found
    choice.close()
    raise RuntimeError("placement waits for something that a simulation does not have")
