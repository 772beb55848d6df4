"""A verifier and a draft worker in simulated time: the real engine and the real worker, over models that take time.

Both are busy while a model runs, and look at what has arrived in between only afterwards, as their threads do. Each has
a time of its own: it runs ahead of the clock by what its model takes, and what it sends leaves at that time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from draft_service.metrics import DraftMetrics
from draft_service.orders import CloseSession, Order, Report
from draft_service.session import SessionKey
from draft_service.worker import DraftWorker
from outrider.ids import SessionId, WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from simulator.clock import Clock
from simulator.costs import Costs
from simulator.drafter import KIND, TimedDrafter
from simulator.runner import TimedRunner
from simulator.text import VOCAB, Luck
from verify_service.engine import Engine, EngineSettings
from verify_service.inbox import InboxEvent
from verify_service.roster import Limits

VOCABULARY = Vocabulary("simulated", VOCAB)
MODEL = "simulated"
LEAST_STEP_S = 1e-6
"""A step that does nothing takes at least so long, so that time goes on."""


class _Worker(ABC):
    """What both have: a place, a time of their own, and a next turn."""

    def __init__(self, worker_id: WorkerId, zone: int, clock: Clock) -> None:
        self.worker_id, self.zone, self.alive = worker_id, zone, True
        self.busy_s = 0.0
        """Seconds that its model has run."""
        self._clock, self.now_s, self._next_s = clock, 0.0, math.inf

    def spend(self, seconds: float) -> None:
        """Let the model run."""
        self.now_s += seconds
        self.busy_s += seconds

    def _wake(self, at_s: float) -> None:
        """Take a turn at a time, or when what it is doing now is done."""
        due_s = max(at_s, self.now_s)
        if self.alive and due_s < self._next_s:
            self._next_s = due_s
            self._clock.at(due_s, self._turn, due_s)

    def _turn(self, due_s: float) -> None:
        """Take a turn, unless an earlier one has been set since."""
        if self.alive and due_s == self._next_s:
            self.now_s, self._next_s = max(self.now_s, due_s), math.inf
            self._take_turn()

    @abstractmethod
    def _take_turn(self) -> None:
        """Do what is due."""


class TimedVerifier(_Worker):
    """A verifier."""

    def __init__(self, worker_id: WorkerId, zone: int, clock: Clock, costs: Costs, room: "VerifierRoom") -> None:
        """Start an engine."""
        super().__init__(worker_id, zone, clock)
        self._room = room
        runner = TimedRunner(costs, room.num_blocks, room.context_len, self.spend)
        limits = Limits(room.max_sessions, room.max_waiting)
        self.engine = Engine(runner, VOCAB, EngineSettings(limits), lambda: self.now_s)

    def post(self, event: InboxEvent) -> None:
        """Something arrives now."""
        if self.alive:
            # The engine notes when it came; a verifier's own time stands still while it has nothing to do.
            own_s, self.now_s = self.now_s, self._clock.now_s
            self.engine.post(event)
            self.now_s = own_s
            self._wake(self._clock.now_s)

    def _take_turn(self) -> None:
        began_s = self.now_s
        if self.engine.step():
            self._wake(max(self.now_s, began_s + LEAST_STEP_S))
            return
        due_s = self.engine.due_in_s
        if due_s is not None:
            self._wake(self.now_s + due_s)

    def describe(self) -> WorkerDescription:
        """Return what it announces."""
        return WorkerDescription(
            self.worker_id, "verify", str(self.worker_id), MODEL, VOCABULARY, self._room.context_len,
            capacity=self._room.max_sessions, load=self.engine.num_sessions, fingerprint="simulated",
        )  # fmt: skip


class VerifierRoom:
    """How much a verifier holds."""

    def __init__(self, max_sessions: int, max_waiting: int, num_blocks: int, context_len: int) -> None:
        """Keep the sizes: sessions that run and that wait, blocks of KV, and most tokens of a session."""
        self.max_sessions, self.max_waiting = max_sessions, max_waiting
        self.num_blocks, self.context_len = num_blocks, context_len


class TimedDraftWorker(_Worker):
    """A draft worker."""

    def __init__(  # noqa: PLR0913  (place, time, and what it is made of)
        self,
        worker_id: WorkerId,
        zone: int,
        clock: Clock,
        costs: Costs,
        luck: Luck,
        *,
        context_len: int,
        capacity: int,
        metrics: DraftMetrics,
        post: Callable[["TimedDraftWorker", Sequence[Report]], None],
    ) -> None:
        """Start a worker; `post` takes what it says, at its own time."""
        super().__init__(worker_id, zone, clock)
        self._capacity, self._context_len = capacity, context_len
        drafter = TimedDrafter(costs, luck, context_len, self.spend)
        self._worker = DraftWorker(drafter, lambda reports: post(self, reports), metrics, lambda: self.now_s)
        self._orders: list[Order] = []
        self._seats: dict[SessionId, SessionKey] = {}
        """Openings that hold a place, also those that the worker has not turned to yet."""

    def sit_down(self, key: SessionKey) -> bool:
        """Give an opening a place, that of the session's earlier one if there is any; return whether there is one."""
        if key.session_id not in self._seats and len(self._seats) >= self._capacity:
            return False
        self._seats[key.session_id] = key
        return True

    def stand_up(self, key: SessionKey) -> None:
        """Take an opening's place back; a newer one of the session keeps it."""
        if self._seats.get(key.session_id) == key:
            del self._seats[key.session_id]

    def give(self, order: Order) -> None:
        """An order arrives now."""
        if isinstance(order, CloseSession):
            self.stand_up(order.key)
        if self.alive:
            self._orders.append(order)
            self._wake(self._clock.now_s)

    def _take_turn(self) -> None:
        began_s = self.now_s
        orders, self._orders = self._orders, []
        for order in orders:
            self._worker.handle(order)
        if self._worker.has_work:
            self._worker.step()
            self._wake(max(self.now_s, began_s + LEAST_STEP_S))

    def describe(self) -> WorkerDescription:
        """Return what it announces."""
        return WorkerDescription(
            self.worker_id, "draft", str(self.worker_id), MODEL, VOCABULARY, self._context_len, drafter=KIND,
            capacity=self._capacity, load=len(self._seats),
        )  # fmt: skip
