"""Writes `docs/metrics.md`, from the services themselves: `python -m tests.metrics_page > docs/metrics.md`."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from draft_service.metrics import DraftMetrics
from orchestrator.metrics import Metrics
from outrider.loop_gauge import LoopGauge
from outrider.model.kv_gauges import KvGauges
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.tier.identity import identify
from outrider.tier.speeds import Speeds
from outrider.tier.tier import BlockTier, TierSettings
from verify_service.engine import Engine
from verify_service.metrics import VerifyMetrics
from verify_service.owners import Owners
from verify_service.restoring import Tier
from verify_service.servicer import VerifyServicer

HEAD = """# Metrics

Written by `python -m tests.metrics_page` from the services' own registries; what they mean together stands in
[operations](operations.md), what wakes somebody up in the [runbook](runbook.md). Counters are totals since the process
started; histograms have `_bucket`, `_sum` and `_count`. No label names a session, or a client.
"""


@contextmanager
def registries() -> Iterator[dict[str, CollectorRegistry]]:
    """Yield the registry of each service, with all that it can have; needs a running event loop."""
    runner = ToyRunner(ToyLanguage(8, 1, 1, 1.0), context_len=256, num_blocks=8)
    blocks = BlockTier(identify(runner, b"toy").identity, TierSettings("unix:///nowhere/tier.sock"))
    verifier, draft, loop = VerifyMetrics(VerifyServicer(Owners(False))), DraftMetrics(), CollectorRegistry()
    verifier.watch(Engine(runner, 8, tier=Tier(blocks, Speeds(1.0))))
    draft.registry.register(KvGauges(runner))
    loop.register(LoopGauge(asyncio.get_running_loop()))
    named = {
        "Orchestrator": Metrics().registry,
        "Verifier": verifier.registry,
        "Draft worker": draft.registry,
        "Every process": loop,
    }
    try:
        yield named
    finally:
        blocks.close(1.0)


def shown_name(family: Metric) -> str:
    """Return the name that queries use."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def families(registry: CollectorRegistry) -> list[Metric]:
    """Return what a registry shows, by name."""
    return sorted(registry.collect(), key=shown_name)


def lines(named: dict[str, CollectorRegistry]) -> Iterable[str]:
    """Yield the page."""
    yield HEAD
    for service, registry in named.items():
        yield f"## {service}\n"
        yield "| metric | kind | |\n|---|---|---|"
        for family in families(registry):
            yield f"| `{shown_name(family)}` | {family.type} | {family.documentation} |"
        yield ""


async def page() -> str:
    """Return the page."""
    with registries() as named:
        return "\n".join(lines(named))


if __name__ == "__main__":
    print(asyncio.run(page()), end="")
