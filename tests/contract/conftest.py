"""The servers that the store's contract is checked on."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.store.connect import StoreClient, open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.registry import Registry
from outrider.store.sessions import SessionStore
from tests.contract.servers import REDIS, cluster, program

KINDS = ["valkey", pytest.param("redis", marks=REDIS), "valkey cluster", pytest.param("redis cluster", marks=REDIS)]


@pytest.fixture(scope="session", params=KINDS)
async def store_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """URL of a server with an append-only file, or of three masters; Valkey's, and Debian's Redis's if there."""
    kind, _, clustered = request.param.partition(" ")
    if clustered:
        async with cluster(kind) as nodes:
            yield f"redis+cluster://127.0.0.1:{nodes[0].port}"
    else:
        folder: Path = tmp_path_factory.mktemp("store")
        async with EmbeddedServer(folder / "data", program=program(kind)) as server:
            yield server.url


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
