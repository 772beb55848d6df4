"""Callers that stay for ever or come and go: they cost little, and nobody else notices."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.messages import SamplingParams
from outrider.rpc import channel
from outrider.v1 import verify_pb2, verify_pb2_grpc
from tests.e2e.toys import PROMPT, Toys, ask, expected, hear
from tests.fuzz.health import Usage, at_rest, not_serving, returned

pytestmark = pytest.mark.timeout(240)

SEED = 23
LIMIT_S = 30.0
NUM_IDLE = 1_000
NUM_CONNECTIONS = 2_000


@pytest.fixture
async def settled(toys: Toys) -> AsyncIterator[Usage]:
    """What is in use before; in the end all services serve, and nothing more than that is in use."""
    assert (await hear(await toys.client(), ask())).token_ids == expected(PROMPT, 40)
    before = await at_rest(toys)
    yield before
    assert not await not_serving(toys)
    assert not await returned(toys, before)


async def honest(toys: Toys, count: int = 60) -> float:
    """Run a seeded generation, whose text must be its twin's; return its seconds."""
    began_s = time.monotonic()
    heard = await hear(await toys.client(), ask(max_tokens=count, seed=SEED, sampling=SamplingParams()))
    assert heard.token_ids == expected(PROMPT, count, SEED)
    return time.monotonic() - began_s


async def test_a_thousand_idle_streams_leave_a_generation_as_it_is(toys: Toys, settled: Usage) -> None:
    verifier = toys.running("verify")[0]
    async with channel(await toys.address(verifier)) as to:
        stub = verify_pb2_grpc.VerifyServiceStub(to)
        described = await stub.Describe(verify_pb2.VerifyServiceDescribeRequest(), timeout=LIMIT_S)
        idle: list[Any] = [stub.Propose() for _ in range(NUM_IDLE)]
        for number, call in enumerate(idle):
            hello = verify_pb2.ProposeHello(worker_id=f"idle-{number}", vocabulary=described.worker.vocabulary)
            await call.write(verify_pb2.ProposeRequest(hello=hello))
        answers = await asyncio.gather(*(call.read() for call in idle))
        assert all(answer.HasField("welcome") for answer in answers)
        assert toys.metric(verifier, "outrider_asyncio_tasks") > NUM_IDLE
        await honest(toys)
        for call in idle:
            call.cancel()


async def test_two_thousand_connections_that_come_and_go_leave_nothing_behind(toys: Toys, settled: Usage) -> None:
    names = [toys.running(role)[0] for role in ("orchestrate", "verify", "draft")]
    addresses = [await toys.address(name) for name in names]
    processes = [psutil.Process(toys.cluster.services[name].pid) for name in names]
    files = [process.num_fds() for process in processes]
    meanwhile = asyncio.create_task(honest(toys, 120))
    for number in range(NUM_CONNECTIONS):
        address = addresses[number % len(addresses)]
        if number % 2:
            await _ask_and_leave(address)
        else:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=LIMIT_S):
                pass
    await meanwhile
    async with asyncio.timeout(LIMIT_S):
        while any(process.num_fds() > count + 5 for process, count in zip(processes, files, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def _ask_and_leave(address: str) -> None:
    """Connect, ask, and leave with a call open."""
    async with channel(address) as to:
        stub = health_pb2_grpc.HealthStub(to)
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        await watching.read()
        watching.cancel()
