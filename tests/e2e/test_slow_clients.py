"""Callers that read slowly, say nothing, stay for ever or come and go: they cost little, and nobody else notices."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.rounds import MAX_AHEAD_OF_CLIENT, PROGRESS_STRIDE
from outrider.messages import SamplingParams
from outrider.rpc import channel
from outrider.v1 import generation_pb2, generation_pb2_grpc, verify_pb2, verify_pb2_grpc
from tests.e2e.toys import GREEDY, PROMPT, Toys, ask, expected, hear
from tests.fuzz.health import Usage, at_rest, not_serving, returned

pytestmark = pytest.mark.timeout(240)

SEED = 23
LIMIT_S = 60.0
FIRST_MESSAGE_S = 10.0
"""How long a service waits for a stream's first message."""
MAX_GROWTH_BYTES = 64 << 20
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]
"""Of a client's connection that takes little of what the client does not read."""
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


@pytest.mark.slow
async def test_a_client_that_reads_slowly_stops_its_own_generation_and_nobody_elses(toys: Toys, settled: Usage) -> None:
    count, orchestrator = 1_800, toys.running("orchestrate")[0]
    alone_s, rss = await honest(toys), toys.rss(orchestrator)
    async with grpc.aio.insecure_channel(await toys.address(orchestrator), options=SMALL_WINDOW) as to:
        stub = generation_pb2_grpc.GenerationServiceStub(to)
        wide = generation_pb2.GenerateRequest(text=PROMPT, max_tokens=count, ignore_eos=True, logprobs=128)
        wide.sampling.temperature = GREEDY.temperature
        wide.speculation.gamma, wide.speculation.window = 4, 8
        call: Any = stub.Generate(wide, timeout=120)
        try:
            token_ids, length = await _read_slowly(call, stub)
            # It is ahead by what the verifier was last allowed and by what the connection holds, and goes no further.
            assert MAX_AHEAD_OF_CLIENT - PROGRESS_STRIDE <= length < count - PROGRESS_STRIDE
            assert await honest(toys) < 3 * alone_s + 1.0
            assert toys.rss(orchestrator) - rss < MAX_GROWTH_BYTES
            while (response := await call.read()) is not grpc.aio.EOF:
                token_ids += response.event.chunk.token_ids
        finally:
            call.cancel()
    assert token_ids == expected(PROMPT, count)


async def _read_slowly(call: Any, stub: "generation_pb2_grpc.GenerationServiceAsyncStub") -> tuple[list[int], int]:
    """Read a message every two seconds until the generation stands still; return what was read, and its length."""
    session_id = (await call.read()).event.started.session_id
    asked = generation_pb2.GetSessionRequest(session_id=session_id)
    token_ids, lengths = [], [0, 2 * PROGRESS_STRIDE]
    while lengths[-1] - lengths[-2] > PROGRESS_STRIDE:
        await asyncio.sleep(2.0)
        token_ids += (await call.read()).event.chunk.token_ids
        lengths.append((await stub.GetSession(asked, timeout=LIMIT_S)).session.length)
    return token_ids, lengths[-1]


async def test_streams_that_never_say_anything_are_ended_after_their_deadline(toys: Toys, settled: Usage) -> None:
    async with (
        channel(await toys.address(toys.running("orchestrate")[0])) as to_orchestrator,
        channel(await toys.address(toys.running("verify")[0])) as to_verify,
        channel(await toys.address(toys.running("draft")[0])) as to_draft,
    ):
        methods: list[Any] = [
            to_orchestrator.stream_stream("/outrider.v1.GenerationService/Generate"),
            to_orchestrator.stream_stream("/outrider.v1.GenerationService/GetSession"),
            to_verify.stream_stream("/outrider.v1.VerifyService/Decode"),
            to_verify.stream_stream("/outrider.v1.VerifyService/Propose"),
            to_draft.stream_stream("/outrider.v1.DraftService/Draft"),
        ]
        began_s = time.monotonic()
        silent = [method(timeout=LIMIT_S) for method in methods for _ in range(100)]
        await honest(toys)
        ends = await asyncio.gather(*(_end_of(call) for call in silent))
        took_s = time.monotonic() - began_s
    assert {code for code, _ in ends} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert all(f"within {FIRST_MESSAGE_S:g} s" in words for _, words in ends), ends
    assert took_s < FIRST_MESSAGE_S + 40.0


async def _end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), str(await call.details())


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
