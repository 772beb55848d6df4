"""A client whose TLS cannot work says so at once, and tries on where a later try may do."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outrider.certificates import SourceFile, TlsFiles, TlsMaterial
from outrider.client import Client, Retry, client_tls
from outrider.errors import HandshakeFailed, Internal, Unavailable
from outrider.handshake import handshake_error
from outrider.resuming import Tries
from outrider.rpc import RpcServer
from outrider.rpc.tls import ServerTls
from tests.authority import Authority, Identity

SERVICE = "outrider.v1.GenerationService"
AT_ONCE_S = 20.0
"""Far below the 30 s for which a client tries, and enough for a busy machine."""


def hours_from_now(hours: int) -> datetime:
    return datetime.now(UTC) + timedelta(hours=hours)


class Front:
    """Servers that answer no call; none gets that far."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.foreign = Authority(folder / "ours"), Authority(folder / "foreign")
        self.exits = AsyncExitStack()

    async def serve(self, identity: Identity | None, day: Callable[[], datetime] | None = None) -> str:
        """Return the address of a server with this certificate, read on that day; None: one without TLS."""
        tls = None
        if identity is not None:
            files = TlsFiles(SourceFile("cert", identity.cert), SourceFile("key", identity.key), SourceFile("ca", ""))
            tls = ServerTls(TlsMaterial(files, clock=day))
        server = RpcServer(tls=tls)
        self.exits.push_async_callback(server.stop, 0)
        return await server.start("127.0.0.1:0", [SERVICE])

    async def client(self, *addresses: str, retry: Retry | None = None) -> Client:
        tls = client_tls(self.ours.issue("reader").ca)
        return await self.exits.enter_async_context(Client(addresses, tls=tls, retry=retry or Retry()))

    async def server_that_cannot_be_trusted(self, why: str) -> str:
        match why:
            case "a foreign CA":
                return await self.serve(self.foreign.issue("127.0.0.1"))
            case "another name":
                return await self.serve(self.ours.issue("elsewhere"))
            case "expired":
                begun, over = hours_from_now(-48), hours_from_now(-24)
                expired = self.ours.issue("127.0.0.1", begins=begun, ends=over)
                return await self.serve(expired, lambda: hours_from_now(-36))
            case _:
                return await self.serve(None)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    made = Front(tmp_path)
    async with made.exits:
        yield made


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("a foreign CA", "not of a CA in the CA file used here"),
        ("another name", "another name than the one that was looked for"),
        ("expired", "has expired"),
        ("no TLS", "the server speaks no TLS"),
    ],
)
async def test_what_tls_can_never_agree_on_is_an_error_at_once(front: Front, why: str, told: str) -> None:
    client = await front.client(await front.server_that_cannot_be_trusted(why))
    begun_s = time.monotonic()
    with pytest.raises(HandshakeFailed, match=told):
        await client.models()
    assert time.monotonic() - begun_s < AT_ONCE_S


async def test_another_address_is_still_tried(front: Front) -> None:
    strange = await front.server_that_cannot_be_trusted("a foreign CA")
    good = await front.serve(front.ours.issue("127.0.0.1"))
    client = await front.client(strange, good)
    with pytest.raises(Internal):  # it knows no such method: so TLS was agreed on
        await client.models()


async def test_none_of_several_is_tried_twice(front: Front) -> None:
    strange = [await front.server_that_cannot_be_trusted("another name") for _ in range(3)]
    client = await front.client(*strange)
    begun_s = time.monotonic()
    with pytest.raises(HandshakeFailed, match=strange[-1]):
        await client.models()
    assert time.monotonic() - begun_s < AT_ONCE_S


async def test_an_address_where_nobody_listens_is_tried_on(front: Front) -> None:
    address = await front.serve(front.ours.issue("127.0.0.1"))
    await front.exits.aclose()
    client = await front.client(address, retry=Retry(max_attempts=3, first_pause_s=0.01))
    with pytest.raises(Unavailable, match="gave up after 3 tries") as caught:
        await client.models()
    assert not isinstance(caught.value, HandshakeFailed)


async def test_a_connection_closed_at_once_is_tried_on(front: Front) -> None:
    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as closing:
        port = closing.sockets[0].getsockname()[1]
        client = await front.client(f"127.0.0.1:{port}", retry=Retry(max_attempts=2, first_pause_s=0.01))
        with pytest.raises(Unavailable, match="gave up after 2 tries") as caught:
            await client.models()
    assert not isinstance(caught.value, HandshakeFailed)


def test_the_time_that_there_is_for_trying_is_used_to_its_end() -> None:
    now_s = 0.0
    retry = Retry(max_attempts=1000, max_total_s=2.0, first_pause_s=0.3, longest_pause_s=1.5)
    tries = Tries(retry, num_addresses=1, clock=lambda: now_s)
    with pytest.raises(Unavailable, match=r"in 2\.0 s"):
        for _ in range(1000):
            pause_s = tries.pause_after(Unavailable("away"), begun=True)
            assert 0 < pause_s <= 2.0 - now_s
            now_s += pause_s
    assert now_s == pytest.approx(2.0)


def test_only_failures_in_a_row_end_the_tries() -> None:
    tries = Tries(Retry(first_pause_s=0.0, longest_pause_s=0.0), num_addresses=2)
    for error in (HandshakeFailed("strange"), Unavailable("away"), HandshakeFailed("strange"), Unavailable("away")):
        tries.pause_after(error, begun=True)
    tries.pause_after(HandshakeFailed("strange"), begun=True)
    tries.progressed()
    tries.pause_after(HandshakeFailed("strange"), begun=True)
    with pytest.raises(HandshakeFailed):
        tries.pause_after(HandshakeFailed("strange"), begun=True)


def test_a_call_that_fails_for_another_reason_is_not_laid_to_tls() -> None:
    assert handshake_error("certificate has expired") is None
    assert handshake_error("failed to connect to all addresses; last error: connection refused") is None
