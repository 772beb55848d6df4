"""A verifier's Prometheus metrics, read from the engine's totals when somebody asks."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verify_service.audit import SKIPPED
from verify_service.engine import Engine
from verify_service.servicer import VerifyServicer
from verify_service.tier_metrics import tier_metrics

DROPS = ("stale", "garbage", "duplicate", "gap", "parked_overflow", "parked_expired")
"""Totals of the engine that are messages dropped, rather than work done."""
KINDS = (
    "decode_passes",
    "decode_rows",
    "filled_tokens",
    "kv_reused_tokens",
    "wasted",
    "preempted",
    "guarantee_void",
    "broken_after_header",
    "draft_row_mismatch",
    "failed_passes",
    "failed_sessions",
    "kv_unbalanced",
)
"""Totals that are there from the start: one that begins with its first event hides that event from `increase`."""


class VerifyMetrics(Collector):
    """What the engine and the servicer have counted; numbers of another thread, each read at once."""

    def __init__(self, servicer: VerifyServicer) -> None:
        """Make the registry; there is nothing of an engine until `watch`."""
        self.registry = CollectorRegistry()
        self._servicer = servicer
        self._engine: Engine | None = None
        self.registry.register(self)

    def watch(self, engine: Engine) -> None:
        """Report this engine from now on."""
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """Return all metrics of this moment."""
        totals = dict(self._engine.counters) if self._engine is not None else {}
        dropped = CounterMetricFamily(
            "outrider_dropped_messages", "Peers' messages that were dropped", labels=["reason"]
        )
        for reason in DROPS:
            dropped.add_metric([reason], totals.get(reason, 0))
        for reason, number in dict(self._servicer.dropped).items():
            dropped.add_metric([reason], number)
        events = CounterMetricFamily("outrider_verify_events", "What the engine did, by kind", labels=["kind"])
        for kind in sorted({*totals, *KINDS} - set(DROPS)):
            events.add_metric([kind], totals.get(kind, 0))
        yield dropped
        yield events
        yield from self._gauges()

    def _gauges(self) -> Iterable[Metric]:
        engine = self._engine
        if engine is None:
            return
        running = engine.num_sessions - engine.num_waiting
        yield GaugeMetricFamily("outrider_num_requests_running", "Sessions with KV in the pool", running)
        yield GaugeMetricFamily("outrider_num_requests_waiting", "Sessions without a place", engine.num_waiting)
        yield from _audit(engine)
        yield from engine.kv_gauges.collect()
        if engine.restorer is not None:
            yield from tier_metrics(engine.restorer)


def _audit(engine: Engine) -> Iterable[Metric]:
    """Return what the exactness audit has found."""
    counts = dict(engine.audit.counters)
    for name, text in (
        ("checked", "Finished sessions that were decoded again as twins"),
        ("mismatch", "Finished sessions that differ from their twins"),
        ("tokens", "Tokens compared with a twin's"),
    ):
        yield CounterMetricFamily(f"outrider_exactness_audit_{name}", text, counts.get(name, 0))
    skipped = CounterMetricFamily(
        "outrider_exactness_audit_skipped", "Sampled sessions that were not checked", labels=["reason"]
    )
    for reason in SKIPPED:
        skipped.add_metric([reason], counts.get(reason, 0))
    yield skipped
