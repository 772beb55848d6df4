"""What is seen of a cluster's processes from outside: memory over time, and gauges at rest."""

import asyncio
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak.stage import metrics_port
from outrider.cluster import LocalCluster
from outrider.store.connect import open_client

SAMPLE_S = 2.0
"""Between two looks at the memory."""
REST_S = 60.0
"""Longest wait for the cluster to come to rest."""
GAUGES = (
    "outrider_num_requests_running",
    "outrider_num_requests_waiting",
    "outrider_draft_sessions",
    "outrider_kv_used_bytes",
    "outrider_asyncio_tasks",
)
"""What has to be at rest as it was before, wherever it is shown."""

SPARE_THREADS = 8
"""Pools start threads when they first need them, and keep them; a leak would go on."""

Samples = dict[str, list[tuple[float, int]]]
"""Resident bytes by process: (seconds since the start, bytes)."""
Rest = dict[str, float]
"""Gauges by "process gauge"."""


@dataclass(slots=True)
class Watch:
    """Looks at a running cluster."""

    cluster: LocalCluster
    samples: Samples = field(default_factory=lambda: defaultdict(list))

    def processes(self) -> dict[str, psutil.Process]:
        """Return the services and the store, by name."""
        found = {name: psutil.Process(service.pid) for name, service in self.cluster.services.items()}
        known = {process.pid for process in found.values()}
        for child in psutil.Process().children():
            if child.pid not in known and "-server" in child.name():
                found["store"] = child
        return found

    async def sample(self) -> None:
        """Note every process's memory at intervals, until cancelled."""
        started_s, processes = time.monotonic(), self.processes()
        while True:
            for name, process in processes.items():
                self.samples[name].append((time.monotonic() - started_s, process.memory_info().rss))
            await asyncio.sleep(SAMPLE_S)

    async def metrics(self, name: str) -> dict[str, float]:
        """Return all metrics of a service; labels are part of the name, as `name{kind}`.

        Raises:
            Unavailable: it has ended; with the end of its log.
        """
        self.cluster.services[name].require_running()
        port = metrics_port(self.cluster.services[name].spec)
        return await asyncio.to_thread(_read, f"http://127.0.0.1:{port}/metrics")

    async def gauges(self) -> Rest:
        """Return what has to be at rest as it was before."""
        seen: Rest = {}
        for name in self.cluster.services:
            values = await self.metrics(name)
            seen |= {f"{name} {gauge}": values[gauge] for gauge in GAUGES if gauge in values}
        for name, process in self.processes().items():
            seen[f"{name} threads"] = process.num_threads()
        return seen

    async def at_rest(self) -> Rest:
        """Wait until no gauge changes any more, and return them."""
        before: Rest = {}
        deadline_s = time.monotonic() + REST_S
        while time.monotonic() < deadline_s:
            now = await self.gauges()
            if now == before and not any(value for name, value in now.items() if "requests" in name):
                return now
            before = now
            await asyncio.sleep(2 * SAMPLE_S)
        return before

    async def back_at(self, rest: Rest) -> Rest:
        """Wait until every gauge is at most what it was, and return the last reading in any case."""
        deadline_s = time.monotonic() + REST_S
        while True:
            now = await self.gauges()
            if not above(now, rest) or time.monotonic() > deadline_s:
                return now
            await asyncio.sleep(SAMPLE_S)

    async def store_keys(self) -> set[str]:
        """Return the names of all keys of sessions, but for the marks that deleted ones leave for a while."""
        client = open_client(self.cluster.store_url)
        try:
            found = {key async for key in client.scan_iter(match="outrider:{*", count=1000)}
            marks = {key async for key in client.scan_iter(match="outrider:{*", count=1000, _type="hash")
                     if await client.hexists(key, "deleted")}  # fmt: skip
        finally:
            await client.aclose()
        return {key.decode() for key in found - marks}

    def complaints(self) -> list[str]:
        """Return what the services' logs say in earnest."""
        found = []
        for name, service in self.cluster.services.items():
            lines = service.log_path.read_text(errors="replace").splitlines()
            found += [f"{name}: {line}" for line in lines if " ERROR " in line or " CRITICAL" in line]
        return found


def above(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the gauges that are higher than they may be, as (before, now)."""
    spare = {name: SPARE_THREADS if name.endswith(" threads") else 0 for name in now}
    return {
        name: (before.get(name, 0.0), value)
        for name, value in now.items()
        if value > before.get(name, 0.0) + spare[name]
    }


def thirds(samples: list[tuple[float, int]], warm_up: float) -> tuple[float, float, float]:
    """Return the median of each third of a process's memory, without a first share of the time, in bytes.

    Raises:
        ValueError: there are fewer than three samples.
    """
    begin_s = samples[0][0] + warm_up * (samples[-1][0] - samples[0][0])
    values = [size for at_s, size in samples if at_s >= begin_s]
    count = len(values) // 3
    if not count:
        raise ValueError(f"{len(values)} samples have no thirds")
    return median(values[:count]), median(values[count : 2 * count]), median(values[2 * count :])


def _read(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value for sample in samples
    }
