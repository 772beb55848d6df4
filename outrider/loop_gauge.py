"""How busy a process's event loop is, as a Prometheus gauge."""

import asyncio
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class LoopGauge(Collector):
    """Counts the tasks of an event loop when somebody asks: a stream that is never let go keeps its own for ever."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch a loop."""
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        """Return the gauge; may be called on any thread."""
        running = len(asyncio.all_tasks(self._loop))
        yield GaugeMetricFamily("outrider_asyncio_tasks", "Tasks of the event loop that have not ended", running)
