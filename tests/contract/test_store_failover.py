"""What a lease holder sees of a server that restarts, is replaced, is full or resharded: a pause, and nothing lost.

Every fault is a real one of a real server. The lease holder is the orchestrator's journal.
"""

import asyncio
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from redis.exceptions import BusyLoadingError, ReadOnlyError, RedisError

from orchestrator.job import Settings
from outrider.errors import LeaseLost, StoreUnavailable
from outrider.ids import SessionId, WorkerId
from outrider.store.connect import open_client
from outrider.store.errors import SessionNotFound
from outrider.store.records import KvLocation, Lease, LogSlice
from outrider.store.sessions import SessionStore
from tests.contract.servers import REDIS, Address, Node, cluster, until
from tests.contract.writer import PROMPT, PROMPT_CLASSES, STATE, Writer, open_session

KINDS = ["valkey", pytest.param("redis", marks=REDIS)]
LONG_KINDS = ["valkey", pytest.param("redis", marks=[REDIS, pytest.mark.slow])]
"""Of tests that take seconds: a run for the impatient leaves the second one out."""
SHORT = Settings(store_deadline_s=1.5)


@asynccontextmanager
async def store_at(url: str, deadline_s: float = 3.0) -> AsyncIterator[SessionStore]:
    """Open a client of its own for a store."""
    client = open_client(url, timeout_s=0.5)
    try:
        yield SessionStore(client, deadline_s=deadline_s)
    finally:
        await client.aclose()


async def assert_log(url: str, writer: Writer) -> None:
    """Require that a fresh client finds exactly what was written."""
    async with store_at(url) as store:
        log = await store.read_log(writer.session_id)
    assert log.token_ids == tuple(writer.token_ids)
    assert len(log.classes) == len(log.kinds) == len(writer.token_ids)


# --- one server ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LONG_KINDS)
async def test_a_killed_server_that_reloads_its_file_is_a_pause_and_nothing_confirmed_is_lost(
    kind: str, tmp_path: Path
) -> None:
    """While it loads, the server answers everything with -LOADING."""
    node = Node(kind, data_dir=tmp_path / "data")
    async with node, store_at(node.url) as store, store_at(node.url) as filler:
        for _ in range(1500):
            await open_session(filler)
        async with Writer(store, *await open_session(store)) as writer:
            await writer.write(5)
            await node.kill()
            writer.add(3)
            node.server._arguments += ("--key-load-delay", "100", "--loading-process-events-interval-bytes", "1024")
            starting = asyncio.create_task(node.server.start())
            refusals = 0
            while not starting.done():
                try:
                    await node.command("GET", "x")
                except BusyLoadingError:
                    refusals += 1
                    assert writer.logged == 8, "it was not there to confirm anything"
                except (RedisError, OSError):
                    pass
                await asyncio.sleep(0.02)
            await starting
            assert refusals > 0
            await writer.confirmed()
            await assert_log(node.url, writer)


