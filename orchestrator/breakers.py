"""Circuit breakers: a worker that fails is left out for a while, and has to answer before it is chosen again. No I/O.

    closed ── failures in a row reach the threshold ──▶ open ── its pause is over ──▶ half open
      ▲                                                  ▲                              │
      └────────── a stream opened since then works ──────┼──────────────────────────────┤
                                                         └── the probe, or a try, fails ┘

Half open means: it may be chosen by whoever finds it answering under its own name (`orchestrator.placement` asks). Each
pause is about twice as long as the one before. Failures while it is open count for nothing: when a worker dies, all
its streams break at once, and that is one event.
"""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.ids import WorkerId

log = logging.getLogger(__name__)

FIRST_BREAK_S = 0.5
"""A worker is left out at least so long once its circuit has opened, twice as long each time it opens again."""
LONGEST_BREAK_S = 15.0
JITTER = 0.25
"""A pause is longer by up to this fraction, by lot."""
FORGOTTEN_S = 600.0
"""A worker that has not failed for so long has a clean record: it may have left for good."""

OPEN, HALF_OPEN, CLOSED = "open", "half_open", "closed"


@dataclass(slots=True)
class _Circuit:
    """What is known of a worker that has failed."""

    num_failures: int = 0
    """In a row, while closed."""
    num_opened: int = 0
    """In a row."""
    last_s: float = 0.0
    """When it failed last."""
    until_s: float = 0.0
    """When the pause ends."""
    half_open: bool = False


class Breakers:
    """The circuits of all workers, as one process sees them."""

    def __init__(
        self,
        threshold: int = 1,
        *,
        on_change: Callable[[WorkerId, str], None] = lambda _, __: None,
        lot: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Trust everybody.

        Args:
            threshold: failures in a row that open a circuit, >= 1.
            on_change: told the worker and the state its circuit is in now: "open", "half_open" or "closed".
            lot: jitter of the pauses.
            clock: rising seconds.
        """
        self._threshold, self._on_change = threshold, on_change
        self._lot, self._clock = lot or random.Random(), clock
        self._circuits: dict[WorkerId, _Circuit] = {}

    def now_s(self) -> float:
        """Return the time, in seconds on the breakers' clock."""
        return self._clock()

    def allows(self, worker_id: WorkerId) -> bool:
        """Whether a worker may be considered: its circuit is closed, or its pause is over."""
        circuit = self._circuits.get(worker_id)
        return circuit is None or circuit.until_s <= self._clock()

    def doubts(self, worker_id: WorkerId) -> bool:
        """Whether a worker's circuit has opened and not closed since: it has to answer before it is chosen."""
        circuit = self._circuits.get(worker_id)
        return circuit is not None and circuit.num_opened > 0

    def probing(self, worker_id: WorkerId) -> None:
        """A worker whose pause is over is being asked whether it answers."""
        circuit = self._circuits.get(worker_id)
        if circuit is not None and not circuit.half_open:
            circuit.half_open = True
            self._on_change(worker_id, HALF_OPEN)

    def failed(self, worker_id: WorkerId) -> None:
        """Count a failure; enough of them open the circuit."""
        now_s = self._clock()
        circuit = self._circuits.setdefault(worker_id, _Circuit())
        circuit.last_s = now_s
        if now_s < circuit.until_s:
            return
        circuit.num_failures += 1
        if circuit.num_opened == 0 and circuit.num_failures < self._threshold:
            return
        pause_s = min(LONGEST_BREAK_S, FIRST_BREAK_S * 2**circuit.num_opened) * (1 + JITTER * self._lot.random())
        circuit.until_s, circuit.half_open = now_s + pause_s, False
        circuit.num_opened += 1
        log.warning("worker %s is left out for %.1f s: it has failed", worker_id, pause_s)
        self._on_change(worker_id, OPEN)
        self._forget_the_long_gone(now_s)

    def succeeded(self, worker_id: WorkerId, opened_s: float) -> None:
        """Forget a worker's failures, unless it failed after the stream that works was opened.

        What a dead worker has sent is still being worked on for a while after its end; nobody may take that for life.

        Args:
            worker_id: the worker.
            opened_s: when the stream was opened, as `now_s`.
        """
        circuit = self._circuits.get(worker_id)
        if circuit is None or circuit.last_s >= opened_s:
            return
        del self._circuits[worker_id]
        if circuit.num_opened:
            log.info("worker %s works again", worker_id)
            self._on_change(worker_id, CLOSED)

    def _forget_the_long_gone(self, now_s: float) -> None:
        for worker_id, circuit in list(self._circuits.items()):
            if now_s - circuit.last_s > FORGOTTEN_S:
                del self._circuits[worker_id]
                if circuit.num_opened:
                    self._on_change(worker_id, CLOSED)
