"""Logs carry ids from the context; metrics are served and stop being served."""

import asyncio
import io
import json
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Literal

import pytest
from prometheus_client import CollectorRegistry

from outrider.errors import Unavailable
from outrider.telemetry import SpeculationMetrics, configure_logging, log_ids, metrics_endpoint, note_ids


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines_of_a(log_format: Literal["plain", "json"]) -> io.StringIO:
    """Configure the logs, and return where those of logger "a" go: other tests' threads may still speak."""
    stream = io.StringIO()
    configure_logging("INFO", log_format, stream)
    logging.getLogger().handlers[0].addFilter(logging.Filter("a"))
    return stream


@pytest.mark.usefixtures("root_logger")
def test_a_plain_line_ends_with_the_ids_of_its_context() -> None:
    stream = lines_of_a("plain")
    with log_ids(session="s1"), log_ids(worker="w"):
        logging.getLogger("a").info("hello %d", 1)
    logging.getLogger("a").info("bye")
    logging.getLogger("a").debug("not shown")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("a: hello 1 [session=s1 worker=w]")
    assert second.endswith("a: bye")


@pytest.mark.usefixtures("root_logger")
def test_a_json_line_has_the_ids_as_fields_and_the_traceback() -> None:
    stream = lines_of_a("json")
    with log_ids(session="s1"):
        try:
            raise KeyError("gone")
        except KeyError:
            logging.getLogger("a").exception("it failed")
    entry = json.loads(stream.getvalue())
    assert (entry["level"], entry["session"], entry["message"]) == ("ERROR", "s1", "it failed")
    assert "KeyError" in entry["exception"]


@pytest.mark.usefixtures("root_logger")
async def test_ids_that_a_task_has_noted_stay_in_it_and_are_names() -> None:
    stream = lines_of_a("plain")

    async def handler() -> None:
        note_ids(session="s1", request="a b]\n[é", trace="")
        await asyncio.gather(speak())

    async def speak() -> None:
        logging.getLogger("a").info("hello")

    await asyncio.create_task(handler())
    await asyncio.create_task(speak())
    first, second = stream.getvalue().splitlines()
    assert first.endswith("a: hello [session=s1 request=a?b????]")
    assert second.endswith("a: hello")


@pytest.mark.usefixtures("root_logger")
async def test_ids_follow_the_task_and_no_other() -> None:
    stream = lines_of_a("json")

    async def speak(name: str) -> None:
        with log_ids(session=name):
            await asyncio.sleep(0)
            logging.getLogger("a").info(name)

    await asyncio.gather(speak("one"), speak("two"))
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [entry["session"] for entry in entries] == [entry["message"] for entry in entries]


def test_metrics_are_served_for_the_time_of_the_block() -> None:
    registry = CollectorRegistry()
    metrics = SpeculationMetrics(registry)
    metrics.accepted.inc(3)
    metrics.accepted_per_position.labels("0").inc()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/metrics"
    with metrics_endpoint(registry, port, "127.0.0.1"), urllib.request.urlopen(url, timeout=60) as response:
        text = response.read().decode()
    assert "outrider_spec_decode_num_accepted_tokens_total 3.0" in text
    assert 'outrider_spec_decode_num_accepted_tokens_per_pos_total{position="0"} 1.0' in text
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=60)


def test_a_port_that_is_taken_and_an_interface_that_is_none_are_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address in ("127.0.0.1", "192.0.2.1"):
            with pytest.raises(Unavailable, match=f"cannot serve metrics at {address}:{port}: "):
                metrics_endpoint(CollectorRegistry(), port, address).__enter__()


def test_two_services_fit_in_one_process() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    SpeculationMetrics(first).rounds.inc()
    SpeculationMetrics(second)
    assert first.get_sample_value("outrider_spec_decode_num_drafts_total") == 1.0
    assert second.get_sample_value("outrider_spec_decode_num_drafts_total") == 0.0


def test_port_0_serves_nothing() -> None:
    with metrics_endpoint(CollectorRegistry(), 0) as port:
        assert port == 0
