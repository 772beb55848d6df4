"""Traces: the spans of one generation, made by three services and a client, at a collector that speaks OTLP."""

import io
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import Span as ApiSpan
from opentelemetry.trace import use_span

from outrider.errors import InvalidRequest, Unavailable
from outrider.generation import GenerationRequest, SpeculationChoice, Started, TextPrompt
from outrider.messages import SamplingParams
from outrider.telemetry import JsonFormatter
from outrider.tracing import open_tracer
from tests.integration.cluster_bench import Bench, Heard, hear

SECRET = "zebra"


@dataclass
class Collector(pb_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    spans: list[tuple[str, Span]] = field(default_factory=list)
    """With the name of the service that each is from."""
    address: str = ""

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return [span for _, span in self.spans if span.name == name]


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    made, server = Collector(), grpc.aio.server()
    pb_grpc.add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    made.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield made
    await server.stop(0)


@asynccontextmanager
async def traced(store_url: str, collector: Collector, share: float = 1.0) -> AsyncIterator[Any]:
    """Yield the client of a cluster that sends its spans before the block ends."""
    async with Bench(store_url) as bench:
        settings: dict[str, Any] = {"otlp_endpoint": collector.address, "otlp_share": share}
        verifier, _ = await bench.verifier(**settings)
        drafter, _ = await bench.drafter(**settings)
        orchestrator, _, client = await bench.orchestrator([verifier], [drafter], **settings)
        yield client
        for service in (orchestrator, drafter, verifier):
            await service.kill()


def ask() -> GenerationRequest:
    return GenerationRequest(
        TextPrompt(f"the {SECRET} sat "), max_tokens=40, sampling=SamplingParams(temperature=0.0), ignore_eos=True,
        speculation=SpeculationChoice(gamma=3, window=6),
    )  # fmt: skip


def span_of_a_program(sampler: Sampler) -> ApiSpan:
    return (
        TracerProvider(sampler=sampler, shutdown_on_exit=False).get_tracer("a user's program").start_span("their own")
    )


def values(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in span.attributes}


async def test_spans_of_one_generation_share_one_trace_and_nest(valkey_url: str, collector: Collector) -> None:
    own = (
        TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False).get_tracer("a user's program").start_span("their own")
    )
    async with traced(valkey_url, collector, share=0.0) as client:
        with use_span(own):
            heard: Heard = await hear(client, ask())
    context = own.get_span_context()
    assert {span.trace_id for _, span in collector.spans} == {context.trace_id.to_bytes(16, "big")}
    (generation,) = collector.named("generation")
    assert generation.parent_span_id == context.span_id.to_bytes(8, "big")
    rounds = {span.span_id: span for span in collector.named("round")}
    assert {span.parent_span_id for span in rounds.values()} == {generation.span_id}
    drafts, passes = collector.named("draft"), collector.named("verify")
    assert len(drafts) > 3
    assert len(passes) > 3
    for span in (*drafts, *passes):
        assert values(span)["outrider.epoch"] == values(rounds[span.parent_span_id])["outrider.epoch"]
    assert {service for service, span in collector.spans if span.name == "draft"} == {"outrider-draft-worker"}
    assert {service for service, span in collector.spans if span.name == "verify"} == {"outrider-verifier"}
    assert {service for service, span in collector.spans if span.name == "round"} == {"outrider-orchestrator"}
    tested = [values(span)["outrider.tokens.tested"] for span in rounds.values()]
    assert sum(tested) == heard.finished.figures.num_tested == values(generation)["outrider.tokens.tested"]
    assert sum(values(span)["outrider.tokens.committed"] for span in rounds.values()) == 40
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for _, span in collector.spans)
    assert all(name.startswith("outrider.") for _, span in collector.spans for name in values(span))
    assert SECRET not in "".join(map(str, collector.spans))


