"""The command `outrider top`."""

import asyncio
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.live import Live

from outrider.cli.keys import Store, required
from outrider.cli.ranges import check_range
from outrider.cli.running import go
from outrider.cli.top.scrape import Sample, scrape_all
from outrider.cli.top.view import ROLES, Seen, page
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription
from outrider.store.connect import open_client
from outrider.store.registry import Registry

console = Console(highlight=False, markup=False)


def top(
    *,
    store: Store = "",
    once: Annotated[bool, Parameter(negative="")] = False,
    interval_s: float = 2.0,
) -> None:
    """Show what the workers of a cluster do: sessions, load, tokens, acceptance, and why speculation is off.

    Who there is comes from the registry in the store; what they do from the metrics endpoint of each that has one
    (METRICS_PORT), as far as this machine reaches them.

    Args:
        store: URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL.
        once: Print the tables once and end; rates need two looks and are left out.
        interval_s: Seconds between two looks.
    """
    check_range("interval_s", interval_s, 0.2, 3600)
    go(_top(required(store), interval_s, once=once))


async def _top(store: str, interval_s: float, *, once: bool) -> None:
    client = open_client(store)
    try:
        registry = Registry(client)
        seen = await _look(registry, {})
        if once:
            console.print(page(seen))
            return
        with Live(page(seen), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                seen = await _look(registry, {each.worker.worker_id: each.now for each in seen})
                live.update(page(seen), refresh=True)
    finally:
        await client.aclose()


async def _look(registry: Registry, before: dict[WorkerId, Sample]) -> list[Seen]:
    """Return everybody who is in the registry, with their metrics.

    Raises:
        StoreUnavailable: the registry cannot be read.
    """
    workers = [worker for role in ROLES for worker in await registry.workers(role)]
    samples = await asyncio.to_thread(scrape_all, [metrics_url(worker) for worker in workers])
    return [Seen(worker, now, before.get(worker.worker_id)) for worker, now in zip(workers, samples, strict=True)]


def metrics_url(worker: WorkerDescription) -> str:
    """Return where a worker's metrics are, by what it announces; empty: nowhere."""
    port = worker.attributes.get("metrics_port", "0")
    if not port.isdecimal() or port == "0":
        return ""
    host = "127.0.0.1" if worker.address.startswith("unix:") else worker.address.rpartition(":")[0]
    return f"http://{host}:{port}/metrics"
