"""What a caller sees when the server dies, freezes, is full, restarts, or its reply is lost."""

import asyncio
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import pytest
import uvloop

from outrider.errors import InvalidRequest, StoreUnavailable
from outrider.ids import Mode, SessionId, TokenClass, WorkerId
from outrider.store.connect import open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.errors import SessionNotFound
from outrider.store.records import KvLocation, Lease, SessionState
from outrider.store.sessions import SessionStore
from tests.contract.servers import free_port

T = TypeVar("T")

SESSION = SessionId("s")
PROMPT = (7, 0, 4_294_967_295)
STATE = SessionState(model="toy", mode=Mode.GREEDY, prompt_len=3, max_tokens=100)


async def create(store: SessionStore) -> Lease:
    return await store.create(SESSION, STATE, PROMPT, [TokenClass.PROMPT] * 3, "one", 60.0)


def decode(count: int) -> list[TokenClass]:
    return [TokenClass.DECODE] * count


async def keep_appending(store: SessionStore, session_id: SessionId) -> None:
    length = 0
    await store.create(session_id, STATE, [], [], "one", 60.0)
    while True:
        length = await store.append(session_id, 1, length, [1, 2, 3], decode(3))


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_dies_or_freezes_is_unavailable_within_the_deadline(blow: signal.Signals) -> None:
    async with EmbeddedServer() as server:
        client = open_client(server.url, timeout_s=0.4)
        store = SessionStore(client, deadline_s=0.6)
        writers = [asyncio.create_task(keep_appending(store, SessionId(f"s{i}"))) for i in range(8)]
        await asyncio.sleep(0.1)
        os.kill(server.pid, blow)
        struck = time.monotonic()
        results = await asyncio.wait_for(asyncio.gather(*writers, return_exceptions=True), 60.0)
        assert all(isinstance(result, StoreUnavailable) and result.__cause__ for result in results), results
        assert time.monotonic() - struck < 10
        with pytest.raises(StoreUnavailable):
            await create(store)
        os.kill(server.pid, signal.SIGKILL)
        await client.aclose()


