"""The deployment files' processes, really run: started as they say, used, scaled, restarted and stopped.

The toy model stands for real ones, chosen by the variables that users choose models with.
"""

import asyncio
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from outrider.client import Client
from outrider.generation import Chunk, Finished
from outrider.model.toy import ToyTokenizer
from tests.deploy.files import project, rendered
from tests.deploy.load import Load, request_of, text_of
from tests.deploy.plans import compose_plans, kubernetes_plans
from tests.deploy.stage import Process, Stage, staged

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="needs the whole of 127.0.0.0/8 on the loopback interface"),
]

COSTS = {
    # Slow enough that most of the machine is left for processes that start.
    "OUTRIDER_VERIFY_TOY_DELAY_S": "0.1",
    "OUTRIDER_DRAFT_TOY_DELAY_S": "0.005",
    # Each worker has room for a few sessions only, so that others have something to do.
    "OUTRIDER_DRAFT_MAX_SESSIONS": "6",
}
CHOSEN = {"TARGET": "toy", "DRAFT_MODEL": "toy", "DRAFTER": "toy", "THREADS": "1"}
"""Of Compose's variables."""
TOY = {
    "OUTRIDER_VERIFY_MODEL": "toy", "OUTRIDER_DRAFT_MODEL": "toy", "OUTRIDER_DRAFT_DRAFTER": "toy",
    "OUTRIDER_ORCHESTRATOR_MODEL": "toy",
}  # fmt: skip
ORCHESTRATOR, HTTP = 7400, 8000
DEPLOYMENTS = ("verifier", "draft", "orchestrator")


