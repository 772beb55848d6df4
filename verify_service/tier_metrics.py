"""The KV tier's Prometheus metrics; numbers of other threads, each read at once."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outrider.tier.format import REASONS
from verify_service.restoring import Restorer

BLOCKS = ("stored", "present", "loaded", "missed", "evicted")
"""What became of blocks: stored, found there when they were to be stored, loaded, not there, gone for newer ones."""
DROPPED = ("queue_full", "breaker", "gone", "timeout", "unreachable", "full", "refused", "defect")
"""Why blocks were not stored."""
SKIPPED = ("slower", "breaker", "deadline", "queue_full")
"""Why sessions computed what they could have loaded."""
FAILURES = ("timeout", "unreachable", "full", "refused")
"""How the server failed."""
DIRECTIONS = ("loading", "storing")


def tier_metrics(restorer: Restorer) -> Iterable[Metric]:
    """Return all metrics of this moment."""
    counts = restorer.tier.tally.counts()
    blocks = CounterMetricFamily("outrider_kv_tier_blocks", "Blocks of KV, by what became of them", labels=["kind"])
    for kind in BLOCKS:
        blocks.add_metric([kind], counts.get((kind, ""), 0))
    yield blocks
    for name, text, label, values in (
        ("refused", "Stored blocks that were not what they should be", "reason", REASONS),
        ("dropped", "Blocks that were not stored", "reason", DROPPED),
        ("skipped", "Loads that were not made, or given up", "reason", SKIPPED),
        ("failures", "Calls that the tier's server did not answer", "reason", FAILURES),
        ("bytes", "Bytes loaded from and stored in the tier", "direction", DIRECTIONS),
        ("seconds", "Time the tier's threads spent", "direction", DIRECTIONS),
    ):
        family = CounterMetricFamily(f"outrider_kv_tier_{name}", text, labels=[label])
        for value in values:
            family.add_metric([value], counts.get((name, value), 0))
        yield family
    yield from _gauges(restorer)


def _gauges(restorer: Restorer) -> Iterable[Metric]:
    speeds = restorer.speeds
    cost = GaugeMetricFamily("outrider_kv_tier_block_seconds", "Seconds per block, as measured last", labels=["way"])
    cost.add_metric(["prefill"], speeds.prefill_s)
    if speeds.load_s is not None:
        cost.add_metric(["load"], speeds.load_s)
    yield cost
    text = "Bytes copied off and not yet stored"
    yield GaugeMetricFamily("outrider_kv_tier_in_flight_bytes", text, restorer.tier.in_flight_bytes)
