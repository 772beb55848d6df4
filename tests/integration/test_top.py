"""`outrider top` against a real registry, a real store and real endpoints."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from draft_service.metrics import DraftMetrics
from orchestrator.metrics import Metrics
from outrider.cli.top import command
from outrider.cli.top.command import top
from outrider.errors import InvalidRequest, StoreUnavailable
from outrider.ids import WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.store.connect import open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.registry import Registry
from outrider.telemetry import metrics_endpoint
from tests.ports import free_port


async def announce(url: str, workers: list[WorkerDescription]) -> None:
    client = open_client(url)
    registry = Registry(client)
    for worker in workers:
        await registry.announce(worker, 60)
    await client.aclose()


@pytest.fixture
def store_url() -> Iterator[str]:
    """A store that no other test announces workers in."""
    loop, server = asyncio.new_event_loop(), EmbeddedServer()
    try:
        yield loop.run_until_complete(server.__aenter__()).url
    finally:
        loop.run_until_complete(server.__aexit__(None, None, None))
        loop.close()


def test_once_prints_who_is_there_and_what_they_do_and_ends(
    store_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.console, "width", 220)
    orchestrator, drafter, workers = Metrics(), DraftMetrics(), []
    orchestrator.speculation.tokens.labels("plain").inc(77)
    drafter.degraded.set(1)
    with ExitStack() as exits:
        for role, registry in (("orchestrate", orchestrator.registry), ("draft", drafter.registry)):
            port = exits.enter_context(metrics_endpoint(registry, free_port(), "127.0.0.1"))
            workers.append(
                WorkerDescription(
                    WorkerId(f"{role}-7"), role, "127.0.0.1:1", "toy", Vocabulary("toy", 8), 64, capacity=9, load=2,
                    attributes={"metrics_port": str(port)},
                )
            )  # fmt: skip
        workers.append(
            WorkerDescription(WorkerId("verify-7"), "verify", "127.0.0.1:1", "toy", Vocabulary("toy", 8), 64)
        )
        asyncio.run(announce(store_url, workers))
        top(store=store_url, once=True)
    printed = capsys.readouterr().out
    lines = {
        word: line for line in printed.splitlines() for word in ("orchestrate-7", "draft-7", "verify-7") if word in line
    }
    assert "77" in lines["orchestrate-7"]
    assert "2/9" in lines["orchestrate-7"]
    assert "degraded" in lines["draft-7"]
    assert "no metrics" in lines["verify-7"]


def test_a_store_that_is_away_is_an_error_and_no_empty_table() -> None:
    with pytest.raises(StoreUnavailable):
        top(store="redis://127.0.0.1:1/0", once=True)


def test_an_interval_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="interval_s"):
        top(store="redis://127.0.0.1:1/0", interval_s=0.0)
