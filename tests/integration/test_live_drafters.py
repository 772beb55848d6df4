"""Drafters are detached, swapped and split while text is generated, and no text changes."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from orchestrator.app import OrchestratorApp
from orchestrator.metrics import Metrics
from orchestrator.policy_watch import PolicyWatch
from orchestrator.steering import Steering
from outrider.cli.drafters import live
from outrider.client import Client
from outrider.drafter_policy import DrafterPolicy
from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams
from outrider.store.connect import open_client
from outrider.store.drafters import PolicyStore
from outrider.store.embedded import EmbeddedServer
from outrider.store.registry import Registry
from tests.e2e.toys import expected
from tests.integration.cluster_bench import Bench, hear, until

HEARTBEAT: dict[str, Any] = {"heartbeat_ttl_s": 1.5}
GREEDY = SamplingParams(temperature=0.0)
TOKENS = 500
LONG = 2000
"""Tokens of a generation that is still running when a drafter has been looked for again."""
SWAPS = 6


def ask(text: str, **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {"max_tokens": TOKENS, "sampling": GREEDY, "ignore_eos": True}
    return GenerationRequest(TextPrompt(text), speculation=SpeculationChoice(gamma=3), **{**known, **fields})


class Cluster:
    """A verifier, draft workers of two kinds and an orchestrator that know each other by the store alone."""

    def __init__(self, bench: Bench, policies: PolicyStore) -> None:
        self.bench, self.policies = bench, policies
        self.drafters: dict[str, DraftApp] = {}

    async def start(self) -> None:
        common = {"store_url": self.bench.store_url, **HEARTBEAT}
        await self.bench.verifier(toy_delay_s=0.003, **common)
        _, self.drafters["toy"] = await self.bench.drafter(toy_delay_s=0.0005, worker_id="toy-1", **common)
        lookup = DraftApp(
            DraftSettings(drafter="prompt_lookup", model="toy", toy_seed=7, worker_id="lookup-1", **common)
        )
        await self.bench._run(lookup)
        self.drafters["prompt_lookup"] = lookup
        _, self.app, self.client = await self.bench.orchestrator([], [], **HEARTBEAT)
        client = open_client(self.bench.store_url)
        while len(await Registry(client).workers("draft")) < 2:  # noqa: ASYNC110  (nothing announces workers)
            await asyncio.sleep(0.01)
        await client.aclose()

    def seated(self, kind: str) -> int:
        seats = self.drafters[kind].seats
        assert seats is not None
        return len(seats)

    async def use_only(self, kind: str) -> None:
        """Detach the other kind, and have the orchestrator look at once."""
        other = next(each for each in self.drafters if each != kind)
        await self.policies.change(lambda _: DrafterPolicy().detach(other))
        assert self.app.watch is not None
        await self.app.watch.look()

    app: OrchestratorApp
    client: Client


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with EmbeddedServer() as server, Bench(server.url) as bench:
        client = open_client(server.url)
        made = Cluster(bench, PolicyStore(client))
        await made.start()
        yield made
        await client.aclose()


async def test_swapping_drafters_every_few_rounds_changes_no_text(cluster: Cluster) -> None:
    await cluster.use_only("toy")
    asked = [ask(f"a mat {n} ") for n in range(2)]
    asked += [ask(f"a mat {n} ", seed=n, sampling=SamplingParams()) for n in range(2)]
    tasks = [asyncio.create_task(hear(cluster.client, each)) for each in asked]
    await until(lambda: cluster.seated("toy") == 4)
    kinds = ["prompt_lookup", "toy"]
    for swap in range(SWAPS):
        kind = kinds[swap % 2]
        await cluster.use_only(kind)
        await until(lambda kind=kind: cluster.seated(kind) == 4)  # type: ignore[misc]
        await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks), "swaps came too late"
    heard = await asyncio.gather(*tasks)
    for n, each in enumerate(heard):
        assert each.token_ids == expected(f"a mat {n % 2} ", TOKENS, None if n < 2 else n - 2)
        assert each.finished.figures.num_accepted > 0
    moved = cluster.app.metrics.registry.get_sample_value(
        "outrider_orchestrator_events_total", {"event": "drafter_moved"}
    )
    assert moved == 4 * SWAPS
    for kind in kinds:
        labels = {"drafter": kind}
        assert cluster.app.metrics.registry.get_sample_value("outrider_drafter_tested_tokens_total", labels), kind


async def test_a_session_whose_only_drafter_is_detached_goes_on_plain_and_drafts_again_when_it_is_back(
    cluster: Cluster,
) -> None:
    store = cluster.bench.store_url
    for name in ("toy-1", "prompt_lookup"):
        await asyncio.to_thread(live.detach, name, store=store)
    task = asyncio.create_task(hear(cluster.client, ask("on a ", max_tokens=LONG)))
    assert cluster.app.watch is not None
    await cluster.app.watch.look()
    await until(lambda: cluster.app.sessions is not None and len(cluster.app.sessions.running()) == 1)
    assert [cluster.seated(kind) for kind in cluster.drafters] == [0, 0]
    await asyncio.to_thread(live.attach, "toy-1", store=store)
    await until(lambda: cluster.seated("toy") == 1)
    heard = await task
    assert heard.token_ids == expected("on a ", LONG)
    assert heard.finished.figures.num_plain > 0
    assert heard.finished.figures.num_accepted > 0


async def test_the_list_tells_what_was_measured_and_who_is_detached(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await hear(cluster.client, ask("on a ", max_tokens=60, drafter="toy"))
    store = cluster.bench.store_url
    await asyncio.to_thread(live.detach, "prompt_lookup", store=store)
    await asyncio.to_thread(live.split, "toy=3", "nobody=1", store=store)
    assert "no draft worker is, or has, nobody now" in capsys.readouterr().err
    lines, shown = {"toy-1": ""}, capsys.readouterr()
    while " 0." not in lines["toy-1"]:  # it is told with a heartbeat
        await asyncio.sleep(0.1)
        await asyncio.to_thread(live.list_, store=store)
        shown = capsys.readouterr()
        lines = {line.split()[0]: line for line in shown.out.splitlines()}
    assert " detached" in lines["lookup-1"]
    assert " in use" in lines["toy-1"]
    assert "toy 75.0%, nobody 25.0%" in shown.err.replace("\n", " ")
    await asyncio.to_thread(live.reset, store=store)
    assert await cluster.policies.read() == DrafterPolicy()


async def test_a_record_that_nobody_can_read_is_named_once_and_the_last_good_one_stays(
    valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, prefix, nobody = open_client(valkey_url), f"test-{secrets.token_hex(4)}", list[Any]()
    policies, steering = PolicyStore(client, prefix=prefix), Steering(Metrics())
    watch = PolicyWatch(policies, steering, lambda: nobody)
    good = await policies.change(lambda policy: policy.detach("a"))
    await watch.look()
    await client.set(f"{prefix}:{{drafters}}:policy", b'{"detached": "all"}')
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await watch.look()
    assert steering.policy == good
    warnings: Sequence[str] = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "drafters stay as they were" in warnings[0]
    assert "policy.detached" in warnings[0]
    await policies.reset()
    await watch.look()
    assert steering.policy == DrafterPolicy()
    await client.aclose()
