"""What crosses processes of a trace, and that nothing of it is there where it is off."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draft_service.traces import draft_trace
from outrider.ids import Epoch, Generation
from outrider.tracing import (
    TraceParent,
    Tracer,
    arrived,
    arriving,
    current,
    epoch_name,
    leaving,
    parse,
    span_of_round,
)
from verify_service.traces import traced

HERE = TraceParent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_written_is_read_again(trace_id: int, span_id: int, is_sampled: bool) -> None:
    place = TraceParent(trace_id, span_id, is_sampled)
    assert parse(place.header) == place


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", HERE),
        (" 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03 ", HERE),
        ("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-comes", HERE),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", None),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", None),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", None),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", None),
        ("", None),
        ("é" * 55, None),
    ],
)
def test_a_header_is_read_as_the_standard_says(header: str, found: TraceParent | None) -> None:
    assert parse(header) == found


def test_a_call_brings_its_trace_for_its_own_task() -> None:
    assert arriving([("authorization", "x"), ("traceparent", HERE.header)]) == HERE
    assert arrived.get() == HERE
    assert arriving([("traceparent", b"\xff\xfe")]) is None
    assert arriving(None) is None
    assert arrived.get() is None
    assert arriving(leaving(HERE)) == HERE
    assert leaving(None) == ()
    arrived.set(None)


def test_rounds_have_spans_that_all_compute_alike_and_none_shares() -> None:
    epochs = [Epoch(Generation(fence, attach), number) for fence in (1, 2) for attach in (0, 1) for number in range(50)]
    spans = {span_of_round(HERE, epoch).span_id for epoch in epochs}
    assert len(spans) == len(epochs)
    assert span_of_round(HERE, epochs[0]) == span_of_round(parse(HERE.header) or HERE, Epoch(Generation(1, 0), 0))
    assert span_of_round(TraceParent(1, 2, True), epochs[0]).span_id not in spans
    assert epoch_name(Epoch(Generation(7, 2), 9)) == "7.2.9"


def test_a_generation_that_is_not_sampled_costs_its_workers_nothing() -> None:
    def send(item: object) -> None:
        """Send nothing."""

    unsampled = TraceParent(HERE.trace_id, HERE.span_id, False)
    assert not span_of_round(unsampled, Epoch(Generation(1, 0), 0)).is_sampled
    tracer = Tracer("verifier", "v", InMemorySpanExporter())
    assert traced(send, tracer, unsampled) is traced(send, tracer, None) is traced(send, None, HERE) is send
    assert draft_trace(tracer, unsampled) is draft_trace(tracer, None) is draft_trace(None, HERE) is None
    assert traced(send, tracer, HERE) is not send
    assert draft_trace(tracer, HERE) is not None
    tracer.close()


def test_where_tracing_is_off_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, outrider.tracing as tracing\n"
        "assert tracing.open_tracer('verifier', 'v', '', 1.0) is None and tracing.current() is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_program_without_a_span_of_its_own_has_none() -> None:
    assert current() is None