async def test_spans_are_as_long_as_what_they_tell_of(valkey_url: str, collector: Collector) -> None:
    before_ns = time.time_ns()
    async with traced(valkey_url, collector) as client:
        heard: Heard = await hear(client, ask())
    (generation,) = collector.named("generation")
    assert before_ns <= generation.start_time_unix_nano
    rounds = sorted(collector.named("round"), key=lambda span: span.start_time_unix_nano)
    assert generation.start_time_unix_nano <= rounds[0].start_time_unix_nano
    for earlier, later in pairwise(rounds):
        assert later.start_time_unix_nano == earlier.end_time_unix_nano, "a round begins where the one before it ends"
    drafts = sorted(collector.named("draft"), key=lambda span: span.end_time_unix_nano)
    for earlier, later in pairwise(drafts):
        assert later.start_time_unix_nano >= earlier.end_time_unix_nano, "one proposal is drafted after the other"
    model_s = [values(span)["outrider.verify_seconds"] for span in collector.named("verify")]
    assert max(model_s) > 0, "a token from a row of a pass before takes none"
    for span, seconds in zip(collector.named("verify"), model_s, strict=True):
        assert 1e-9 * (span.end_time_unix_nano - span.start_time_unix_nano) == pytest.approx(seconds, abs=1e-6)
    assert values(generation)["outrider.speculation_off"] == heard.finished.figures.speculation_off == ""
    assert generation.status.code == Status.STATUS_CODE_UNSET


async def test_a_generation_that_fails_has_the_error_in_its_span(valkey_url: str, collector: Collector) -> None:
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier(toy_delay_s=0.02)
        settings: dict[str, Any] = {"otlp_endpoint": collector.address, "otlp_share": 1.0, "verifier_deadline_s": 0.2}
        orchestrator, _, client = await bench.orchestrator([verifier], [], **settings)
        with pytest.raises(Unavailable):
            async for _ in client.generate(replace(ask(), max_tokens=500)):
                await verifier.kill()
        await orchestrator.kill()
    (generation,) = collector.named("generation")
    assert generation.status.code == Status.STATUS_CODE_ERROR
    assert "no verifier" in generation.status.message
    assert values(generation)["outrider.outcome"] == "unavailable"


async def test_a_share_of_what_comes_without_a_trace_is_traced(valkey_url: str, collector: Collector) -> None:
    async with traced(valkey_url, collector, share=0.0) as client:
        await hear(client, ask())
    assert collector.spans == []
    async with traced(valkey_url, collector, share=1.0) as client:
        await hear(client, ask())
        await hear(client, ask())
    assert len({span.trace_id for _, span in collector.spans}) == 2
    assert [span.parent_span_id for span in collector.named("generation")] == [b"", b""]


async def test_a_trace_that_is_not_sampled_makes_no_spans(valkey_url: str, collector: Collector) -> None:
    own = (
        TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
        .get_tracer("a user's program")
        .start_span("their own")
    )
    async with traced(valkey_url, collector, share=1.0) as client:
        with use_span(own):
            await hear(client, ask())
    assert collector.spans == []


async def test_lines_of_a_generation_name_session_request_and_trace_in_every_service(valkey_url: str) -> None:
    own, stream, root = span_of_a_program(ALWAYS_ON), io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        async with traced(valkey_url, Collector()) as client:  # nothing is exported: the trace is only passed on
            with use_span(own):
                heard: Heard = await hear(client, replace(ask(), request_id="r-17"))
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    started = heard.events[0]
    assert isinstance(started, Started)
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    ended = next(entry for entry in entries if entry["message"].startswith("the generation ended"))
    opened = next(entry for entry in entries if "opens in" in entry["message"])
    trace = f"{own.get_span_context().trace_id:032x}"
    assert (ended["session"], ended["request"], ended["trace"]) == (started.session_id, "r-17", trace)
    assert (opened["session"], opened["trace"]) == (started.session_id, trace)
    assert opened["logger"].startswith("verify_service")
    assert all(entry.get("session") for entry in entries if started.session_id in entry["message"])


async def test_a_collector_that_is_away_costs_no_generation_anything(valkey_url: str) -> None:
    async with traced(valkey_url, Collector(address="http://127.0.0.1:1")) as client:
        heard: Heard = await hear(client, ask())
    assert len(heard.token_ids) == 40


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="http://host:port"):
        open_tracer("verifier", "v", "collector:4317", 1.0)
    assert open_tracer("verifier", "v", "", 1.0) is None