@pytest.mark.parametrize("kind", LONG_KINDS)
async def test_a_server_that_freezes_or_sleeps_is_a_pause(kind: str) -> None:
    async with Node(kind, "--enable-debug-command", "yes") as node, store_at(node.url) as store:
        async with Writer(store, *await open_session(store)) as writer:
            await writer.write(5)
            sleeping = asyncio.create_task(node.command("DEBUG", "SLEEP", "1"))
            await asyncio.sleep(0.1)
            await writer.write(5)
            await sleeping
            node.signal(signal.SIGSTOP)
            writer.add(5)
            await asyncio.sleep(1.0)
            assert writer.logged == 13
            node.signal(signal.SIGCONT)
            await writer.confirmed()
            await assert_log(node.url, writer)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_server_is_a_pause_and_still_read_and_deleted_from(kind: str) -> None:
    async with Node(kind) as node, store_at(node.url, 1.0) as store:
        other, _ = await open_session(store)
        async with Writer(store, *await open_session(store)) as writer:
            await writer.write(5)
            await node.command("CONFIG", "SET", "maxmemory", "1")
            writer.add(3)
            await asyncio.sleep(0.6)
            assert (await store.read_log(writer.session_id)).length == writer.logged == 8
            assert (await store.read_state(writer.session_id)) == STATE
            with pytest.raises(StoreUnavailable, match="for now"):
                await open_session(store)
            assert await store.delete(other)
            await node.command("CONFIG", "SET", "maxmemory", "0")
            await writer.confirmed()
            await assert_log(node.url, writer)
            with pytest.raises(SessionNotFound):
                await store.read_log(other)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_disk_is_a_pause(kind: str, tmp_path: Path) -> None:
    """A limit on the size of the server's files stands in for the disk: its writes fail in the same way."""
    node = Node(kind, data_dir=tmp_path / "data")
    async with node, store_at(node.url, 1.0) as store:
        async with Writer(store, *await open_session(store)) as writer:
            await writer.write(5)
            size = max(path.stat().st_size for path in (tmp_path / "data").rglob("*.aof*"))
            resource.prlimit(node.server.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            refused = False
            for _ in range(200):
                try:
                    await open_session(store)
                except StoreUnavailable as error:
                    refused = "MISCONF" in str(error)
                    break
                await asyncio.sleep(0.02)
            assert refused
            confirmed = writer.logged
            writer.add(3)
            await asyncio.sleep(0.5)
            assert writer.logged == confirmed
            resource.prlimit(node.server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            await writer.confirmed()
        # While it syncs, a server that syncs every second answers before it has written (docs/operations.md).
        await until(node.url, ("INFO", "persistence"), "'aof_buffer_length': 0,")
        await node.kill()
        await node.server.start()
        await assert_log(node.url, writer)


@pytest.mark.parametrize("fault", ["full", "frozen", "gone"])
async def test_a_fault_that_outlasts_the_deadline_is_unavailable_and_nothing_worse(fault: str) -> None:
    async with Node("valkey") as node, store_at(node.url, 1.0) as store:
        async with Writer(store, *await open_session(store), settings=SHORT) as writer:
            await writer.write(5)
            if fault == "full":
                await node.command("CONFIG", "SET", "maxmemory", "1")
            else:
                node.signal(signal.SIGSTOP if fault == "frozen" else signal.SIGKILL)
            with pytest.raises(StoreUnavailable):
                await writer.write(1, within_s=60.0)
            assert writer.logged == 8
            if fault == "frozen":
                node.signal(signal.SIGCONT)


# --- a replica takes over -----------------------------------------------------------------------------------------


@asynccontextmanager
async def pair(kind: str) -> AsyncIterator[tuple[Node, Node, Address]]:
    """Run a master, its replica, and an address that leads to the master."""
    fast = ("--repl-diskless-sync-delay", "0")
    async with Node(kind, *fast) as master, Node(kind, *fast) as replica, Address(master) as address:
        await replica.command("REPLICAOF", "127.0.0.1", master.port)
        await until(replica.url, ("ROLE",), "connected")
        yield master, replica, address


async def caught_up(master: Node, replica: Node) -> None:
    """Wait until a replica has all that its master has."""
    wanted = int((await master.command("ROLE"))[1])
    while int((await replica.command("ROLE"))[4]) < wanted:  # noqa: ASYNC110  (the other end is a server)
        await asyncio.sleep(0.01)


async def demote(master: Node, to: Node, address: Address) -> None:
    """Make the old master a replica of the new one. Whoever is connected to it stays so, and is refused writes."""
    await master.command("REPLICAOF", "127.0.0.1", to.port)
    address.target = to
    with pytest.raises(ReadOnlyError):
        await master.command("SET", "x", "1")


async def a_tail(store: SessionStore, session_id: SessionId, lease: Lease) -> Writer:
    """Lose nothing but appended tokens."""
    async with Writer(store, session_id, lease) as writer:
        await writer.write(4)
    return writer


async def a_grant(store: SessionStore, session_id: SessionId, lease: Lease) -> Writer:
    """Lose a lease taken over by force, and tokens."""
    taken = await store.acquire_lease(session_id, "two", 60.0, force=True)
    return await a_tail(store, session_id, taken)


async def a_turn(store: SessionStore, session_id: SessionId, lease: Lease) -> Writer:
    """Lose a further turn: its prompt, its state, and tokens."""
    turn, prompt, classes = (
        replace(STATE, prompt_len=5, seed=9),
        (*PROMPT, 8, 9),
        (*PROMPT_CLASSES, *PROMPT_CLASSES[1:]),
    )
    await store.begin_turn(session_id, lease.fence, 3, prompt[3:], classes[3:], turn)
    async with Writer(store, session_id, lease, logged=LogSlice(0, prompt, classes, 5), state=turn) as writer:
        await writer.write(4)
    return writer


async def a_session(store: SessionStore, session_id: SessionId, lease: Lease) -> Writer:
    """Lose a session that the replica never heard of."""
    return await a_tail(store, *await open_session(store))


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_failover_lost_is_written_anew_by_the_lease_holder(kind: str) -> None:
    """The replica is promoted while the old master still takes writes; those are lost when it is told to follow."""
    async with pair(kind) as (master, replica, address), store_at(address.url) as store:
        sessions = [await open_session(store) for _ in range(5)]
        await caught_up(master, replica)
        await replica.command("REPLICAOF", "NO", "ONE")
        kinds = (a_tail, a_grant, a_turn, a_session)
        losers = [await lose(store, *session) for lose, session in zip(kinds, sessions, strict=False)]
        contested = await a_grant(store, *sessions[-1])
        await demote(master, replica, address)
        for loser in losers:
            async with loser as writer:
                await writer.write(3)
            await assert_log(replica.url, writer)
            assert await store.read_state(writer.session_id) == writer.journal._state
        await assert_the_lost_grant_gives_way(store, contested)
        await assert_log(replica.url, contested)


async def assert_the_lost_grant_gives_way(store: SessionStore, older: Writer) -> None:
    """Require that a lease granted after the failover has another, higher number than the one that was lost."""
    newer = await store.acquire_lease(older.session_id, "three", 60.0, force=True)
    assert newer.fence > older.journal._fence
    async with Writer(store, older.session_id, newer) as writer:
        await writer.write(2)
        with pytest.raises(LeaseLost):
            async with older:
                await older.write(1)
        await writer.write(2)
    older.token_ids = writer.token_ids


async def test_an_idle_lease_holder_notices_the_loss_with_its_next_renewal() -> None:
    settings = Settings(lease_ttl_s=0.6)
    async with Node("valkey") as node, store_at(node.url) as store:
        session_id, lease = await open_session(store)
        async with Writer(store, session_id, lease, settings=settings) as writer:
            await writer.write(4)
            await node.command("FLUSHALL")
            async with asyncio.timeout(60):
                while not await located(store, session_id):  # noqa: ASYNC110  (the other end is a server)
                    await asyncio.sleep(0.05)
            await assert_log(node.url, writer)
            assert (await store.kv_locations(session_id))[0].prefix_len == 6


async def located(store: SessionStore, session_id: SessionId) -> bool:
    """Return whether the store knows the session, and where its KV is."""
    try:
        return bool(await store.kv_locations(session_id))
    except SessionNotFound:
        return False


# --- a cluster ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LONG_KINDS)
async def test_a_cluster_whose_master_is_killed_goes_on_with_its_replica(kind: str) -> None:
    """Nobody can be reached for the lost slots (-CLUSTERDOWN) until the replica is elected."""
    async with cluster(kind, num_replicas=1) as (first, second, _, replica), AsyncExitStack() as exits:
        url = f"redis+cluster://127.0.0.1:{second.port}"
        store = await exits.enter_async_context(store_at(url))
        writers = [Writer(store, *await open_session(store)) for _ in range(12)]
        for writer in writers:
            await exits.enter_async_context(writer)
            await writer.write(3)
        first.signal(signal.SIGKILL)
        for writer in writers:
            writer.add(3)
        for writer in writers:
            await writer.confirmed()
        for writer in writers:
            await assert_log(url, writer)
        assert (await replica.command("ROLE"))[0] == b"master"


async def keys_of_slot(node: Node, slot: int) -> list[bytes]:
    found: list[bytes] = await node.command("CLUSTER", "GETKEYSINSLOT", slot, 100)
    return found


@pytest.mark.parametrize("kind", LONG_KINDS)
async def test_a_session_whose_slot_moves_is_followed_while_it_moves_and_after(kind: str) -> None:
    """-TRYAGAIN while keys are on both sides, -ASK while all are on the other, -MOVED afterwards."""
    async with cluster(kind) as nodes, store_at(f"redis+cluster://127.0.0.1:{nodes[0].port}") as store:
        session_id, lease = await open_session(store)
        await store.put_kv_location(session_id, lease.fence, KvLocation(WorkerId("v1"), 3))
        slot = int(await nodes[0].command("CLUSTER", "KEYSLOT", f"{{{session_id}}}"))
        (source,) = [node for node in nodes if await keys_of_slot(node, slot)]
        target = nodes[(nodes.index(source) + 1) % 3]
        ids = [(await node.command("CLUSTER", "MYID")).decode() for node in (source, target)]
        async with Writer(store, session_id, lease) as writer:
            await writer.write(3)
            await target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            await source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
            first, *others = await keys_of_slot(source, slot)
            await source.command("MIGRATE", "127.0.0.1", target.port, first, 0, 1000)
            writer.add(3)
            await asyncio.sleep(0.3)
            assert writer.logged == 6
            for key in others:
                await source.command("MIGRATE", "127.0.0.1", target.port, key, 0, 1000)
            await writer.confirmed()
            for node in (target, source, *nodes):
                await node.command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
            await writer.write(3)
        assert (await store.read_log(session_id)).token_ids == tuple(writer.token_ids)
        assert await keys_of_slot(target, slot)
        assert not await keys_of_slot(source, slot)
