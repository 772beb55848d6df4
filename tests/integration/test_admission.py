"""Places at an orchestrator, through gRPC: who waits, who is refused and with what delay, and whose turn it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from outrider.errors import InvalidRequest, ResourceExhausted
from outrider.generation import GenerationRequest, SpeculationChoice, TokenPrompt
from outrider.messages import SamplingParams
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.cluster_bench import Bench, hear, until


def ask(**fields: Any) -> GenerationRequest:
    """A short request for greedy tokens."""
    fields = {"max_tokens": 5, "sampling": SamplingParams(temperature=0.0), "ignore_eos": True, **fields}
    return GenerationRequest(TokenPrompt((1, 2, 3)), **fields)


@pytest.fixture
async def bench(valkey_url: str) -> AsyncIterator[Bench]:
    async with Bench(valkey_url) as made:
        yield made


async def test_a_generation_waits_for_a_place_and_then_runs(bench: Bench) -> None:
    verifier, _ = await bench.verifier(toy_delay_s=0.005)
    _, app, client = await bench.orchestrator([verifier], [], max_sessions=1)
    async with aclosing(client.generate(ask(max_tokens=3000))) as events:
        await anext(events)
        waiting = asyncio.create_task(hear(client, ask(max_tokens=5)))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        assert app.metrics.registry.get_sample_value("outrider_num_requests_waiting") == 1
    assert len((await waiting).token_ids) == 5


async def test_a_wait_that_the_request_or_its_deadline_does_not_allow_is_refused_with_a_delay(bench: Bench) -> None:
    verifier, _ = await bench.verifier(toy_delay_s=0.005)
    _, app, client = await bench.orchestrator([verifier], [], max_sessions=1)
    async with aclosing(client.generate(ask(max_tokens=3000))) as events:
        await anext(events)
        with pytest.raises(ResourceExhausted, match=r"may be waited for no longer than 0\.0 s") as refused:
            await hear(client, ask(max_wait_s=0.0))
        assert refused.value.retry_delay_s >= 1.0
        async with grpc.aio.insecure_channel(app.address) as channel:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[1, 2]))
            request.max_wait.FromMilliseconds(50)
            call = GenerationServiceStub(channel).Generate(request, timeout=60.0)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(error.value)
        assert status is not None
        delays = [RetryInfo() for detail in status.details if detail.Is(RetryInfo.DESCRIPTOR)]
        assert len(delays) == 1


async def test_a_priority_out_of_range_names_the_field(bench: Bench) -> None:
    verifier, _ = await bench.verifier()
    _, _, client = await bench.orchestrator([verifier], [])
    with pytest.raises(InvalidRequest, match="priority"):
        await hear(client, ask(priority=9))
    assert len((await hear(client, ask(max_tokens=3, priority=8))).token_ids) == 3


async def test_with_speculation_configured_off_nothing_is_drafted_and_the_reason_says_so(bench: Bench) -> None:
    verifier, verify = await bench.verifier()
    drafter, _ = await bench.drafter()
    _, _, client = await bench.orchestrator([verifier], [drafter], speculation=False)
    heard = await hear(client, ask(max_tokens=8))
    figures = heard.finished.figures
    assert (figures.speculation_off, figures.num_tested) == ("configured", 0)
    assert verify is not None


async def test_why_nothing_is_drafted_is_shown_for_as_long_as_it_is_so(bench: Bench) -> None:
    verifier, _ = await bench.verifier(toy_delay_s=0.005)
    drafter, _ = await bench.drafter()
    _, app, client = await bench.orchestrator([verifier], [drafter])

    def off() -> dict[str, float]:
        found = app.metrics.speculation.off_now.collect()
        return {each.labels["reason"]: each.value for metric in found for each in metric.samples if each.value}

    long = ask(max_tokens=3000)
    async with (
        aclosing(client.generate(replace(long, speculation=SpeculationChoice(off=True)))) as plain,
        aclosing(client.generate(replace(long, speculation=SpeculationChoice(gamma=2)))) as drafted,
    ):
        await anext(plain)
        await anext(drafted)
        await until(lambda: off() == {"requested": 1.0})
        await drafter.kill()
        await until(lambda: sum(off().values()) == 2)
        assert off()["requested"] == 1
    await until(lambda: not off())
