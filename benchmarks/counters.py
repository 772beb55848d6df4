"""What a service of a benchmark's cluster has counted between two moments, and the processor time it took."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.request import urlopen

import psutil
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Counters:
    """A process's counters at one moment, or between two."""

    values: Mapping[str, float]
    """By name, with the value of the one label that tells them apart: `name` or `name:label`."""
    cpu_s: float
    """Processor time, of the user's and the system's."""
    memory_mib: float

    @classmethod
    async def read(cls, pid: int, metrics_port: int) -> Self:
        """Read a process's counters now."""
        text = await asyncio.to_thread(_fetch, metrics_port)
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        values = {":".join((each.name, *each.labels.values())): each.value for each in samples}
        process = psutil.Process(pid)
        spent = process.cpu_times()
        return cls(values, spent.user + spent.system, process.memory_info().rss / 2**20)

    def since(self, before: "Counters") -> "Counters":
        """Return what was counted since; of memory, what there is now."""
        values = {name: value - before.values.get(name, 0.0) for name, value in self.values.items()}
        return Counters(values, self.cpu_s - before.cpu_s, self.memory_mib)

    def quantile(self, histogram: str, share: float) -> float:
        """Return a quantile of a histogram, as Prometheus does: evenly spread in its bucket; nan of an empty one."""
        head, below, low = f"{histogram}_bucket:", 0.0, 0.0
        buckets = sorted(
            (float(name.removeprefix(head)), count) for name, count in self.values.items() if name.startswith(head)
        )
        total = buckets[-1][1]
        for high, count in buckets:
            if total and count >= share * total:
                return low if high == float("inf") else low + (high - low) * (share * total - below) / (count - below)
            below, low = count, high
        return float("nan")


def _fetch(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
