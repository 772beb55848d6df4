"""Keys and what they use, on every server the store runs on."""

import asyncio
import secrets
import time

import pytest

from outrider.errors import InvalidRequest, LimitReached, NotFound
from outrider.keys import KeyLimits, belongs, make_key
from outrider.store.connect import StoreClient
from outrider.store.keys import KeyStore
from outrider.store.usage import Usage

KEY = "0123456789ab"


@pytest.fixture
def prefix() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
def keys(client: StoreClient, prefix: str) -> KeyStore:
    return KeyStore(client, prefix=prefix)


@pytest.fixture
def usage(client: StoreClient, prefix: str) -> Usage:
    return Usage(client, prefix=prefix)


# --- records --------------------------------------------------------------------------------------------------------


async def test_a_key_is_found_by_its_id_with_its_limits_and_only_its_hash_is_kept(
    keys: KeyStore, client: StoreClient, prefix: str
) -> None:
    key, record = make_key("alice", KeyLimits(requests_per_minute=5), time.time())
    await keys.create(record)
    assert await keys.find(record.key_id) == record
    assert belongs(key, record)
    kept = await client.hgetall(f"{prefix}:{{keys}}:records")
    assert list(kept) == [record.key_id.encode()]
    assert key[-43:] not in repr(kept)


async def test_creating_again_is_the_same_and_another_record_with_the_id_is_refused(keys: KeyStore) -> None:
    _, record = make_key("alice", KeyLimits(), 1.0)
    await keys.create(record)
    await keys.create(record)
    _, other = make_key("bob", KeyLimits(), 1.0)
    with pytest.raises(InvalidRequest, match="key_id"):
        await keys.create(type(other)(record.key_id, "bob", other.sha256, 1.0))
    assert await keys.all() == [record]


async def test_a_revoked_key_stays_revoked_and_keeps_its_first_time(keys: KeyStore) -> None:
    _, record = make_key("alice", KeyLimits(), 1.0)
    await keys.create(record)
    await keys.revoke(record.key_id)
    first = await keys.find(record.key_id)
    await asyncio.sleep(0.01)
    await keys.revoke(record.key_id)
    await keys.create(record)
    again = await keys.find(record.key_id)
    assert first is not None
    assert first.revoked_s == pytest.approx(time.time(), abs=5)
    assert again == first
    assert (await keys.all()) == [first]


async def test_what_is_not_there_is_neither_found_nor_revoked(keys: KeyStore) -> None:
    assert await keys.find(KEY) is None
    assert await keys.all() == []
    with pytest.raises(NotFound, match=KEY):
        await keys.revoke(KEY)


# --- requests -------------------------------------------------------------------------------------------------------


async def test_requests_beyond_a_minutes_worth_are_refused_and_come_back_evenly(usage: Usage) -> None:
    limits = KeyLimits(requests_per_minute=600)  # one comes back in 100 ms
    for _ in range(600):
        await usage.request(KEY, limits)
    with pytest.raises(LimitReached) as refused:
        for _ in range(600):
            await usage.request(KEY, limits)
    assert refused.value.limit == "requests_per_minute"
    assert 0 < refused.value.retry_delay_s <= 0.1
    await asyncio.sleep(refused.value.retry_delay_s + 0.01)
    await usage.request(KEY, limits)


async def test_a_refused_request_costs_nothing_and_keys_do_not_share(usage: Usage) -> None:
    limits = KeyLimits(requests_per_minute=1)
    await usage.request(KEY, limits)
    waits = []
    for _ in range(3):
        with pytest.raises(LimitReached) as refused:
            await usage.request(KEY, limits)
        waits.append(refused.value.retry_delay_s)
    assert 30 < waits[-1] <= waits[0] <= 60
    await usage.request("ba9876543210", limits)


# --- places ---------------------------------------------------------------------------------------------------------


async def test_places_are_limited_and_free_again_when_they_are_left(usage: Usage) -> None:
    limits = KeyLimits(concurrent=2)
    await usage.enter(KEY, limits, "a/1")
    await usage.enter(KEY, limits, "b/1")
    await usage.enter(KEY, limits, "b/1")  # a repeat after a lost reply
    with pytest.raises(LimitReached, match="2 generations at one time") as refused:
        await usage.enter(KEY, limits, "c/1")
    assert refused.value.limit == "concurrent"
    await usage.leave(KEY, limits, "a/1", 0)
    await usage.leave(KEY, limits, "a/1", 0)
    await usage.enter(KEY, limits, "c/1")
    with pytest.raises(LimitReached):
        await usage.enter(KEY, limits, "d/1")


