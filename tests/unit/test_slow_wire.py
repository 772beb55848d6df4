"""The delaying proxy, and the figures that benchmarks take of streams."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.slow_wire import SlowWire, free_ports
from benchmarks.watching import percentiles, times_per_token

ONE_WAY_S = 0.03


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server that sends back what it gets, behind a wire of 30 ms."""
    listen, target = free_ports(2)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", target)
    async with SlowWire(listen, target, ONE_WAY_S):
        yield listen
    server.close()


async def test_everything_arrives_in_order_and_late_by_both_ways(port: int) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started_s = loop.time()
    for number in range(20):
        writer.write(b"%04d" % number)
        await writer.drain()
    answer = await reader.readexactly(80)
    assert answer == b"".join(b"%04d" % number for number in range(20))
    assert loop.time() - started_s >= 2 * ONE_WAY_S
    writer.close()


async def test_bytes_on_the_way_do_not_wait_for_each_other(port: int) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent_s = []
    for _ in range(100):
        sent_s.append(loop.time())
        writer.write(b"x")
        await asyncio.sleep(0.005)
    assert await reader.readexactly(100) == b"x" * 100
    # One after the other they would take 100 times 60 ms.
    assert loop.time() - sent_s[0] < 100 * 2 * ONE_WAY_S
    writer.close()


async def test_the_end_of_one_side_reaches_the_other(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"last")
    writer.write_eof()
    assert await reader.read() == b"last"
    writer.close()


def test_a_chunks_time_is_shared_by_its_tokens() -> None:
    assert times_per_token([1.0, 3.0, 4.0], [5, 4, 1]) == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert times_per_token([1.0], [5]) == []


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles(range(1, 101)) == [51, 96, 100]
    assert percentiles([7.0]) == [7.0] * 3
