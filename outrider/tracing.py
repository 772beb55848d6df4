"""Traces: spans of a generation in all three services, sent to any collector that speaks OTLP over gRPC.

    generation                    orchestrator: from the request's arrival to its end
    └── round                     orchestrator: one epoch, until a verdict ends it
        ├── draft                 draft worker: one proposal, from when it could begin until it is sent
        └── verify                verifier: one verdict, with its passes

Off unless a service has an endpoint; then nothing of OpenTelemetry is imported, and a round costs one comparison with
None. What crosses a process is W3C `traceparent` metadata of a call, with the generation's span as the parent. A round
is known to three processes at once and to none before the others: so the id of its span is computed from the trace and
the epoch (`span_of_round`), and drafts and passes name it as their parent without hearing of it.

A trace that came with the request is followed, and sampled or not as it says; others begin in the orchestrator, for a
share of the generations. The context variable holds the trace that a call came with, for logs too, whether or not
anything is exported here.
"""

import hashlib
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import InvalidRequest
from outrider.ids import Epoch

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

HEADER = "traceparent"
"""Name of the metadata, and of the HTTP header."""
FLUSH_S = 2.0
"""How long a service that stops waits for its last spans to leave."""
_PATTERN = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")

Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A span of another process, or of this one, that others can hang below."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def header(self) -> str:
        """The value of `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"

    @property
    def name(self) -> str:
        """The trace's id as logs and collectors show it."""
        return f"{self.trace_id:032x}"


arrived: ContextVar[TraceParent | None] = ContextVar("outrider_trace", default=None)
"""The trace that the call under way came with; None: none."""


def parse(header: str) -> TraceParent | None:
    """Read a `traceparent`; None if it is none, which is no error: whoever sent it has no trace."""
    found = _PATTERN.fullmatch(header.strip())
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return TraceParent(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


def arriving(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceParent | None:
    """Return the trace that a call's metadata, or a request's headers, name, and note it for this task's logs."""
    value = next((value for name, value in metadata or () if name.lower() == HEADER), "")
    found = parse(value if isinstance(value, str) else value.decode("ascii", "replace"))
    arrived.set(found)
    return found


def leaving(trace: TraceParent | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call below a span; empty: there is none."""
    return ((HEADER, trace.header),) if trace is not None else ()


def current() -> TraceParent | None:
    """Return the span that is active in a program that uses OpenTelemetry by itself, such as a client's."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    return TraceParent(context.trace_id, context.span_id, context.trace_flags.sampled) if context.is_valid else None


def span_of_round(generation: TraceParent, epoch: Epoch) -> TraceParent:
    """Return the span of a round, which everybody who knows the generation's trace and the epoch computes alike."""
    named = epoch.generation
    text = f"{generation.trace_id:x}/{generation.span_id:x}/{named.fence}/{named.attach}/{epoch.round}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return TraceParent(generation.trace_id, int.from_bytes(digest, "big") or 1, generation.is_sampled)


def epoch_name(epoch: Epoch) -> str:
    """Return an epoch as an attribute."""
    return f"{epoch.generation.fence}.{epoch.generation.attach}.{epoch.round}"


class Tracer:
    """Makes the spans of one service and has them exported; may be used on every thread."""

    def __init__(self, service: str, worker_id: str, exporter: "SpanExporter", share: float = 1.0) -> None:
        """Begin to export, on a thread of its own.

        Args:
            service: "orchestrator", "verifier" or "draft-worker".
            worker_id: of this process.
            exporter: where finished spans go, in batches.
            share: of the generations that came without a trace, 0 .. 1, that get one.
        """
        # Here, because nothing of it is to be imported where tracing is off.
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        self._ids = _ids()
        resource = Resource.create({"service.name": f"outrider-{service}", "service.instance.id": worker_id})
        self._provider = TracerProvider(
            id_generator=self._ids, resource=resource, shutdown_on_exit=False, sampler=_sampler(share)
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("outrider")

    def begin(self, name: str, parent: TraceParent | None, start_ns: int, attributes: Attributes) -> "OpenSpan":
        """Begin a span that others will hang below.

        Args:
            name: of the span.
            parent: what it is part of; None: a trace begins, or does not, as the share says.
            start_ns: on the wall clock.
            attributes: `outrider.*`.
        """
        return OpenSpan(self._tracer.start_span(name, _context(parent), start_time=start_ns, attributes=attributes))

    def span(
        self, name: str, parent: TraceParent, times_ns: tuple[int, int], attributes: Attributes, span_id: int = 0
    ) -> None:
        """Make a span that is over.

        Args:
            name: of the span.
            parent: what it is part of.
            times_ns: its begin and its end, on the wall clock.
            attributes: `outrider.*`.
            span_id: its id; 0: a random one.
        """
        self._ids.next_span_id.value = span_id
        try:
            made = self._tracer.start_span(name, _context(parent), start_time=times_ns[0], attributes=attributes)
        finally:
            self._ids.next_span_id.value = 0
        made.end(max(times_ns))

    def close(self) -> None:
        """Send what is left, and stop; blocks for `FLUSH_S` at most."""
        self._provider.force_flush(int(FLUSH_S * 1000))
        self._provider.shutdown()


class OpenSpan:
    """A span that is not over."""

    def __init__(self, span: Any) -> None:
        """Wrap OpenTelemetry's."""
        self._span = span
        context = span.get_span_context()
        self.place = TraceParent(context.trace_id, context.span_id, context.trace_flags.sampled)
        """Where others hang below it."""

    def end(self, attributes: Attributes, error: str = "") -> None:
        """End it, with what is known by now; `error` says why it failed, empty: it did not."""
        self._span.set_attributes(attributes)
        if error:
            from opentelemetry.trace import StatusCode  # noqa: PLC0415 (see `Tracer`)

            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(time.time_ns())


def open_tracer(service: str, worker_id: str, endpoint: str, share: float) -> Tracer | None:
    """Return the tracer of a service; None where there is no endpoint.

    Args:
        service: what the service is called in traces.
        worker_id: of this process.
        endpoint: `http://host:port` of an OTLP/gRPC collector, or `https://…` with TLS; empty: tracing is off.
        share: of the generations that begin here and are traced.

    Raises:
        InvalidRequest: the endpoint is none, or OpenTelemetry is not installed.
    """
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidRequest("otlp_endpoint", endpoint, "http://host:port or https://host:port")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError as error:
        raise InvalidRequest(
            "otlp_endpoint", endpoint, f"nothing without pip install 'outrider[otlp]' ({error})"
        ) from None
    return Tracer(service, worker_id, OTLPSpanExporter(endpoint, timeout=FLUSH_S), share)


def ago_ns(seconds: float) -> int:
    """Return the time on the wall clock so many seconds ago."""
    return time.time_ns() - int(seconds * 1e9)


def _context(parent: TraceParent | None) -> Any:
    """Return a parent in OpenTelemetry's terms; an empty context for none, so that nothing around is taken."""
    from opentelemetry.context import Context  # noqa: PLC0415 (see `Tracer`)
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context  # noqa: PLC0415

    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    remote = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _sampler(share: float) -> Any:
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415 (see `Tracer`)

    return ParentBased(TraceIdRatioBased(share))


def _ids() -> Any:
    """Return a generator of ids whose next span id can be set, on the thread that makes the span."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator  # noqa: PLC0415 (see `Tracer`)

    class Ids(RandomIdGenerator):
        def __init__(self) -> None:
            self.next_span_id = threading.local()

        def generate_span_id(self) -> int:
            return getattr(self.next_span_id, "value", 0) or super().generate_span_id()

    return Ids()