async def test_the_place_of_a_process_that_is_gone_comes_back_and_a_renewed_one_stays(
    client: StoreClient, prefix: str
) -> None:
    usage, limits = Usage(client, prefix=prefix, place_ttl_s=1.0), KeyLimits(concurrent=1)
    await usage.enter(KEY, limits, "a/1")
    for _ in range(4):
        await asyncio.sleep(0.3)
        await usage.renew(KEY, limits, "a/1", 0)
    with pytest.raises(LimitReached):
        await usage.enter(KEY, limits, "b/1")
    await asyncio.sleep(1.1)
    await usage.enter(KEY, limits, "b/1")
    await usage.renew(KEY, limits, "a/1", 0)  # lost is lost
    await usage.leave(KEY, limits, "b/1", 0)
    await usage.enter(KEY, limits, "c/1")


async def test_a_resumed_session_needs_no_second_place_and_opens_no_way_around_the_limit(usage: Usage) -> None:
    limits = KeyLimits(concurrent=1)
    await usage.enter(KEY, limits, "a/1")
    await usage.enter(KEY, limits, "a/2", resuming=True)
    with pytest.raises(LimitReached):
        await usage.enter(KEY, limits, "a/3", resuming=True)
    await usage.leave(KEY, limits, "a/2", 0)
    with pytest.raises(LimitReached):
        await usage.enter(KEY, limits, "b/1")
    with pytest.raises(LimitReached):
        await usage.enter(KEY, limits, "b/2", resuming=True)
    await usage.leave(KEY, limits, "a/1", 0)
    await usage.enter(KEY, limits, "b/3", resuming=True)


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens_per_minute", "tokens_per_day"])
async def test_tokens_are_set_aside_and_the_unused_ones_come_back(usage: Usage, name: str) -> None:
    limits = KeyLimits(**{name: 1000})
    await usage.enter(KEY, limits, "a/1")
    await usage.reserve(KEY, limits, "a/1", 1100)
    await usage.reserve(KEY, limits, "a/1", 1100)  # a repeat after a lost reply
    for attempt in (usage.enter(KEY, limits, "b/1"), usage.reserve(KEY, limits, "b/1", 5)):
        with pytest.raises(LimitReached) as refused:
            await attempt
        assert refused.value.limit == name
        period_s = 60 if name == "tokens_per_minute" else 86_400
        wait_s = period_s * 101 / 1000
        assert wait_s - 4 < refused.value.retry_delay_s <= wait_s + 0.1, "some may have come back meanwhile"
    await usage.leave(KEY, limits, "a/1", 900)
    await usage.enter(KEY, limits, "b/1")


async def test_what_a_lost_process_had_set_aside_and_not_used_comes_back(client: StoreClient, prefix: str) -> None:
    usage, limits = Usage(client, prefix=prefix, place_ttl_s=1.0), KeyLimits(tokens_per_day=1000)
    await usage.enter(KEY, limits, "a/1")
    await usage.reserve(KEY, limits, "a/1", 3000)
    await usage.renew(KEY, limits, "a/1", 2700)
    with pytest.raises(LimitReached):
        await usage.enter(KEY, limits, "b/1")
    await asyncio.sleep(1.1)
    await usage.enter(KEY, limits, "b/1")
    await usage.reserve(KEY, limits, "b/1", 699)
    await usage.enter(KEY, limits, "c/1")
    await usage.reserve(KEY, limits, "c/1", 10)
    with pytest.raises(LimitReached):
        await usage.enter(KEY, limits, "d/1")


async def test_of_several_limits_the_one_with_the_longest_wait_is_named(usage: Usage) -> None:
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=10, tokens_per_day=10)
    await usage.enter(KEY, limits, "a/1")
    await usage.reserve(KEY, limits, "a/1", 20)
    with pytest.raises(LimitReached, match="10 tokens per day") as refused:
        await usage.enter(KEY, limits, "b/1")
    assert refused.value.limit == "tokens_per_day"


async def test_a_lower_limit_holds_at_once_and_counts_vanish_when_all_is_full_again(
    client: StoreClient, usage: Usage, prefix: str
) -> None:
    await usage.request(KEY, KeyLimits(requests_per_minute=1_000_000))
    with pytest.raises(LimitReached):
        for _ in range(4):
            await usage.request(KEY, KeyLimits(requests_per_minute=3))
    left_ms = await client.pttl(f"{prefix}:keys:{{{KEY}}}:buckets")
    assert 0 < left_ms < 180_000
