"""A verifier over two ranks, as `torchrun` starts it: it serves, stops in good order, and a lost rank ends it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from benchmarks.serving import ask
from benchmarks.slow_wire import free_ports
from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.errors import OutriderError
from outrider.generation import Chunk, GenerationRequest, Notice, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams
from tests.unit.test_parallel import save_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
START_S = 90.0
AT_ONCE = 4
REQUEST = GenerationRequest(
    TextPrompt("w5 w6 w7"), max_tokens=400, sampling=SamplingParams(temperature=0.0), ignore_eos=True,
    speculation=SpeculationChoice(off=True),
)  # fmt: skip


@dataclass
class Verifier:
    """The processes of one verifier."""

    process: asyncio.subprocess.Process

    def rank(self, number: int) -> psutil.Process:
        """Return one of them."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(each for each in children if each.environ().get("RANK") == str(number))


@asynccontextmanager
async def started(folder: Path, port: int, log: Path) -> AsyncIterator[Verifier]:
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--master-port"]
    settings = {"MODEL": str(folder), "DTYPE": "float32", "TENSOR_PARALLEL": "2", "LISTEN": f"127.0.0.1:{port}",
                "NUM_BLOCKS": "32", "GRACE_S": "5"}  # fmt: skip
    environment = {f"OUTRIDER_VERIFY_{name}": value for name, value in settings.items()}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *torchrun, str(free_ports(1)[0]), "-m", "verify_service", stdout=out, stderr=out,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        yield Verifier(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)


def orchestrator(folder: Path, *ports: int) -> ServiceSpec:
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    prefix = "OUTRIDER_ORCHESTRATOR_"
    return ServiceSpec(
        "orchestrator-1", "orchestrate", {f"{prefix}MODEL": str(folder), f"{prefix}VERIFY_ADDRESSES": addresses}
    )


async def wait_for(client: Client) -> None:
    """Wait until something is generated."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                await ask(client, GenerationRequest(TextPrompt("w5"), max_tokens=1, ignore_eos=True))
                return
            except OutriderError:
                await asyncio.sleep(0.5)


async def test_two_ranks_serve_and_the_loss_of_one_moves_their_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder)
    split_port, whole_port = free_ports(2)
    alone = {"MODEL": str(folder), "DTYPE": "float32", "LISTEN": f"127.0.0.1:{whole_port}", "NUM_BLOCKS": "32"}
    whole = ServiceSpec("verify-1", "verify", {f"OUTRIDER_VERIFY_{name}": value for name, value in alone.items()})
    log = tmp_path / "torchrun.log"
    async with started(folder, split_port, log) as verifier:
        async with LocalCluster([orchestrator(folder, split_port)]) as cluster, Client(cluster.address) as client:
            await wait_for(client)
            together = await ask(client, REQUEST)
        async with LocalCluster([whole, orchestrator(folder, whole_port)]) as cluster:
            async with Client(cluster.address) as client:
                assert (await ask(client, REQUEST)).token_ids == together.token_ids
            async with LocalCluster([orchestrator(folder, split_port, whole_port)]) as both:
                async with Client(both.address) as client:
                    heard = await lose_a_rank(client, verifier)
        assert await asyncio.wait_for(verifier.process.wait(), 60) != 0
    assert [each.tokens for each in heard] == [list(together.token_ids)] * AT_ONCE
    assert any("verifier_lost" in each.notices for each in heard)


@dataclass
class Heard:
    """What a client was told."""

    tokens: list[int] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


async def lose_a_rank(client: Client, verifier: Verifier) -> list[Heard]:
    """Generate several times at once, so that both verifiers have some, and kill a rank meanwhile."""
    heard = [Heard() for _ in range(AT_ONCE)]

    async def one(into: Heard) -> None:
        async for event in client.generate(REQUEST):
            if isinstance(event, Chunk):
                into.tokens += event.token_ids
            elif isinstance(event, Notice):
                into.notices.append(event.reason)

    async with asyncio.TaskGroup() as group:
        for each in heard:
            group.create_task(one(each))
        while min(len(each.tokens) for each in heard) < 5:  # noqa: ASYNC110  (nobody announces it)
            await asyncio.sleep(0.01)
        verifier.rank(1).kill()
    return heard


async def test_a_verifier_over_two_ranks_stops_in_good_order(tmp_path: Path) -> None:
    folder, (port,) = tmp_path / "model", free_ports(1)
    save_model(folder)
    async with started(folder, port, tmp_path / "torchrun.log") as verifier:
        async with LocalCluster([orchestrator(folder, port)]) as cluster, Client(cluster.address) as client:
            await wait_for(client)
        follower = verifier.rank(1)
        verifier.rank(0).send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(verifier.process.wait(), 60) == 0
        assert not follower.is_running()
