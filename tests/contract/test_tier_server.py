"""The tier's commands on real servers: Valkey and Redis."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis import Redis

from outrider.store.embedded import EmbeddedServer
from outrider.tier.server import BlockServer, TierError
from tests.contract.servers import REDIS, program

TTL_S = 30.0


@pytest.fixture(scope="module", params=["valkey", pytest.param("redis", marks=REDIS)])
async def tier_url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    async with EmbeddedServer(program=program(request.param)) as server:
        yield server.url


@pytest.fixture
def namespace() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def admin(tier_url: str) -> Iterator[Any]:
    client = Redis.from_url(tier_url)
    yield client
    client.close()


@pytest.fixture
def server(tier_url: str, namespace: str) -> Iterator[BlockServer]:
    opened = BlockServer(tier_url, namespace, ttl_s=TTL_S, max_blocks=4, timeout_s=30.0)
    yield opened
    opened.close()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def blob(number: int, length: int = 100) -> memoryview:
    return memoryview(bytearray([number] * length))


def test_what_was_put_is_returned_in_the_order_asked_for(server: BlockServer) -> None:
    server.put(key(1), blob(1))
    server.put(key(2), blob(2, 2_000_000))
    assert server.get([key(2), key(3), key(1)]) == [bytes(blob(2, 2_000_000)), None, bytes(blob(1))]


def test_no_more_blocks_are_kept_than_the_budget_holds_and_the_oldest_go_first(
    server: BlockServer, admin: Any, namespace: str
) -> None:
    assert [server.put(key(number), blob(number)) for number in range(6)] == [0, 0, 0, 0, 1, 1]
    assert [found is not None for found in server.get([key(number) for number in range(6)])] == [False] * 2 + [True] * 4
    assert admin.zcard(f"outrider:kv:{{{namespace}}}:index") == 4
    assert len(admin.keys(f"outrider:kv:{{{namespace}}}:*")) == 5, "the blocks and the index"


def test_putting_a_block_again_takes_no_further_room(server: BlockServer) -> None:
    for _ in range(3):
        assert [server.put(key(number), blob(number)) for number in range(4)] == [0] * 4
    assert all(server.get([key(number) for number in range(4)]))


def test_touching_says_what_is_there_and_a_texts_first_block_goes_last(server: BlockServer) -> None:
    for number in range(4):
        server.put(key(number), blob(number))
    assert server.touch([key(0), key(1), key(9)]) == [True, True, False]
    time.sleep(0.01)  # their times differ by milliseconds
    server.put(key(5), blob(5))
    server.put(key(6), blob(6))
    server.put(key(7), blob(7))
    assert [found is not None for found in server.get([key(number) for number in range(4)])] == [
        True, False, False, False,
    ]  # fmt: skip


def test_blocks_expire_unless_they_are_touched_and_expired_ones_take_no_room(tier_url: str, namespace: str) -> None:
    short = BlockServer(tier_url, namespace, ttl_s=1.0, max_blocks=4, timeout_s=30.0)
    for number in range(4):
        short.put(key(number), blob(number))
    for _ in range(4):
        time.sleep(0.3)
        assert short.touch([key(0)]) == [True]
    assert [found is not None for found in short.get([key(0), key(1)])] == [True, False]
    assert [short.put(key(number), blob(number)) for number in (5, 6, 7)] == [0, 0, 0], "three have expired"
    assert short.get([key(0)]) != [None]
    time.sleep(1.1)
    assert short.get([key(0), key(5)]) == [None, None]
    short.close()


def test_everything_of_a_namespace_is_gone_a_ttl_after_its_last_use(tier_url: str, namespace: str, admin: Any) -> None:
    short = BlockServer(tier_url, namespace, ttl_s=0.1, max_blocks=4, timeout_s=30.0)
    short.put(key(1), blob(1))
    time.sleep(0.2)
    assert admin.keys(f"outrider:kv:{{{namespace}}}:*") == []
    short.close()


def test_a_dropped_block_is_gone_and_takes_no_room(server: BlockServer) -> None:
    for number in range(4):
        server.put(key(number), blob(number))
    server.drop(key(2))
    server.drop(key(2))
    assert server.get([key(2)]) == [None]
    assert server.put(key(5), blob(5)) == 0


def test_namespaces_do_not_see_each_other(server: BlockServer, tier_url: str) -> None:
    other = BlockServer(tier_url, secrets.token_hex(8), ttl_s=TTL_S, max_blocks=4, timeout_s=30.0)
    server.put(key(1), blob(1))
    assert other.get([key(1)]) == [None]
    other.close()


def test_a_server_that_lost_its_scripts_and_data_is_served_on(server: BlockServer, admin: Any) -> None:
    server.put(key(1), blob(1))
    admin.flushall()
    admin.script_flush()
    assert server.touch([key(1)]) == [False]
    server.put(key(1), blob(1))
    assert server.get([key(1)]) == [bytes(blob(1))]


def test_a_full_server_says_so_and_others_are_unreachable(admin: Any, server: BlockServer, namespace: str) -> None:
    server.put(key(1), blob(1))
    admin.config_set("maxmemory", "1")
    try:
        with pytest.raises(TierError) as caught:
            server.put(key(2), blob(2))
        assert caught.value.reason == "full"
        assert server.get([key(1)]) == [bytes(blob(1))], "what is there can still be read"
    finally:
        admin.config_set("maxmemory", "0")
    nowhere = BlockServer("unix:///nowhere/at/all.sock", namespace, ttl_s=TTL_S, max_blocks=4, timeout_s=30.0)
    with pytest.raises(TierError) as caught:
        nowhere.get([key(1)])
    assert caught.value.reason == "unreachable"
