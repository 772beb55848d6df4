"""What a pool of KV holds, as Prometheus gauges in bytes; nothing of it names a session."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.model.runner import ModelInfo, ModelRunner


def describe_pool(info: ModelInfo) -> dict[str, str]:
    """Return the attributes of a worker's description that say how wide its model is and how much KV has room."""
    return {
        "hidden_size": str(info.hidden_size),
        "num_blocks": str(info.num_blocks),
        "kv_pool_bytes": str(info.num_blocks * info.kv_block_bytes),
        "kv_bytes_per_token": str(info.kv_bytes_per_token),
    }


class KvGauges(Collector):
    """Reads a runner's pool when somebody asks; every number is of that moment, on whichever thread the runner is."""

    def __init__(self, runner: ModelRunner) -> None:
        """Watch a runner's pool."""
        self._runner = runner

    def collect(self) -> Iterable[Metric]:
        """Return all gauges."""
        usage, block_bytes = self._runner.kv_usage, self._runner.info.kv_block_bytes
        private = (usage.used - usage.shared) / usage.holders if usage.holders else 0.0
        fraction = usage.used / usage.num_blocks
        yield GaugeMetricFamily("outrider_kv_cache_usage_perc", "Fraction of the KV pool in use", fraction)
        for name, text, blocks in (
            ("pool", "Memory of the KV pool", usage.num_blocks),
            ("used", "KV that sessions use, each block counted once", usage.used),
            ("shared", "KV that more than one session uses", usage.shared),
            ("cached", "KV that no session uses, kept until the room is needed", usage.cached),
            ("private_per_session", "KV that only one session uses, average over sessions that have any", private),
        ):
            yield GaugeMetricFamily(f"outrider_kv_{name}_bytes", text, blocks * block_bytes)
