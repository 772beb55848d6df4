"""What an orchestrator counts, in a registry of its own. Ratios are queries; no label ever names a session."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from orchestrator.breakers import CLOSED, HALF_OPEN, OPEN
from orchestrator.figures import Round
from outrider.errors import LimitReached, OutriderError, Unauthenticated
from outrider.ids import TokenKind, WorkerId
from outrider.messages import VerdictCause
from outrider.telemetry import WAIT_BUCKETS_S, SpeculationMetrics

OVERHEAD_BUCKETS_S = (
    0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.5, 2.0,
)  # fmt: skip
MAX_POSITION = 32
"""Acceptance is counted per distance up to here."""
MAX_WORKERS = 256
"""Workers that have series of their own: they come back under other names, and nobody says which are gone for good."""
OUTCOMES = (
    "stop",
    "length",
    "cancelled",
    "internal",
    "data_loss",
    "unavailable",
    "store_unavailable",
    "resource_exhausted",
)
"""How generations end; others appear when they happen."""
EVENTS = ("late_verdict", "late_event", "drafter_lost", "drafter_moved", "verifier_lost")
"""What `orchestrator.rounds` counts."""
_CAUSES = (
    VerdictCause.ATTACHED,
    VerdictCause.TESTED,
    VerdictCause.PLAIN,
    VerdictCause.PATIENCE,
    VerdictCause.RESET,
    VerdictCause.QUARANTINED,
)


class Metrics:
    """The counters of one process; label children are bound once."""

    def __init__(self) -> None:
        """Make a registry, with all counters at 0."""
        self.registry = CollectorRegistry()
        self.speculation = spoken = SpeculationMetrics(self.registry)
        self.running = Gauge("outrider_num_requests_running", "Generations under way", registry=self.registry)
        self.total_s = Histogram(
            "outrider_generation_seconds", "Arrival to end", registry=self.registry, buckets=WAIT_BUCKETS_S
        )
        self.overhead_s = Histogram(
            "outrider_round_overhead_seconds",
            "From a verdict's arrival until its tokens were written to the client's connection",
            registry=self.registry,
            buckets=OVERHEAD_BUCKETS_S,
        )
        self.drafter_out = Gauge(
            "outrider_drafter_out",
            "1 where new sessions get no such drafter, by name and reason: detached, below_plain",
            ["drafter", "reason"],
            registry=self.registry,
        )
        counter = self._counter
        self.generations = counter("generations", "Generations that ended, by outcome", "outcome")
        self.events = counter("orchestrator_events", "Lost workers and late messages, by kind", "event")
        what = "Calls that were refused before a generation began, by limit of a key or by the error's reason"
        self.refused = counter("refused_calls", what, "reason")
        what = "Responses over HTTP, by route and status; one that the client did not wait for counts as 499"
        self.http_responses = counter("http_responses", what, "route", "status")
        self.drafter_sessions = counter("drafter_sessions", "Sessions given to draft workers, by sort", "drafter")
        self.drafter_tested = counter("drafter_tested_tokens", "Draft tokens tested, by sort", "drafter")
        self.drafter_accepted = counter("drafter_accepted_tokens", "Draft tokens accepted, by sort", "drafter")
        self._workers: OrderedDict[WorkerId, None] = OrderedDict()
        self._worker_tested = counter("worker_tested_tokens", "Draft tokens tested, by draft worker", "worker")
        self._worker_accepted = counter("worker_accepted_tokens", "Draft tokens accepted, by draft worker", "worker")
        what = "Changes of workers' circuit breakers, by worker and the state they are in since"
        self._circuits = counter("circuit_changes", what, "worker", "state")
        self.flight_records = counter("flight_records", "Flight records written, by cause: error, demand", "cause")
        self.rollbacks = counter("rollbacks", "Epochs that ended with a rejection or a reset")
        self._kinds = {kind: spoken.tokens.labels(kind.name.lower()) for kind in TokenKind}
        self._causes = {cause: spoken.epochs.labels(cause) for cause in _CAUSES}
        positions = [str(position) for position in range(MAX_POSITION)]
        self._accepted_at = [spoken.accepted_per_position.labels(position) for position in positions]
        self._tested_at = [spoken.tested_per_position.labels(position) for position in positions]
        self._begin_at_0()

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"outrider_{name}", what, labels, registry=self.registry)

    def _begin_at_0(self) -> None:
        """Show what alerts ask for from the start: a series that begins with an event hides it from `increase`."""
        for counter, values in (
            (self.generations, OUTCOMES),
            (self.events, EVENTS),
            (self.refused, ("resource_exhausted", "unavailable")),
            (self.flight_records, ("error", "demand")),
        ):
            for value in values:
                counter.labels(value)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Count what the block raises as a refused call; keys and their limits are counted where they are known.

        Raises:
            OutriderError: what the block raised.
        """
        try:
            yield
        except OutriderError as error:
            if not isinstance(error, LimitReached | Unauthenticated):
                self.refused.labels(error.reason.lower()).inc()
            raise

    def count_circuit(self, worker_id: WorkerId, state: str) -> None:
        """Count a change of a worker's circuit: it is "open", "half_open" or "closed" since."""
        self._heard_of(worker_id)
        self._circuits.labels(worker_id, state).inc()

    def count_round(self, committed: Round, distance: int, worker_id: WorkerId = WorkerId("")) -> None:
        """Count a committed verdict.

        Args:
            committed: the verdict.
            distance: how far from the start of its epoch its first test was.
            worker_id: who drafts; empty: nobody.
        """
        spoken = self.speculation
        if committed.rolled_back:
            self.rollbacks.inc()
        if committed.next_epoch != committed.epoch:
            self._causes[committed.cause].inc()
        if committed.num_tested:
            spoken.rounds.inc()
            spoken.tested.inc(committed.num_tested)
            spoken.accepted.inc(committed.num_accepted)
            for position in range(distance, min(distance + committed.num_accepted, MAX_POSITION)):
                self._accepted_at[position].inc()
            if worker_id:
                self._heard_of(worker_id)
                self._worker_tested.labels(worker_id).inc(committed.num_tested)
                self._worker_accepted.labels(worker_id).inc(committed.num_accepted)
            for position in range(distance, min(distance + committed.num_tested, MAX_POSITION)):
                self._tested_at[position].inc()
        if committed.kinds:
            spoken.verify_s.observe(committed.verify_s)
            spoken.queue_s.observe(committed.queue_s)
        for kind in set(committed.kinds):
            self._kinds[kind].inc(committed.kinds.count(kind))

    def _heard_of(self, worker_id: WorkerId) -> None:
        """Let go of the series of the worker that was heard of longest ago, where there are too many."""
        self._workers[worker_id] = None
        self._workers.move_to_end(worker_id)
        if len(self._workers) > MAX_WORKERS:
            gone, _ = self._workers.popitem(last=False)
            _forget(self._worker_tested, gone)
            _forget(self._worker_accepted, gone)
            for state in (OPEN, HALF_OPEN, CLOSED):
                _forget(self._circuits, gone, state)


def _forget(counter: Counter, *labels: str) -> None:
    """Let go of a series, if there is one."""
    with suppress(KeyError):
        counter.remove(*labels)