@pytest.fixture(scope="module")
async def compose(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """What `docker compose up --wait` starts."""
    plans = compose_plans(project(**CHOSEN))
    async with staged(plans, tmp_path_factory.mktemp("compose"), COSTS) as stage:
        await everything_starts(stage)
        yield stage


async def everything_starts(stage: Stage) -> None:
    """Start what is not there yet, each service after those that it waits for."""
    for name in stage.plans:
        if name not in stage.completed and not stage.of(name):
            await stage.start(name)


@pytest.fixture(scope="module")
async def pods(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """What `kubectl apply -k deploy/kubernetes/overlays/cpu-demo` starts, with one replica of each."""
    plans = kubernetes_plans(rendered("overlays/cpu-demo"))
    async with staged(plans, tmp_path_factory.mktemp("pods"), {**COSTS, **TOY}) as stage:
        await stage.start("store")
        await stage.run("fetch-models")
        for name in DEPLOYMENTS:
            await stage.start(name)
        yield stage


async def asked(addresses: list[str], seed: int) -> Finished:
    """Ask for a text, compare it, and return its figures."""
    tokens: list[int] = []
    async with Client(addresses, timeout_s=200) as client:
        async for event in client.generate(request_of("the cat ", 40, seed)):
            if isinstance(event, Chunk):
                tokens += event.token_ids
    assert tokens == text_of("the cat ", 40, seed)
    assert isinstance(event, Finished)
    return event


async def gateway_says(address: str) -> str:
    """Ask for a greedy text over HTTP."""
    body = {"model": "toy", "prompt": "the cat ", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)

    def read() -> str:
        with urllib.request.urlopen(call, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    return await asyncio.to_thread(read)


async def has_drafted(process: Process) -> bool:
    """Return whether a draft worker has drawn tokens."""
    url = f"http://127.0.0.1:{process.environment['OUTRIDER_DRAFT_METRICS_PORT']}/metrics"

    def read() -> list[str]:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode()).splitlines()

    samples = [line for line in await asyncio.to_thread(read) if line.startswith("outrider_draft_drafted_tokens_total")]
    return any(float(line.rpartition(" ")[2]) > 0 for line in samples)


async def test_compose_starts_in_order_and_serves(compose: Stage) -> None:
    order = list(compose.running)
    assert set(order[:2]) == {"models", "store"}
    assert order[-1] == "orchestrator"
    assert compose.completed == ["models"]
    finished = await asked(compose.addresses("orchestrator", ORCHESTRATOR), seed=1)
    assert finished.figures.num_accepted > 0, "nothing was drafted"
    (gateway,) = compose.addresses("orchestrator", HTTP)
    assert await gateway_says(gateway) == ToyTokenizer().decode(text_of("the cat ", 8, None))


async def test_draft_workers_come_and_go_under_load_and_no_text_changes(compose: Stage) -> None:
    """As with `--scale draft=3`; then one is stopped, as with `--scale draft=2`, and one is killed."""
    async with Load(compose.addresses("orchestrator", ORCHESTRATOR)) as load:
        await load.more(4)
        added = [await compose.start("draft") for _ in range(2)]
        await load.more(24)
        assert [await has_drafted(each) for each in added] == [True, True]
        await compose.stop(added[0])
        await compose.kill(added[1])
        await load.more(16)
    assert load.wrong == []


async def test_the_store_is_restarted_under_load_and_nothing_is_lost(compose: Stage) -> None:
    (store,) = compose.of("store")
    async with Load(compose.addresses("orchestrator", ORCHESTRATOR)) as load:
        await load.more(4)
        await compose.restart(store)
        await load.more(20)
    assert load.wrong == []


async def test_what_compose_has_started_ends_by_itself_within_its_time(compose: Stage) -> None:
    await everything_ends(compose)


@pytest.mark.slow
async def test_the_services_for_gpus_start_in_order_and_serve(tmp_path: Path) -> None:
    """On a CPU: what the profile names, what waits for what, and that they find each other."""
    on_cpu = {"OUTRIDER_VERIFY_DEVICE": "cpu", "OUTRIDER_DRAFT_DEVICE": "cpu"}
    async with staged(compose_plans(project("gpu", **CHOSEN)), tmp_path, {**COSTS, **on_cpu}) as stage:
        await everything_starts(stage)
        assert set(stage.running) == {"models", "store", "verifier-gpu", "draft-gpu", "orchestrator"}
        order = list(stage.running)
        assert order.index("verifier-gpu") < order.index("orchestrator")
        finished = await asked(stage.addresses("orchestrator", ORCHESTRATOR), seed=3)
        assert finished.figures.num_accepted > 0, "nothing was drafted"
        await everything_ends(stage, {"store", "verifier-gpu", "draft-gpu", "orchestrator"})


async def test_pods_start_once_their_models_are_there_and_serve(pods: Stage) -> None:
    waits = [name for name in pods.completed if name.endswith("/wait-for-models")]
    assert pods.completed[0] == "fetch-models"
    assert sorted(set(waits)) == [f"{name}/wait-for-models" for name in ("draft", "orchestrator", "verifier")]
    for address in pods.addresses("orchestrator", ORCHESTRATOR):
        await asked([address], seed=2)


async def test_a_rolling_restart_of_every_deployment_under_load_loses_nothing(pods: Stage) -> None:
    await roll(pods)


@pytest.mark.slow
async def test_replicas_are_replaced_one_by_one_under_load_and_nothing_is_lost(pods: Stage) -> None:
    for name in DEPLOYMENTS:
        while len(pods.of(name)) < max(2, pods.plans[name].replicas):
            await pods.start(name)
    await roll(pods)


async def roll(stage: Stage) -> None:
    """Replace all replicas of each deployment while sessions run: a new one is ready before an old one is stopped."""
    async with Load(stage.addresses("orchestrator", ORCHESTRATOR)) as load:
        for name in DEPLOYMENTS:
            await load.more(4)
            for old in stage.of(name):
                fresh = await stage.start(name)
                # Clients that name the headless service find out by themselves; these are told.
                if name == "orchestrator":
                    load.addresses.append(f"{fresh.address}:{ORCHESTRATOR}")
                await stage.stop(old)
            await load.more(16)
    assert load.wrong == []


async def test_pods_end_by_themselves_within_their_time(pods: Stage) -> None:
    await everything_ends(pods)


async def everything_ends(stage: Stage, names: Collection[str] = ("store", *DEPLOYMENTS)) -> None:
    """Stop all that runs, and look at how each one of the whole run has ended."""
    await stage.stop_all()
    assert [ended for ended in stage.ended if ended.status or ended.seconds > ended.allowed_s] == []
    assert {ended.name.rpartition("-")[0] for ended in stage.ended} == set(names)
