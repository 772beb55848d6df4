"""The store over TLS: a server with a CA of its own that asks for certificates, and files that are replaced."""

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from outrider.errors import InvalidRequest, StoreUnavailable
from outrider.ids import SessionId
from outrider.store.connect import StoreClient, open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.errors import SessionNotFound
from outrider.store.sessions import SessionStore
from outrider.tier.server import BlockServer, TierError
from tests.authority import Authority, Identity
from tests.contract.servers import REDIS, free_port, program
from verify_service.config import VerifySettings


class Gate:
    """Takes TLS off for a server that has none, and asks for a certificate as a server with TLS does."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._writers: list[asyncio.StreamWriter] = []
        self.shown: list[str] = []
        """Names in the certificates shown, one entry for each connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("ssl_object").getpeercert()
        self.shown.append(next(name for _, name in certificate["subjectAltName"]))
        to_reader, to_writer = await asyncio.open_unix_connection(self._socket_path)
        self._writers += [writer, to_writer]
        await asyncio.gather(self._pump(reader, to_writer), self._pump(to_reader, writer))

    def cut(self) -> None:
        """Break all connections, as a restart of the server would."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def gated(valkey_url: str, server: Identity) -> AsyncIterator[tuple[Gate, int]]:
    gate = Gate(urlsplit(valkey_url).path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=server.ca)
    context.load_cert_chain(server.cert, server.key)
    context.verify_mode = ssl.CERT_REQUIRED
    listening = await asyncio.start_server(gate.serve, "127.0.0.1", 0, ssl=context)
    try:
        yield gate, listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        gate.cut()
        await listening.wait_closed()


def client_of(url: str, ca: str, shown: Identity | None) -> StoreClient:
    """Make a client as a service does, from its settings."""
    settings = VerifySettings(
        store_url=url,
        store_tls_ca=ca,
        store_tls_cert=shown.cert if shown else "",
        store_tls_key=shown.key if shown else "",
    )
    return open_client(settings.store_url, tls=settings.store_tls(), timeout_s=10.0)


async def ask(client: StoreClient) -> None:
    """Reach the store: it answers that it does not know a session."""
    store = SessionStore(client, prefix=f"test-{secrets.token_hex(4)}", deadline_s=30.0)
    with pytest.raises(SessionNotFound):
        await store.read_log(SessionId("s"))


def tier_of(url: str, shown: Identity | None) -> BlockServer:
    """Open the KV tier as a verifier does, from its settings."""
    named = {"store_tls_ca": shown.ca, "store_tls_cert": shown.cert, "store_tls_key": shown.key} if shown else {}
    told = VerifySettings(store_url="rediss://elsewhere", kv_tier_url=url, **named).tier  # type: ignore[arg-type]
    return BlockServer(told.url, secrets.token_hex(8), ttl_s=60, max_blocks=4, timeout_s=10.0, tls=told.tls)


async def take_all_slots(url: str) -> None:
    """Make a server a cluster of its own."""
    admin: Any = Redis.from_url(url)
    await admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16_383)
    async with asyncio.timeout(60):
        while (await admin.cluster("INFO"))["cluster_state"] != "ok":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await admin.aclose()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "store")


async def test_a_store_with_tls_is_reached_and_shown_our_certificate(valkey_url: str, authority: Authority) -> None:
    server, ours = authority.issue("127.0.0.1"), authority.issue("orchestrator")
    async with gated(valkey_url, server) as (gate, port):
        client = client_of(f"rediss://127.0.0.1:{port}", ours.ca, ours)
        await ask(client)
        await client.aclose()
    assert gate.shown == ["orchestrator"]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("foreign ca", "CERTIFICATE_VERIFY_FAILED"),
        ("another name", "Hostname mismatch|IP address mismatch"),
        ("no certificate", "did not answer"),
        ("plaintext", "did not answer"),
    ],
)
async def test_a_store_that_is_not_ours_or_does_not_know_us_is_unavailable_with_the_reason(
    valkey_url: str, authority: Authority, tmp_path: Path, case: str, told: str
) -> None:
    server = authority.issue("elsewhere" if case == "another name" else "127.0.0.1")
    ours = authority.issue("orchestrator")
    ca = Authority(tmp_path / "other").issue("x").ca if case == "foreign ca" else ours.ca
    async with gated(valkey_url, server) as (gate, port):
        url = f"rediss://127.0.0.1:{port}"
        shown = None if case == "no certificate" else ours
        client = open_client(url.replace("rediss", "redis")) if case == "plaintext" else client_of(url, ca, shown)
        store = SessionStore(client, deadline_s=1.0)
        with pytest.raises(StoreUnavailable, match=told):
            await store.read_log(SessionId("s"))
        await client.aclose()
    assert not gate.shown


async def test_a_connection_that_comes_back_shows_the_new_certificate(valkey_url: str, authority: Authority) -> None:
    server, ours = authority.issue("127.0.0.1"), authority.issue("orchestrator")
    async with gated(valkey_url, server) as (gate, port):
        client = client_of(f"rediss://127.0.0.1:{port}", ours.ca, ours)
        await ask(client)
        authority.write("orchestrator", ["orchestrator-renewed"])
        await ask(client)
        assert gate.shown == ["orchestrator"], "what is open stays open"
        gate.cut()
        await ask(client)
        await client.aclose()
    assert gate.shown == ["orchestrator", "orchestrator-renewed"]


@REDIS
@pytest.mark.parametrize("in_cluster", [False, True], ids=["single", "cluster"])
async def test_redis_with_tls_of_its_own_is_reached_alone_and_as_a_cluster(
    authority: Authority, tmp_path: Path, in_cluster: bool
) -> None:
    server, ours, port = authority.issue("127.0.0.1"), authority.issue("orchestrator"), free_port()
    arguments = ["--tls-port", str(port), "--tls-cert-file", server.cert, "--tls-key-file", server.key]
    arguments += ["--tls-ca-cert-file", server.ca]
    if in_cluster:
        arguments += ["--cluster-enabled", "yes", "--tls-cluster", "yes"]
    scheme = "rediss+cluster" if in_cluster else "rediss"
    async with EmbeddedServer(tmp_path / "data", program=program("redis"), arguments=tuple(arguments)) as running:
        if in_cluster:
            await take_all_slots(running.url)
        client = client_of(f"{scheme}://127.0.0.1:{port}", ours.ca, ours)
        await ask(client)
        authority.write("orchestrator", ["orchestrator-renewed"])
        await ask(client)
        await client.aclose()


async def test_the_kv_tier_is_reached_with_the_files_of_the_store_and_with_new_ones_after_a_change(
    valkey_url: str, authority: Authority
) -> None:
    server, ours = authority.issue("127.0.0.1"), authority.issue("verifier")
    async with gated(valkey_url, server) as (gate, port):
        tier = tier_of(f"rediss://127.0.0.1:{port}", ours)
        await asyncio.to_thread(tier.put, b"key", memoryview(bytearray(b"block")))
        assert await asyncio.to_thread(tier.get, [b"key"]) == [b"block"]
        authority.write("verifier", ["verifier-renewed"])
        gate.cut()
        with suppress(TierError):  # the connection that was cut may still be looked upon as one
            await asyncio.to_thread(tier.ping)
        assert await asyncio.to_thread(tier.get, [b"key"]) == [b"block"]
        tier.close()
    assert gate.shown == ["verifier", "verifier-renewed"]


async def test_files_that_the_url_of_the_kv_tier_names_go_before_those_of_the_store(
    valkey_url: str, authority: Authority
) -> None:
    server, ours, other = authority.issue("127.0.0.1"), authority.issue("verifier"), authority.issue("tier-user")
    named = f"ssl_ca_certs={other.ca}&ssl_certfile={other.cert}&ssl_keyfile={other.key}"
    async with gated(valkey_url, server) as (gate, port):
        tier = tier_of(f"rediss://127.0.0.1:{port}?{named}", ours)
        await asyncio.to_thread(tier.ping)
        tier.close()
    assert gate.shown == ["tier-user"]


@pytest.mark.parametrize("case", ["no files", "foreign ca", "another name"])
async def test_a_kv_tier_that_is_not_ours_is_unreachable(
    valkey_url: str, authority: Authority, tmp_path: Path, case: str
) -> None:
    server = authority.issue("elsewhere" if case == "another name" else "127.0.0.1")
    foreign = Authority(tmp_path / "other").issue("verifier")
    shown = {"no files": None, "foreign ca": foreign, "another name": authority.issue("verifier")}[case]
    async with gated(valkey_url, server) as (gate, port):
        tier = tier_of(f"rediss://127.0.0.1:{port}", shown)
        with pytest.raises(TierError, match="CERTIFICATE_VERIFY_FAILED") as caught:
            await asyncio.to_thread(tier.ping)
        tier.close()
    assert caught.value.reason == "unreachable"
    assert not gate.shown


def test_half_of_a_pair_for_the_store_names_what_is_missing() -> None:
    settings = VerifySettings(store_url="rediss://host", store_tls_cert="c.pem")
    with pytest.raises(InvalidRequest, match=r"STORE_TLS_KEY: .* since OUTRIDER_VERIFY_STORE_TLS_CERT is c\.pem"):
        settings.store_tls()
