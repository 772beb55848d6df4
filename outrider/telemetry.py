"""Logs and metrics of all services.

Logs: the standard library's, with ids (session, generation, worker) taken from a context variable, so that no call has
to pass them on. INFO once per generation, DEBUG per round, nothing per token. Secrets are taken out of every line.

Metrics: counters and histograms; ratios are queries. No label ever names a session. The names keep the suffixes that
dashboards of other engines know, behind our prefix.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from outrider.errors import Unavailable
from outrider.redaction import redacted

_ids: ContextVar[Mapping[str, str]] = ContextVar("outrider_log_ids", default=MappingProxyType({}))

_NO_NAME = re.compile(r"[^!-Z^-~]")
"""What no id has: spaces, brackets, line ends, and all but ASCII."""

ROUND_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


# --- logs ---------------------------------------------------------------------------------------------------------


@contextmanager
def log_ids(**ids: str) -> Iterator[None]:
    """Add ids to every record logged inside the block, by this task and those it starts there; no empty ones."""
    token = _ids.set({**_ids.get(), **{name: value for name, value in ids.items() if value}})
    try:
        yield
    finally:
        _ids.reset(token)


def note_ids(**ids: str) -> None:
    """Add ids to every record that this task logs from here on, and the tasks it starts; empty ones are left out.

    For handlers of calls, each of which is a task of its own: a generator cannot end what another step has begun. What
    a peer chose itself is shown as far as it is a name.
    """
    _ids.set({**_ids.get(), **{name: _NO_NAME.sub("?", value)[:128] for name, value in ids.items() if value}})


def configure_logging(
    level: str = "INFO", log_format: Literal["plain", "json"] = "plain", stream: TextIO | None = None
) -> None:
    """Send all records of this process to one stream; called once, in `__main__`.

    Args:
        level: least severe level.
        log_format: lines for people, or one JSON object per line.
        stream: where to write; None is standard error.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class PlainFormatter(logging.Formatter):
    """Time, level, logger, message, and the ids in brackets."""

    def __init__(self) -> None:
        """Fix the layout."""
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Lay out one record, its traceback included, without secrets."""
        return redacted(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the standard library's name)
        """Lay out one record without its traceback."""
        ids = " ".join(f"{name}={value}" for name, value in _ids.get().items())
        text = super().formatMessage(record)
        return f"{text} [{ids}]" if ids else text


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Turn one record into a line."""
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
            **_ids.get(),
        }
        if record.exc_info:
            entry["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False)


# --- metrics ------------------------------------------------------------------------------------------------------


class SpeculationMetrics:
    """What speculation did, counted where verdicts are committed. Bind label children once and keep them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register all metrics, each at 0.

        Args:
            registry: a service's own registry, so that several services fit in one process.
        """

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = ROUND_BUCKETS_S) -> Histogram:
            return Histogram(f"outrider_{name}_seconds", text, registry=registry, buckets=buckets)

        self.rounds = counter("spec_decode_num_drafts", "Target passes that tested draft tokens")
        self.drafted = counter("spec_decode_num_draft_tokens", "Draft tokens that reached the verifier")
        self.tested = counter("spec_decode_num_tested_tokens", "Draft tokens tested; stops at the first rejection")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by distance in the epoch", "position"
        )
        self.tested_per_position = counter(
            "spec_decode_num_tested_tokens_per_pos", "Draft tokens tested, by distance in the epoch", "position"
        )
        self.dropped = counter("dropped_messages", "Peers' messages that were dropped", "reason")
        self.epochs = counter("epochs", "Epoch changes", "cause")
        self.off = counter("speculation_off", "Generations during which speculation was off", "reason")
        self.off_now = Gauge(
            "outrider_speculation_off_sessions",
            "Generations under way that nothing is drafted for, by reason",
            ["reason"],
            registry=registry,
        )
        self.tokens = counter("generation_tokens", "Tokens committed, by where they came from", "kind")
        self.guarantee_void = counter("guarantee_void", "Times that a drafter withheld tokens it had announced")
        self.verify_s = histogram("verify_time", "Model time per target pass")
        self.queue_s = histogram("queue_time", "Wait of a proposal for its pass")
        self.network_s = histogram("network_time", "Round trip of a round beyond drafting and verifying")
        self.commit_s = histogram("commit_time", "Time to log and emit a verdict")
        self.time_to_first_token_s = histogram("time_to_first_token", "Arrival to first token", WAIT_BUCKETS_S)
        self.inter_token_s = histogram("inter_token_latency", "Time per committed token")


@contextmanager
def metrics_endpoint(registry: CollectorRegistry, port: int, address: str = "0.0.0.0") -> Iterator[int]:
    """Serve a registry over HTTP, from a thread of its own, for the time of the block.

    Args:
        registry: what to expose at /metrics.
        port: TCP port; 0 serves nothing.
        address: interface to listen on.

    Yields:
        The port, 0 if nothing is served.

    Raises:
        Unavailable: the port is not free, or the interface none of this machine's.
    """
    if port == 0:
        yield 0
        return
    try:
        server, thread = start_http_server(port, address, registry=registry)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics at {address}:{port}: {error.strerror or error}") from error
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
