"""What many sessions ask of the store at one time leaves in few writes, and each gets its own answer."""

import asyncio
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from outrider.ids import Mode, SessionId, TokenClass
from outrider.store.connect import StoreClient, open_client
from outrider.store.errors import Fenced, LogGap, SessionNotFound
from outrider.store.records import SessionState
from outrider.store.sessions import SessionStore
from tests.contract.test_store_outages import ReplyLoser

STATE = SessionState(model="toy", mode=Mode.GREEDY, prompt_len=1, max_tokens=100)
SESSIONS = [SessionId(f"s{number}") for number in range(40)]


@pytest.fixture
def store_url(valkey_url: str) -> str:
    """One server: clients of a cluster send each script by itself."""
    return valkey_url


@pytest.fixture
def prefix() -> str:
    """Of keys that nobody else uses."""
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
async def store(client: StoreClient, prefix: str) -> SessionStore:
    """A store of its own, with many sessions of one token."""
    found = SessionStore(client, prefix=prefix)
    for session_id in SESSIONS:
        await found.create(session_id, STATE, [7], [TokenClass.PROMPT], "one", 60.0)
    return found


async def append(store: SessionStore, session_id: SessionId, *, fence: int = 1, start: int = 1) -> int:
    return await store.append(session_id, fence, start, [8], [TokenClass.DECODE])


async def num_reads(client: StoreClient) -> int:
    """Return how often the server has read from a connection."""
    untyped: Any = client
    stats: dict[str, int] = await untyped.info("stats")
    return stats["total_reads_processed"]


async def test_what_many_sessions_append_at_one_time_leaves_in_few_writes(
    client: StoreClient, store: SessionStore
) -> None:
    await append(store, SESSIONS[0])  # from here on the server knows the script
    before = await num_reads(client)
    lengths = await asyncio.gather(*(append(store, session_id) for session_id in SESSIONS))
    assert await num_reads(client) - before <= len(SESSIONS) // 4
    assert lengths == [2] * len(SESSIONS)
    assert [(await store.read_log(session_id)).token_ids for session_id in SESSIONS] == [(7, 8)] * len(SESSIONS)


async def test_each_of_those_that_share_a_write_gets_its_own_answer(store: SessionStore) -> None:
    answers = await asyncio.gather(
        append(store, SESSIONS[0]),
        append(store, SESSIONS[1], start=5),
        append(store, SESSIONS[2], fence=9),
        append(store, SessionId("nobody")),
        append(store, SESSIONS[3]),
        return_exceptions=True,
    )
    assert [answer if isinstance(answer, int) else type(answer) for answer in answers] == [
        2, LogGap, Fenced, SessionNotFound, 2,
    ]  # fmt: skip


async def test_a_caller_that_is_cancelled_takes_nobody_with_it(store: SessionStore) -> None:
    tasks = [asyncio.create_task(append(store, session_id)) for session_id in SESSIONS]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    tasks[1].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[:2])
    assert answers[2:] == [2] * (len(SESSIONS) - 2)
    assert await append(store, SESSIONS[0]) == 2


async def test_scripts_that_a_server_has_forgotten_are_sent_to_it_again(
    client: StoreClient, store: SessionStore
) -> None:
    await append(store, SESSIONS[0])
    untyped: Any = client
    await untyped.script_flush()
    assert await asyncio.gather(*(append(store, session_id) for session_id in SESSIONS)) == [2] * len(SESSIONS)


async def test_after_a_reply_that_is_lost_all_that_shared_the_write_ask_again(
    valkey_url: str, tmp_path: Path, store: SessionStore, prefix: str
) -> None:
    assert (await store.read_log(SESSIONS[0])).length == 1
    loser = ReplyLoser(urlsplit(valkey_url).path)
    proxy = await asyncio.start_unix_server(loser.serve, tmp_path / "proxy.sock")
    client = open_client(f"unix://{tmp_path / 'proxy.sock'}")
    beyond = SessionStore(client, prefix=prefix)
    await append(beyond, SESSIONS[0])
    loser.lose_next()
    assert await asyncio.gather(*(append(beyond, session_id) for session_id in SESSIONS)) == [2] * len(SESSIONS)
    assert loser.num_lost == 1
    await client.aclose()
    proxy.close()
    await proxy.wait_closed()
