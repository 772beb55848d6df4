"""What a gate does to the bytes that pass: late, held or cut off, and never others or in another order."""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.fleet import open_files
from tests.chaos.wire import RESET_ON_CLOSE, TO_SOURCE, TO_TARGET, Gate

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """Serve echoes on a port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield int(server.sockets[0].getsockname()[1])
    server.close()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    async with echo() as port, Gate("target", port, lambda *_: "source") as made:
        yield made


@asynccontextmanager
async def connected(gate: Gate) -> AsyncIterator[Pair]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    yield reader, writer
    writer.close()


async def answer(pair: Pair, data: bytes, within_s: float = 60.0) -> bytes:
    pair[1].write(data)
    async with asyncio.timeout(within_s):
        return await pair[0].readexactly(len(data))


async def gone(gate: Gate) -> None:
    """Wait until a gate has no connection left."""
    async with asyncio.timeout(60):
        while gate.crossings:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_bytes_pass_whole_and_in_order(gate: Gate) -> None:
    data = bytes(range(256)) * 40_000
    async with connected(gate) as pair:
        assert await answer(pair, data) == data


async def test_a_delay_holds_every_byte_in_both_directions(gate: Gate) -> None:
    weather = gate.weather("source")
    async with connected(gate) as pair:
        await answer(pair, b"warm")
        weather.delay_s = 0.1
        began_s = time.monotonic()
        assert await answer(pair, b"late") == b"late"
        assert 0.2 <= time.monotonic() - began_s < 30.0
        assert weather.num_touched == 2


async def test_lost_packets_are_stalls_and_nothing_is_missing(gate: Gate) -> None:
    weather = gate.weather("source")
    weather.loss = 0.5
    async with connected(gate) as pair:
        for number in range(8):
            word = b"%08d" % number
            assert await answer(pair, word) == word
    assert weather.num_touched


@pytest.mark.parametrize("cut", [(TO_TARGET,), (TO_SOURCE,), (TO_TARGET, TO_SOURCE)])
async def test_what_is_sent_behind_a_cut_arrives_when_it_is_mended(gate: Gate, cut: tuple[int, ...]) -> None:
    weather = gate.weather("source")
    async with connected(gate) as pair:
        await answer(pair, b"warm")
        for direction in cut:
            weather.cut[direction] = True
        with pytest.raises(TimeoutError):
            await answer(pair, b"one, ", 0.2)
        weather.cut[:] = (False, False)
        weather.change()
        pair[1].write(b"two")
        async with asyncio.timeout(60):
            assert await pair[0].readexactly(8) == b"one, two"
        assert weather.num_touched


async def test_nobody_connects_through_a_cut_and_everybody_after_it(gate: Gate) -> None:
    weather = gate.weather("source")
    weather.cut[TO_SOURCE] = True
    async with connected(gate) as pair:
        with pytest.raises(TimeoutError):
            await answer(pair, b"a", 0.2)
        weather.cut[TO_SOURCE] = False
        async with asyncio.timeout(60):
            assert await pair[0].readexactly(1) == b"a"


async def test_a_reset_ends_every_connection_with_an_error(gate: Gate) -> None:
    async with connected(gate) as one, connected(gate) as two:
        await answer(one, b"a")
        await answer(two, b"b")
        assert gate.weather("source").reset() == 2
        for pair in (one, two):
            with pytest.raises(ConnectionResetError):
                async with asyncio.timeout(60):
                    await pair[0].read(1)
    assert not gate.crossings


async def test_the_end_of_a_process_is_told_to_the_other_side_but_not_through_a_cut(gate: Gate) -> None:
    weather = gate.weather("source")
    async with connected(gate) as pair:
        await answer(pair, b"a")
        weather.cut[TO_SOURCE] = True
        pair[1].write_eof()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pair[0].read(1)
        weather.cut[TO_SOURCE] = False
        weather.change()
        async with asyncio.timeout(60):
            assert await pair[0].read(1) == b""


@pytest.mark.parametrize("first", [0, 1], ids=["near", "far"])
async def test_a_connection_that_both_sides_have_ended_is_closed(first: int) -> None:
    """Whoever ends it first: neither gate nor kernel may keep anything of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with Gate("target", listener.getsockname()[1], lambda *_: "source") as gate:
            ends = [socket.create_connection(("127.0.0.1", gate.port))]
            ends.append((await asyncio.to_thread(listener.accept))[0])
            ends[first].shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(ends[1 - first].recv, 1) == b""
            ends[1 - first].sendall(b"the rest")
            ends[1 - first].close()
            assert await asyncio.to_thread(ends[first].recv, 99, socket.MSG_WAITALL) == b"the rest"
            ends[first].close()
            await gone(gate)


async def test_a_connection_that_is_reset_before_it_crosses_leaves_nothing(gate: Gate) -> None:
    weather = gate.weather("source")
    weather.cut[TO_TARGET] = True
    async with connected(gate):
        while not weather.num_touched:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        before = asyncio.all_tasks()
        assert weather.reset() == 1
        await gone(gate)
        async with asyncio.timeout(60):  # not the one that tries to connect
            while len(asyncio.all_tasks()) >= len(before):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_where_nobody_listens_a_connection_is_refused() -> None:
    async with Gate("nobody", 1, lambda *_: "source") as gate, connected(gate) as pair:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await answer(pair, b"a")


async def test_edges_are_told_apart_by_who_connects() -> None:
    names = iter(("one", "other"))
    async with echo() as port, Gate("target", port, lambda *_: next(names)) as gate:
        async with connected(gate) as one, connected(gate) as other:
            await answer(one, b"a")
            await answer(other, b"a")
            gate.weather("one").cut[:] = (True, True)
            assert await answer(other, b"b") == b"b"
            with pytest.raises(TimeoutError):
                await answer(one, b"b", 0.2)


def test_a_process_that_has_ended_has_nothing_open() -> None:
    """A gate may ask who has connected while the one who has is being killed."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert open_files(process.pid) == set()
    assert open_files(os.getpid())


async def test_an_end_that_is_passed_on_may_meet_the_reset_of_the_other_side() -> None:
    """The reset has arrived, but nobody has looked at it yet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with Gate("target", listener.getsockname()[1], lambda *_: "source") as gate, connected(gate) as pair:
            taken, _ = await asyncio.get_running_loop().run_in_executor(None, listener.accept)
            weather = gate.weather("source")
            weather.cut[TO_TARGET] = True
            pair[1].write_eof()
            while not weather.num_touched:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            taken.close()
            weather.cut[TO_TARGET] = False
            weather.change()
