"""Append-only files with the holes that full disks leave."""

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from outrider.store.aof import KEPT, close_holes
from outrider.store.embedded import EmbeddedServer, find_server

SERVERS = [find_server(), *(path for path in [Path("/usr/bin/redis-server")] if path.exists())]
SET = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$4\r\n\0\0\0*\r\n"
NOTE = b"#TS:1796147477\r\n"
HOLE = bytes(64)


def file_with(folder: Path, data: bytes) -> Path:
    path = folder / "appendonlydir" / "appendonly.aof.2.incr.aof"
    path.parent.mkdir()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "mended"),
    [
        (SET + HOLE + SET, SET + SET),
        (HOLE + SET + HOLE + NOTE + SET + HOLE, SET + NOTE + SET),
        (SET + HOLE + SET[:-7], SET + SET[:-7]),
    ],
    ids=["one", "many", "cut-off"],
)
def test_zeros_between_commands_are_taken_out_and_those_in_values_stay(
    tmp_path: Path, data: bytes, mended: bytes
) -> None:
    path = file_with(tmp_path, data)
    assert close_holes(tmp_path)
    assert path.read_bytes() == mended
    assert path.with_name(path.name + KEPT).read_bytes() == data


@pytest.mark.parametrize(
    "data",
    [SET + SET, SET[:-7], SET + HOLE + b"?" + SET, SET[:-2] + HOLE + SET, b""],
    ids=["whole", "cut-off", "else", "inside", "empty"],
)
def test_a_file_without_holes_or_with_other_damage_stays_as_it_is(tmp_path: Path, data: bytes) -> None:
    path = file_with(tmp_path, data)
    assert not close_holes(tmp_path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == data


@pytest.mark.parametrize("program", SERVERS, ids=lambda path: path.name)
async def test_what_was_written_around_a_full_disk_is_there_after_a_crash(tmp_path: Path, program: Path) -> None:
    """The hole comes about only in a file that a rewrite began."""
    server = EmbeddedServer(tmp_path, program=program)
    await server.start()
    client: Any = Redis.from_url(server.url)
    await client.set("before", "x" * 100)
    await client.bgrewriteaof()
    async with asyncio.timeout(60):
        while (await client.info("persistence"))["aof_rewrite_in_progress"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    file = newest(tmp_path)
    await fill_disk_and_free_it(server, client, file)
    await client.set("after", "x" * 100)
    await client.aclose()
    os.kill(server.pid, signal.SIGKILL)
    await server.stop()
    assert HOLE in file.read_bytes()
    await server.start()
    client = Redis.from_url(server.url)
    assert {b"before", b"meanwhile", b"after"} <= set(await client.keys())
    await client.aclose()
    await server.stop()


def newest(folder: Path) -> Path:
    return max(folder.rglob("*.incr.aof"), key=lambda path: path.stat().st_mtime)


async def fill_disk_and_free_it(server: EmbeddedServer, client: Any, file: Path) -> None:
    """Let one write come up short, and then have it written whole."""
    used, unlimited = len(file.read_bytes()), resource.RLIM_INFINITY  # noqa: ASYNC240
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (used + len(HOLE), unlimited))
    pipe = client.pipeline(transaction=False)
    with pytest.raises(ResponseError, match="MISCONF"):
        for _ in range(1000):
            await pipe.set("meanwhile", "x" * 1000).execute()
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
    async with asyncio.timeout(60):
        while True:
            try:
                await client.set("meanwhile", "x")
                return
            except ResponseError:
                await asyncio.sleep(0.05)
