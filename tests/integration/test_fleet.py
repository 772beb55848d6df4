"""Workers and orchestrators find each other in the registry, come and go, and share the load while traffic runs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from draft_service.app import DraftApp
from orchestrator.app import OrchestratorApp
from outrider.client import Client
from outrider.generation import Chunk, GenerationRequest, SpeculationChoice, Started, TextPrompt
from outrider.messages import SamplingParams
from outrider.store.connect import open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.registry import Registry
from tests.e2e.toys import expected
from tests.integration.cluster_bench import Bench, Running, hear, until
from verify_service.app import VerifyApp

GREEDY = SamplingParams(temperature=0.0)
PINNED = SpeculationChoice(gamma=4, window=8)
HEARTBEAT: dict[str, Any] = {"heartbeat_ttl_s": 0.6}


def ask(text: str = "the cat sat on ", **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {"max_tokens": 40, "sampling": GREEDY, "ignore_eos": True, "speculation": PINNED}
    return GenerationRequest(TextPrompt(text), **{**known, **fields})


class Fleet:
    """Services that know nothing of each other but the store."""

    def __init__(self, bench: Bench, registry: Registry) -> None:
        self.bench, self.registry = bench, registry
        self._common: dict[str, Any] = {"store_url": bench.store_url, **HEARTBEAT}

    async def verifier(self, **settings: Any) -> tuple[Running, VerifyApp]:
        running, app = await self.bench.verifier(toy_delay_s=0.005, **self._common, **settings)
        await self._announced("verify", app.worker_id)
        return running, app

    async def drafter(self, **settings: Any) -> tuple[Running, DraftApp]:
        running, app = await self.bench.drafter(toy_delay_s=0.0005, **self._common, **settings)
        await self._announced("draft", app.worker_id)
        return running, app

    async def orchestrator(self, **settings: Any) -> tuple[Running, OrchestratorApp]:
        running, app, _ = await self.bench.orchestrator([], [], **HEARTBEAT, **settings)
        return running, app

    def client(self, *apps: OrchestratorApp) -> Client:
        client = Client([app.address for app in apps], timeout_s=60)
        self.bench._exits.push_async_callback(client.close)
        return client

    async def load(self, app: VerifyApp) -> int:
        """Return how many sessions a verifier is known to have."""
        return sum(each.load for each in await self.registry.workers("verify") if each.worker_id == app.worker_id)

    async def _announced(self, role: str, name: str) -> None:
        while name not in [worker.worker_id for worker in await self.registry.workers(role)]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with EmbeddedServer() as server, Bench(server.url) as bench:
        client = open_client(server.url)
        yield Fleet(bench, Registry(client))
        await client.aclose()


def seats(app: DraftApp) -> list[Any]:
    assert app.seats is not None
    return list(app.seats._seats.values())


def seated(app: DraftApp) -> int:
    assert app.seats is not None
    return len(app.seats)


def running(app: VerifyApp) -> int:
    assert app.engine is not None
    return app.engine.num_sessions


async def test_two_verifiers_and_two_draft_workers_serve_each_other_all_at_once(fleet: Fleet) -> None:
    """Who is paired with whom is drawn by lot among the least busy: one draw in eight pairs them off two by two."""
    verifiers = [(await fleet.verifier())[1] for _ in range(2)]
    drafters = [(await fleet.drafter())[1] for _ in range(2)]
    client = fleet.client((await fleet.orchestrator(placement_seed=1))[1])
    edges: set[tuple[str, str]] = set()
    for _ in range(10):
        tasks = [asyncio.create_task(hear(client, ask(f"the cat {n} ", max_tokens=500))) for n in range(8)]
        await until(lambda: sum(map(seated, drafters)) == 8)
        assert all(running(app) for app in verifiers), "both verifiers have work"
        assert all(seated(app) for app in drafters), "both draft workers have work"
        edges |= {(app.worker_id, seat.verifier_address) for app in drafters for seat in seats(app)}
        heard = await asyncio.gather(*tasks)
        assert [each.token_ids for each in heard] == [expected(f"the cat {n} ", 500) for n in range(8)]
        assert all(each.finished.figures.num_accepted > 0 for each in heard)
        if len(edges) > 2:
            return
    raise AssertionError("a draft worker serves several verifiers, or a verifier has several draft workers")


async def test_workers_and_orchestrators_come_and_go_and_every_text_stays(fleet: Fleet) -> None:
    """All that was there at the start is gone at the end, some of it killed and some told to stop."""
    verifiers, drafters, orchestrators = [await fleet.verifier()], [await fleet.drafter()], [await fleet.orchestrator()]
    heirs = [await fleet.orchestrator(), await fleet.orchestrator(hand_over_after_s=0.0)]
    orchestrators += heirs
    client = fleet.client(*(app for _, app in orchestrators))
    seeded: dict[str, Any] = {"sampling": SamplingParams(), "max_tokens": 400}
    asked = [ask(f"a mat {n} ", max_tokens=400) for n in range(2)]
    asked += [ask(f"a mat {n} ", seed=n, **seeded) for n in range(2)]
    tasks = [asyncio.create_task(hear(client, each)) for each in asked]
    await until(lambda: running(verifiers[0][1]) == 4)
    verifiers.append(await fleet.verifier())
    drafters.append(await fleet.drafter())
    await drafters[0][0].kill()
    await asyncio.sleep(0.2)
    await orchestrators[0][0].kill()
    await asyncio.sleep(0.2)
    draining = [asyncio.create_task(app.drain()) for app in (verifiers[0][1], orchestrators[2][1])]
    heard = await asyncio.gather(*tasks)
    await asyncio.wait_for(asyncio.gather(*draining), 60)
    assert running(verifiers[0][1]) == 0
    for n, each in enumerate(heard):
        started = [event for event in each.events if isinstance(event, Started)]
        assert len(started) == 1
        position = started[0].prompt_len
        for chunk in each.chunks:
            assert chunk.start == position
            position += len(chunk.token_ids)
        assert each.token_ids == expected(f"a mat {n % 2} ", 400, None if n < 2 else n - 2)


async def test_generations_on_a_busy_draft_worker_move_one_by_one_to_one_that_joins(fleet: Fleet) -> None:
    await fleet.verifier()
    _, old = await fleet.drafter(max_sessions=4)
    _, app = await fleet.orchestrator(rebalance_s=0.1)
    client = fleet.client(app)
    tasks = [asyncio.create_task(hear(client, ask(f"on {n} ", max_tokens=4000))) for n in range(4)]
    await until(lambda: seated(old) == 4)
    await asyncio.sleep(0.5)
    assert seated(old) == 4, "there is nowhere to go"
    _, new = await fleet.drafter(max_sessions=4)
    await until(lambda: seated(new) >= 1)
    await asyncio.sleep(1.5)
    assert (seated(old), seated(new)) in [(2, 2), (3, 1)], "moves end when the old one is not busy any more"
    moved = app.metrics.registry.get_sample_value("outrider_orchestrator_events_total", {"event": "drafter_moved"})
    assert moved in (1, 2, 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_no_generation_moves_where_that_is_switched_off(fleet: Fleet) -> None:
    await fleet.verifier()
    _, old = await fleet.drafter(max_sessions=2)
    client = fleet.client((await fleet.orchestrator(rebalance_s=0))[1])
    tasks = [asyncio.create_task(hear(client, ask(f"on {n} ", max_tokens=4000))) for n in range(2)]
    await until(lambda: seated(old) == 2)
    _, new = await fleet.drafter(max_sessions=4)
    await asyncio.sleep(1.0)
    assert (seated(old), seated(new)) == (2, 0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_turn_goes_where_its_kv_is_until_that_verifier_is_busy(fleet: Fleet) -> None:
    keeper, old = await fleet.verifier(max_sessions=4)
    client = fleet.client((await fleet.orchestrator())[1])
    first = await hear(client, ask())
    started = first.events[0]
    assert isinstance(started, Started)
    _, new = await fleet.verifier(max_sessions=4)
    turn: dict[str, Any] = {"session_id": started.session_id, "max_tokens": 20}

    async def opened_on(app: VerifyApp) -> int:
        task = asyncio.create_task(hear(client, ask("a mat ", **turn)))
        peak = 0
        while not task.done():
            peak = max(peak, running(app))
            await asyncio.sleep(0.002)
        await task
        return peak

    assert await opened_on(new) == 0, "the old one holds the session's KV"
    _, _, others = await fleet.bench.orchestrator([keeper], [])
    busy = [asyncio.create_task(hear(others, ask(f"on {n} ", max_tokens=3000))) for n in range(3)]
    await until(lambda: running(old) == 3)
    while await fleet.load(old) < 3:  # noqa: ASYNC110  (nothing announces it)
        await asyncio.sleep(0.01)
    await asyncio.sleep(HEARTBEAT["heartbeat_ttl_s"])
    assert await opened_on(new) == 1, "three quarters of the old one's places are taken, and none of the new one's"
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)


async def test_a_circuit_opens_is_probed_and_closes_and_all_of_it_is_counted(fleet: Fleet) -> None:
    await fleet.verifier()
    lost, drafter = await fleet.drafter(worker_id="d")
    _, app = await fleet.orchestrator(drafter_retry_s=0.1)
    client = fleet.client(app)

    def changes(state: str) -> float:
        labels = {"worker": "d", "state": state}
        return app.metrics.registry.get_sample_value("outrider_circuit_changes_total", labels) or 0.0

    heard: list[int] = []

    async def follow() -> None:
        async for event in client.generate(ask(max_tokens=3000)):
            heard.extend(event.token_ids if isinstance(event, Chunk) else ())

    task = asyncio.create_task(follow())
    await until(lambda: seated(drafter) == 1)
    await lost.kill()
    await until(lambda: changes("open") == 1)
    await fleet.drafter(worker_id="d", listen=drafter.address)
    await until(lambda: changes("half_open") >= 1 and changes("closed") == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert heard == expected("the cat sat on ", len(heard))
