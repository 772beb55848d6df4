"""The servers that the store's contract is checked on."""

import asyncio
import secrets
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from outrider.store.connect import StoreClient, open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.registry import Registry
from outrider.store.sessions import SessionStore


def free_port() -> int:
    """Return a port that is free together with the cluster bus port 10,000 above it."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        return port


async def form_cluster(url: str) -> None:
    """Give all slots to a server in cluster mode and wait until it serves them."""
    admin: Any = Redis.from_url(url)
    await admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16_383)
    for _ in range(500):
        if (await admin.cluster("INFO"))["cluster_state"] == "ok":
            break
        await asyncio.sleep(0.02)
    await admin.aclose()


@pytest.fixture(scope="session", params=["valkey", "redis", "cluster"])
async def store_url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """URL of the embedded server, of Debian's redis-server, and of a one-node cluster (which refuses two slots)."""
    async with AsyncExitStack() as stack:
        if request.param == "valkey":
            server = await stack.enter_async_context(EmbeddedServer())
            yield server.url
        elif request.param == "redis":
            program = shutil.which("redis-server")
            if program is None:
                pytest.skip("redis-server is not on PATH")
            server = await stack.enter_async_context(EmbeddedServer(program=Path(program)))
            yield server.url
        else:
            port = free_port()
            arguments = ("--bind", "127.0.0.1", "--port", str(port), "--cluster-enabled", "yes")
            server = await stack.enter_async_context(EmbeddedServer(arguments=arguments))
            await form_cluster(server.url)
            yield f"redis+cluster://127.0.0.1:{port}"


@pytest.fixture
async def client(store_url: str) -> AsyncIterator[StoreClient]:
    opened = open_client(store_url)
    yield opened
    await opened.aclose()


@pytest.fixture
def store(client: StoreClient) -> SessionStore:
    """A store whose keys nobody else uses."""
    return SessionStore(client, prefix=f"test-{secrets.token_hex(4)}")


@pytest.fixture
def registry(client: StoreClient) -> Registry:
    """A registry whose keys nobody else uses."""
    return Registry(client, prefix=f"test-{secrets.token_hex(4)}")
