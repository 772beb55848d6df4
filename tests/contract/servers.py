"""Real servers for the store's tests: alone, as a cluster, as master and replica, behind an address that moves."""

import asyncio
import os
import secrets
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from redis.asyncio import Redis

from outrider.store.embedded import EmbeddedServer, find_server

NUM_SLOTS = 16_384


def program(kind: str) -> Path | None:
    """Return the server program of a kind, "valkey" or "redis"; None if it is not installed."""
    if kind == "valkey":
        return find_server()
    found = shutil.which("redis-server")
    return Path(found) if found else None


REDIS = pytest.mark.skipif(program("redis") is None, reason="redis-server is not on PATH")
"""Of tests that need Debian's Redis; Valkey comes in a package, so that it is always there."""


def free_port() -> int:
    """Return a port that is free together with the cluster bus port 10,000 above it.

    Both are below those that the kernel gives to connections: whoever asks may listen there a while later.
    """
    while True:
        port = 20_000 + secrets.randbelow(2_700)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        return port


async def command(url: str, *words: str | int | bytes) -> Any:
    """Send one command to one server, through a connection of its own."""
    client: Any = Redis.from_url(url, protocol=2)
    try:
        return await client.execute_command(*words)
    finally:
        await client.aclose()


async def until(url: str, words: tuple[str, ...], wanted: str) -> None:
    """Ask a server the same until its answer contains a text."""
    async with asyncio.timeout(60.0):
        while True:
            answer = await command(url, *words)
            if wanted in (answer.decode() if isinstance(answer, bytes) else str(answer)):
                return
            await asyncio.sleep(0.02)


class Node:
    """One server on a TCP port that it keeps over restarts."""

    def __init__(self, kind: str, *arguments: str, data_dir: Path | None = None) -> None:
        self.port = free_port()
        listen = ("--bind", "127.0.0.1", "--port", str(self.port))
        self.server = EmbeddedServer(data_dir, program=program(kind), arguments=(*listen, *arguments))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()

    def signal(self, number: signal.Signals) -> None:
        """Send the server a signal."""
        os.kill(self.server.pid, number)

    async def kill(self) -> None:
        """End the server as a crash would, and collect it."""
        self.signal(signal.SIGKILL)
        await self.server.stop()

    async def command(self, *words: str | int | bytes) -> Any:
        """Send one command."""
        return await command(self.url, *words)


CLUSTER = (
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "1000",
    "--cluster-replica-validity-factor",
    "0",
    "--repl-diskless-sync-delay",
    "0",
)


@asynccontextmanager
async def cluster(kind: str, num_replicas: int = 0) -> AsyncIterator[list[Node]]:
    """Run three masters that share the slots, and replicas of the first."""
    async with AsyncExitStack() as exits:
        nodes = [await exits.enter_async_context(Node(kind, *CLUSTER)) for _ in range(3 + num_replicas)]
        for i, node in enumerate(nodes[:3]):
            await node.command("CLUSTER", "ADDSLOTSRANGE", i * NUM_SLOTS // 3, (i + 1) * NUM_SLOTS // 3 - 1)
        for i, node in enumerate(nodes):
            await node.command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node in nodes[1:]:
            await node.command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            await until(node.url, ("CLUSTER", "INFO"), f"cluster_known_nodes:{len(nodes)}")
        master_id = (await nodes[0].command("CLUSTER", "MYID")).decode()
        for replica in nodes[3:]:
            await replica.command("CLUSTER", "REPLICATE", master_id)
            await until(replica.url, ("ROLE",), "connected")
        for node in nodes:
            await until(node.url, ("CLUSTER", "INFO"), "cluster_state:ok")
        yield nodes


class Address:
    """An address that leads to one server, and later to another, as a service's name does after a failover.

    Connections that are open stay with the server they were made to.
    """

    def __init__(self, target: Node) -> None:
        self.target = target
        self.num_connections = 0
        self._server: asyncio.Server | None = None
        self._streams: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for stream in self._streams:
            stream.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target.port)
        except OSError:
            writer.close()
            return
        self._streams |= {writer, far_writer}
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))
        self._streams -= {writer, far_writer}


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until either end is closed, then close the other."""
    try:
        while some := await reader.read(65_536):
            writer.write(some)
            await writer.drain()
    except OSError:
        pass
    writer.close()