class ReplyLoser:
    """Stands between client and server; after `lose_next()` it hangs up instead of passing on a script's reply."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self.armed = False
        self.num_lost = 0

    def lose_next(self) -> None:
        self.armed = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self.socket_path)
        while request := await reader.read(65_536):
            server_writer.write(request)
            reply = await server_reader.read(65_536)
            if self.armed and b"EVAL" in request and not reply.startswith(b"-NOSCRIPT"):
                self.armed, self.num_lost = False, self.num_lost + 1
                break
            writer.write(reply)
        for stream in (writer, server_writer):
            stream.close()
            await stream.wait_closed()


async def test_no_script_does_harm_when_its_reply_is_lost_and_it_is_repeated(valkey_url: str, tmp_path: Path) -> None:
    loser = ReplyLoser(urlsplit(valkey_url).path)
    proxy = await asyncio.start_unix_server(loser.serve, tmp_path / "proxy.sock")
    client = open_client(f"unix://{tmp_path / 'proxy.sock'}")
    store = SessionStore(client, prefix=f"test-{secrets.token_hex(4)}")
    turn = replace(STATE, prompt_len=7)

    async def repeated(operation: Awaitable[T]) -> T:
        loser.lose_next()
        before = loser.num_lost
        answer = await operation
        assert loser.num_lost == before + 1
        return answer

    lease = await repeated(create(store))
    assert (lease.owner, lease.fence) == ("one", 1)
    assert await repeated(store.append(SESSION, 1, 3, [10, 11], decode(2), b"\x01\x02")) == 5
    ours = await repeated(store.acquire_lease(SESSION, "two", 60.0, force=True))
    assert ours.fence > 1
    assert (await repeated(store.renew_lease(SESSION, ours.fence, 60.0))).fence == ours.fence
    assert await repeated(store.begin_turn(SESSION, ours.fence, 5, [12, 13], decode(2), turn)) == 7
    await repeated(store.update_state(SESSION, ours.fence, seed=3))
    await repeated(store.put_kv_location(SESSION, ours.fence, KvLocation(WorkerId("v1"), 6)))
    log = await repeated(store.read_log(SESSION))
    assert (log.token_ids, log.kinds) == ((*PROMPT, 10, 11, 12, 13), b"\0\0\0\x01\x02\0\0")
    assert await repeated(store.read_state(SESSION)) == replace(turn, seed=3)
    assert [each.prefix_len for each in await repeated(store.kv_locations(SESSION))] == [6]
    assert await repeated(store.restore(SESSION, ours, turn, log, 60.0)) == 7
    await repeated(store.release_lease(SESSION, ours.fence))
    assert await store.read_log(SESSION) == log
    assert await repeated(store.delete(SESSION)) is False, "the second time it was gone"
    with pytest.raises(SessionNotFound):
        await store.read_log(SESSION)
    await client.aclose()
    proxy.close()
    await proxy.wait_closed()


async def reads(store: SessionStore) -> bool:
    """Return whether the log can be read, as it was written."""
    try:
        return (await store.read_log(SESSION)).length == 3
    except StoreUnavailable:
        return False


async def test_with_all_connections_busy_the_wait_for_one_ends_at_the_deadline() -> None:
    async with EmbeddedServer() as server:
        client = open_client(server.url, timeout_s=0.3, max_connections=1)
        store = SessionStore(client, deadline_s=0.5)
        await create(store)
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        results = await asyncio.gather(*(store.read_log(SESSION) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(result, StoreUnavailable) for result in results), results
        assert time.monotonic() - began < 10
        os.kill(server.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            while not await reads(store):  # noqa: ASYNC110  (the other end is a server)
                await asyncio.sleep(0.05)
        await client.aclose()


async def test_a_client_outlives_a_restart_of_its_server_and_finds_the_log_again(tmp_path: Path) -> None:
    """The port is the server's own; connections that went stale are replaced without the caller noticing."""
    port = free_port()
    server = EmbeddedServer(tmp_path / "data", arguments=("--bind", "127.0.0.1", "--port", str(port)))
    client = open_client(f"redis://127.0.0.1:{port}")
    store = SessionStore(client)
    async with server:
        lease = await create(store)
        await asyncio.gather(*(store.read_log(SESSION) for _ in range(8)))
    async with server:
        assert await store.append(SESSION, lease.fence, 3, [1], decode(1)) == 4
        assert await store.read_state(SESSION) == STATE
    await client.aclose()


async def test_a_full_server_is_unavailable_for_writes_and_keeps_what_it_has() -> None:
    async with EmbeddedServer(arguments=("--maxmemory", "4mb")) as server:
        client = open_client(server.url)
        store = SessionStore(client, deadline_s=0.4)
        lease = await create(store)
        lengths = [3]

        async def fill() -> None:
            while True:
                lengths.append(await store.append(SESSION, lease.fence, lengths[-1], [1] * 10_000, decode(10_000)))

        with pytest.raises(StoreUnavailable):
            await fill()
        assert (await store.read_log(SESSION)).length == lengths[-1]
        await client.aclose()


async def test_a_url_of_another_scheme_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"redis\+cluster"):
        open_client("http://localhost")


def test_under_uvloop_a_connection_that_is_lost_before_it_is_used_is_an_outage() -> None:
    """A server behind a proxy or a balancer takes connections and drops them while it is away."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        dropping = threads.submit(drop_connections, listener)
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        errors = uvloop.run(errors_of_reads(url, 40))
        listener.shutdown(socket.SHUT_RDWR)
        dropping.result(60.0)
    assert len(errors) == 40
    assert {type(error) for error in errors} == {StoreUnavailable}


async def errors_of_reads(url: str, count: int) -> list[BaseException]:
    """Return how reads of a store fail while the event loop is busy."""
    client = open_client(url)
    store = SessionStore(client, deadline_s=0.5)
    busy = asyncio.create_task(occupy_loop())
    results = await asyncio.gather(*(store.read_state(SESSION) for _ in range(count)), return_exceptions=True)
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await client.aclose()
    return [result for result in results if isinstance(result, BaseException)]


async def occupy_loop() -> None:
    """Leave time for a connection to be lost between two steps of whoever opened it."""
    while True:
        time.sleep(0.002)  # noqa: ASYNC251  (the point)
        await asyncio.sleep(0)


def drop_connections(listener: socket.socket) -> None:
    """Take every connection, and reset it a moment later, until the listener is shut."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        time.sleep(0.001)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
