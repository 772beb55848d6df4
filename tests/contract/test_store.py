"""The session store's contract, on every server it may run on."""

import asyncio
import random
import secrets
import time
from collections.abc import Coroutine
from dataclasses import fields, replace
from typing import Any

import pytest

from outrider.errors import FailedPrecondition, InvalidRequest, LeaseLost, NotFound, code_of
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, FinishReason, Generation, Mode, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import SamplingParams
from outrider.store.connect import StoreClient
from outrider.store.encoding import decode_state, encode_state
from outrider.store.errors import (
    Fenced,
    LeaseHeld,
    LogConflict,
    LogGap,
    SessionExists,
    SessionNotFound,
    StateUnreadable,
)
from outrider.store.records import KvLocation, Lease, LogSlice, SessionState, SessionStatus
from outrider.store.sessions import MAX_KV_LOCATIONS, PARTS, SessionStore

SESSION = SessionId("s/1 ü")
PROMPT = (7, 0, 4_294_967_295)
STATE = SessionState(model="toy", mode=Mode.GREEDY, prompt_len=3, max_tokens=100)
FULL_STATE = SessionState(
    model="toy-ü",
    mode=Mode.BLOCK,
    prompt_len=3,
    max_tokens=100,
    sampling=SamplingParams(logit_bias=((3, -100.0), (9, 0.1)), temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
    seed=2**63 - 1,
    key=bytes(range(240, 256)),
    sample_index=2,
    num_logprobs=5,
    stop_strings=("\n\n", "ENDE…"),
    stop_ids=(0, 2),
    speculation=SpeculationChoice(gamma=3, window=6),
    drafter_kind="toy",
    prediction=(5, 70_000, 0),
    return_origin=True,
    request_id="r-ü",
    fingerprint="avx512/2 .. 32",
    status=SessionStatus.FINISHED,
    finish_reason=FinishReason.LENGTH,
    verifier_id=WorkerId("v1"),
    draft_id=WorkerId("d1"),
)


async def create(store: SessionStore, state: SessionState = STATE, owner: str = "one", ttl_s: float = 60.0) -> Lease:
    return await store.create(SESSION, state, PROMPT, [TokenClass.PROMPT] * 3, owner, ttl_s)


def decode(count: int) -> list[TokenClass]:
    return [TokenClass.DECODE] * count


# --- create, state ------------------------------------------------------------------------------------------------


async def test_a_created_session_has_its_prompt_its_state_and_a_lease_with_fence_one(store: SessionStore) -> None:
    before = time.time()
    lease = await create(store, FULL_STATE)
    assert (lease.owner, lease.fence) == ("one", 1)
    assert before + 59 < lease.expires_s < time.time() + 61
    assert await store.read_state(SESSION) == FULL_STATE
    log = await store.read_log(SESSION)
    assert (log.token_ids, log.classes, log.length, log.end) == (PROMPT, (TokenClass.PROMPT,) * 3, 3, 3)


async def test_a_session_cannot_be_created_twice(store: SessionStore) -> None:
    await create(store)
    with pytest.raises(SessionExists) as caught:
        await store.create(SESSION, FULL_STATE, [1], [TokenClass.PROMPT], "two", 60.0)
    assert isinstance(caught.value, FailedPrecondition)
    assert (await store.read_log(SESSION)).token_ids == PROMPT
    assert await store.read_state(SESSION) == STATE


async def test_of_many_creators_at_once_exactly_one_wins(store: SessionStore) -> None:
    tries = [create(store, owner=f"owner-{i}") for i in range(10)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(result, Lease) for result in results) == 1
    assert sum(isinstance(result, SessionExists) for result in results) == 9


async def test_an_update_changes_the_named_fields_alone_and_may_be_repeated(store: SessionStore) -> None:
    lease = await create(store, FULL_STATE)
    changes: dict[str, Any] = {
        "status": SessionStatus.RUNNING,
        "finish_reason": None,
        "seed": None,
        "stop_ids": (7,),
    }
    for _ in range(2):
        await store.update_state(SESSION, lease.fence, **changes)
    assert await store.read_state(SESSION) == replace(FULL_STATE, **changes)


async def test_every_field_of_the_state_can_be_updated_and_read_back(store: SessionStore) -> None:
    lease = await create(store)
    for f in fields(SessionState):
        await store.update_state(SESSION, lease.fence, **{f.name: getattr(FULL_STATE, f.name)})
    assert await store.read_state(SESSION) == FULL_STATE


async def test_unknown_fields_are_refused_on_write_and_ignored_on_read(
    client: StoreClient, store: SessionStore
) -> None:
    lease = await create(store, FULL_STATE)
    with pytest.raises(ValueError, match="no field 'colour'"):
        await store.update_state(SESSION, lease.fence, colour="red")
    with pytest.raises(ValueError, match="model cannot hold"):
        await store.update_state(SESSION, lease.fence, model=3)
    raw: Any = client
    await raw.hset(store._keys(SESSION)[0], "colour", "red")
    await raw.hset(store._keys(SESSION)[0], "sampling", b'{"temperature":0.5,"taste":1}')
    assert await store.read_state(SESSION) == replace(FULL_STATE, sampling=SamplingParams(temperature=0.5))


@pytest.mark.parametrize("damage", [{b"model": None}, {b"mode": b"99"}, {b"sampling": b"{"}, {b"stop_ids": b"\xff"}])
def test_a_state_that_cannot_be_read_says_so(damage: dict[bytes, bytes | None]) -> None:
    pairs = encode_state(FULL_STATE)
    raw: dict[bytes, Any] = {str(n).encode(): v for n, v in zip(pairs[::2], pairs[1::2], strict=True)} | damage
    with pytest.raises(StateUnreadable):
        decode_state({name: value for name, value in raw.items() if value is not None})


async def test_an_idle_session_of_a_thousand_tokens_takes_less_than_nine_kilobytes_of_the_servers_memory(
    client: StoreClient, store: SessionStore
) -> None:
    lease = await create(store, FULL_STATE)
    ids = random.Random(1).choices(range(200_000), k=997)
    for start in range(0, 997, 4):
        some = ids[start : start + 4]
        await store.append(SESSION, lease.fence, 3 + start, some, decode(len(some)), b"\x02" * len(some))
    await store.put_kv_location(SESSION, lease.fence, KvLocation(WorkerId("v1"), 999))
    await store.release_lease(SESSION, lease.fence)
    raw: Any = client
    used = [await raw.memory_usage(key) or 0 for key in store._keys(SESSION)]
    assert all(used)
    assert sum(used) < 9_000
    assert (await store.read_log(SESSION)).token_ids == (*PROMPT, *ids)


# --- log ----------------------------------------------------------------------------------------------------------


async def test_appends_lengthen_the_log_and_slices_start_where_asked(store: SessionStore) -> None:
    lease = await create(store)
    assert await store.append(SESSION, lease.fence, 3, [10, 11], decode(2)) == 5
    assert await store.append(SESSION, lease.fence, 5, [12], [TokenClass.PROMPT], bytes([TokenKind.BONUS])) == 6
    log = await store.read_log(SESSION, 4)
    assert (log.start, log.token_ids, log.length) == (4, (11, 12), 6)
    assert log.classes == (TokenClass.DECODE, TokenClass.PROMPT)
    assert log.kinds == bytes([0, TokenKind.BONUS])


async def test_a_slice_past_the_end_is_empty_and_tells_the_length(store: SessionStore) -> None:
    await create(store)
    for start in (3, 4, 1000):
        log = await store.read_log(SESSION, start)
        assert (log.token_ids, log.classes, log.length) == ((), (), 3)


async def test_an_append_without_tokens_changes_nothing(store: SessionStore) -> None:
    lease = await create(store)
    assert await store.append(SESSION, lease.fence, 3, [], []) == 3
    with pytest.raises(LogGap):
        await store.append(SESSION, lease.fence, 4, [], [])


async def test_a_repeated_append_is_accepted_and_written_once(store: SessionStore) -> None:
    lease = await create(store)
    for _ in range(3):
        assert await store.append(SESSION, lease.fence, 3, [10, 11], decode(2), b"\x02\x03") == 5
    await store.append(SESSION, lease.fence, 5, [12], decode(1))
    assert await store.append(SESSION, lease.fence, 3, [10, 11], decode(2)) == 6
    log = await store.read_log(SESSION)
    assert (log.token_ids, log.kinds) == ((*PROMPT, 10, 11, 12), b"\x00\x00\x00\x02\x03\x00")


async def test_of_a_range_that_is_partly_there_only_the_rest_is_written(store: SessionStore) -> None:
    lease = await create(store)
    await store.append(SESSION, lease.fence, 3, [10, 11], decode(2), b"\x02\x02")
    assert await store.append(SESSION, lease.fence, 4, [11, 12], decode(2), b"\x02\x03") == 6
    log = await store.read_log(SESSION, 3)
    assert (log.token_ids, log.kinds) == ((10, 11, 12), b"\x02\x02\x03")


@pytest.mark.parametrize(
    ("start", "ids", "classes"),
    [(3, [10, 99], decode(2)), (3, [10, 11], [TokenClass.DECODE, TokenClass.PROMPT]), (4, [99, 12], decode(2))],
)
async def test_an_append_over_other_tokens_or_classes_is_a_conflict_and_writes_nothing(
    store: SessionStore, start: int, ids: list[int], classes: list[TokenClass]
) -> None:
    lease = await create(store)
    await store.append(SESSION, lease.fence, 3, [10, 11], decode(2))
    before = await store.read_log(SESSION)
    with pytest.raises(LogConflict) as caught:
        await store.append(SESSION, lease.fence, start, ids, classes)
    assert caught.value.length == 5
    assert await store.read_log(SESSION) == before


async def test_a_turn_begins_with_its_prompt_and_its_state_at_once_and_may_be_repeated(store: SessionStore) -> None:
    lease = await create(store, FULL_STATE)
    turn = replace(STATE, prompt_len=5, max_tokens=7)
    for _ in range(2):
        assert await store.begin_turn(SESSION, lease.fence, 3, [10, 11], decode(2), turn) == 5
        assert await store.read_state(SESSION) == turn
        log = await store.read_log(SESSION)
        assert (log.token_ids, log.classes) == ((*PROMPT, 10, 11), (*(TokenClass.PROMPT,) * 3, *decode(2)))
    assert await store.append(SESSION, lease.fence, 5, [12], decode(1), b"\x02") == 6
    assert (await store.read_log(SESSION)).kinds == bytes(5) + b"\x02"


@pytest.mark.parametrize(
    ("start", "fence", "refused"), [(4, 1, LogGap), (2, 1, LogConflict), (3, 0, Fenced), (3, 2, Fenced)]
)
async def test_a_turn_that_is_refused_leaves_neither_prompt_nor_state(
    store: SessionStore, start: int, fence: int, refused: type[Exception]
) -> None:
    await create(store)
    before = await store.read_log(SESSION)
    with pytest.raises(refused):
        await store.begin_turn(SESSION, fence, start, [10, 11], decode(2), replace(STATE, prompt_len=start + 2))
    assert await store.read_state(SESSION) == STATE
    assert await store.read_log(SESSION) == before


async def test_a_turn_is_no_repeat_of_one_that_has_been_answered(store: SessionStore) -> None:
    lease = await create(store)
    turn = replace(STATE, prompt_len=5)
    await store.begin_turn(SESSION, lease.fence, 3, [10, 11], decode(2), turn)
    await store.append(SESSION, lease.fence, 5, [12], decode(1))
    with pytest.raises(LogConflict):
        await store.begin_turn(SESSION, lease.fence, 3, [10, 11], decode(2), turn)
    with pytest.raises(SessionNotFound):
        await store.begin_turn(SessionId("other"), lease.fence, 3, [10], decode(1), turn)
    with pytest.raises(ValueError, match="start"):
        await store.begin_turn(SESSION, lease.fence, -1, [10], decode(1), turn)


@pytest.mark.parametrize(
    ("ids", "classes", "kinds"),
    [([-1], [2], b""), ([2**32], [2], b""), ([1], [9], b""), ([1], [2, 2], b""), ([1], [2], b"\x01\x01")],
)
async def test_an_append_of_impossible_values_is_refused_before_it_is_sent(
    store: SessionStore, ids: list[int], classes: list[int], kinds: bytes
) -> None:
    lease = await create(store)
    with pytest.raises(ValueError):
        await store.append(SESSION, lease.fence, 3, ids, classes, kinds)
    with pytest.raises(ValueError, match="start"):
        await store.append(SESSION, lease.fence, -1, [1], [2])
    with pytest.raises(ValueError, match="start"):
        await store.read_log(SESSION, -1)
    assert (await store.read_log(SESSION)).length == 3


@pytest.mark.parametrize("session_id", ["", "a}b", "{a}"])
async def test_an_id_that_would_spoil_the_hash_tag_is_refused(store: SessionStore, session_id: str) -> None:
    with pytest.raises(InvalidRequest, match="session_id"):
        await store.read_log(SessionId(session_id))


# --- lease --------------------------------------------------------------------------------------------------------


async def test_a_held_lease_is_refused_to_others_and_granted_to_its_owner_with_the_same_fence(
    store: SessionStore,
) -> None:
    await create(store)
    with pytest.raises(LeaseHeld) as caught:
        await store.acquire_lease(SESSION, "two", 60.0)
    assert caught.value.owner == "one"
    assert (await store.acquire_lease(SESSION, "one", 60.0)).fence == 1
    assert (await store.acquire_lease(SESSION, "one", 60.0, force=True)).fence == 1


async def test_a_forced_lease_fences_the_old_owner_out_of_every_write(store: SessionStore) -> None:
    old = await create(store)
    new = await store.acquire_lease(SESSION, "two", 60.0, force=True)
    assert new.fence > old.fence
    writes: list[Coroutine[Any, Any, object]] = [
        store.append(SESSION, old.fence, 3, [1], decode(1)),
        store.update_state(SESSION, old.fence, status=SessionStatus.FINISHED),
        store.put_kv_location(SESSION, old.fence, KvLocation(WorkerId("v"), 3)),
        store.renew_lease(SESSION, old.fence, 60.0),
        store.release_lease(SESSION, old.fence),
        store.delete(SESSION, old.fence),
    ]
    for write in writes:
        with pytest.raises(Fenced) as caught:
            await write
        assert caught.value.current == new.fence
        assert isinstance(caught.value, LeaseLost)
    assert (await store.read_log(SESSION)).length == 3
    assert await store.read_state(SESSION) == STATE
    assert await store.kv_locations(SESSION) == ()
    assert await store.append(SESSION, new.fence, 3, [1], decode(1)) == 4


async def test_even_a_repeat_of_a_written_range_is_refused_to_a_stale_owner(store: SessionStore) -> None:
    old = await create(store)
    await store.append(SESSION, old.fence, 3, [1], decode(1))
    await store.acquire_lease(SESSION, "two", 60.0, force=True)
    with pytest.raises(Fenced):
        await store.append(SESSION, old.fence, 3, [1], decode(1))


async def test_a_fence_from_the_future_is_refused(store: SessionStore) -> None:
    lease = await create(store)
    with pytest.raises(Fenced):
        await store.append(SESSION, lease.fence + 1, 3, [1], decode(1))


async def test_an_expired_lease_can_be_taken_without_force_and_until_then_still_writes(store: SessionStore) -> None:
    old = await create(store, ttl_s=0.05)
    await asyncio.sleep(0.1)
    assert await store.append(SESSION, old.fence, 3, [1], decode(1)) == 4
    assert (await store.acquire_lease(SESSION, "two", 60.0)).fence > old.fence
    with pytest.raises(Fenced):
        await store.renew_lease(SESSION, old.fence, 60.0)


async def test_a_renewed_lease_does_not_expire(store: SessionStore) -> None:
    lease = await create(store, ttl_s=0.05)
    renewed = await store.renew_lease(SESSION, lease.fence, 60.0)
    assert (renewed.owner, renewed.fence) == ("one", 1)
    assert renewed.expires_s > lease.expires_s + 30
    await asyncio.sleep(0.1)
    with pytest.raises(LeaseHeld):
        await store.acquire_lease(SESSION, "two", 60.0)


async def test_a_released_lease_is_free_for_anyone_under_a_new_fence(store: SessionStore) -> None:
    lease = await create(store)
    for _ in range(2):
        await store.release_lease(SESSION, lease.fence)
    with pytest.raises(Fenced):
        await store.renew_lease(SESSION, lease.fence, 60.0)
    assert (await store.acquire_lease(SESSION, "one", 60.0)).fence > lease.fence


async def test_two_owners_appending_at_once_leave_one_text(store: SessionStore) -> None:
    """Owners take the lease by force in turn and append their own ids; the log must be the acknowledged appends."""
    await create(store)
    acknowledged: dict[int, int] = {}

    async def owner(name: str, token: int) -> None:
        for _ in range(15):
            lease = await store.acquire_lease(SESSION, name, 60.0, force=True)
            try:
                for _ in range(5):
                    start = (await store.read_log(SESSION)).length
                    await store.append(SESSION, lease.fence, start, [token, token], decode(2))
                    for position in (start, start + 1):
                        assert position not in acknowledged
                        acknowledged[position] = token
            except Fenced:
                continue

    await asyncio.gather(owner("one", 101), owner("two", 202))
    log = await store.read_log(SESSION, 3)
    assert set(log.token_ids) == {101, 202}
    assert {3 + i: token for i, token in enumerate(log.token_ids)} == acknowledged


# --- what a failover lost -----------------------------------------------------------------------------------------

MIRROR = LogSlice(0, (*PROMPT, 10, 11), (*(TokenClass.PROMPT,) * 3, *decode(2)), 5, b"\x00\x00\x00\x02\x03")


async def test_a_create_whose_reply_was_lost_may_be_repeated_by_its_owner_alone(store: SessionStore) -> None:
    lease = await create(store, FULL_STATE)
    again = await create(store, FULL_STATE)
    assert (again.owner, again.fence) == (lease.owner, lease.fence)
    with pytest.raises(SessionExists):
        await create(store, FULL_STATE, owner="two")
    lease = await store.acquire_lease(SESSION, "two", 60.0, force=True)
    with pytest.raises(SessionExists):
        await create(store, FULL_STATE, owner="two")
    await store.append(SESSION, lease.fence, 3, [1], decode(1))
    with pytest.raises(SessionExists):
        await create(store, FULL_STATE)
    assert (await store.read_log(SESSION)).length == 4


async def test_a_lost_session_is_written_anew_from_its_holders_mirror(client: StoreClient, store: SessionStore) -> None:
    lease = await create(store, FULL_STATE)
    lease = await store.acquire_lease(SESSION, "two", 60.0, force=True)
    raw: Any = client
    for key in store._keys(SESSION):
        await raw.delete(key)
    for _ in range(2):
        assert await store.restore(SESSION, lease, FULL_STATE, MIRROR, 60.0) == 5
        assert await store.read_log(SESSION) == MIRROR
        assert await store.read_state(SESSION) == FULL_STATE
    assert await store.append(SESSION, lease.fence, 5, [12], decode(1)) == 6
    with pytest.raises(LeaseHeld):
        await store.acquire_lease(SESSION, "three", 60.0)
    assert all([await raw.pttl(key) > 0 for key in store._keys(SESSION)[:4]])


async def test_a_lost_grant_and_a_lost_turn_are_restored_unless_another_owner_came_since(
    client: StoreClient, store: SessionStore
) -> None:
    """The store is set back to what a replica knew: an older lease, a shorter log, the state of an earlier turn."""
    await create(store, FULL_STATE)
    ours = await store.acquire_lease(SESSION, "two", 60.0, force=True)
    raw: Any = client
    await raw.hset(store._keys(SESSION)[0], mapping={"lease.fence": 1, "lease.owner": "one"})
    with pytest.raises(Fenced) as caught:
        await store.append(SESSION, ours.fence, 3, [10], decode(1))
    assert caught.value.current < ours.fence
    turn = replace(STATE, prompt_len=5)
    assert await store.restore(SESSION, ours, turn, MIRROR, 60.0) == 5
    assert (await store.read_log(SESSION), await store.read_state(SESSION)) == (MIRROR, turn)
    with pytest.raises(Fenced):
        await store.append(SESSION, 1, 5, [10], decode(1))
    await raw.hset(store._keys(SESSION)[0], mapping={"lease.fence": 1, "lease.owner": "one"})
    theirs = await store.acquire_lease(SESSION, "three", 60.0, force=True)
    assert theirs.fence > ours.fence
    with pytest.raises(Fenced):
        await store.restore(SESSION, ours, turn, MIRROR, 60.0)


async def test_a_session_is_restored_neither_after_its_deletion_nor_over_other_tokens(store: SessionStore) -> None:
    lease = await create(store)
    await store.append(SESSION, lease.fence, 3, [10, 99], decode(2))
    with pytest.raises(LogConflict):
        await store.restore(SESSION, lease, STATE, MIRROR, 60.0)
    with pytest.raises(ValueError, match="whole log"):
        await store.restore(SESSION, lease, STATE, replace(MIRROR, start=1), 60.0)
    assert await store.delete(SESSION)
    with pytest.raises(SessionNotFound):
        await store.restore(SESSION, lease, STATE, MIRROR, 60.0)
    with pytest.raises(SessionNotFound):
        await store.acquire_lease(SESSION, "two", 60.0, force=True)


# --- KV directory, deletion, time to live -------------------------------------------------------------------------


async def test_the_kv_directory_tells_who_holds_how_much_since_when(store: SessionStore) -> None:
    lease = await create(store)
    epoch = Epoch(Generation(1, 2), 3)
    await store.put_kv_location(SESSION, lease.fence, KvLocation(WorkerId("v 1"), 2, epoch))
    await store.put_kv_location(SESSION, lease.fence, KvLocation(WorkerId("v2"), 3))
    first, second = await store.kv_locations(SESSION)
    assert (first.worker_id, first.prefix_len, first.epoch) == ("v2", 3, Epoch())
    assert (second.worker_id, second.prefix_len, second.epoch) == ("v 1", 2, epoch)
    assert abs(second.last_used_s - time.time()) < 60
    await store.put_kv_location(SESSION, lease.fence, KvLocation(WorkerId("v2"), 0))
    assert [location.worker_id for location in await store.kv_locations(SESSION)] == ["v 1"]


async def test_a_deleted_session_leaves_nothing_but_a_mark_for_a_while_and_deleting_again_is_harmless(
    client: StoreClient, store: SessionStore
) -> None:
    lease = await create(store)
    await store.append(SESSION, lease.fence, 3, [1], decode(1), b"\x01")
    await store.put_kv_location(SESSION, lease.fence, KvLocation(WorkerId("v"), 3))
    assert await store.delete(SESSION)
    assert not await store.delete(SESSION)
    raw: Any = client
    mark, *others = store._keys(SESSION)
    assert [await raw.exists(key) for key in others] == [0] * (len(PARTS) - 1)
    assert await raw.hgetall(mark) == {b"deleted": b"1"}
    assert 0 < await raw.pttl(mark) <= 3_600_000
    for reading in (store.read_log(SESSION), store.read_state(SESSION), store.kv_locations(SESSION)):
        with pytest.raises(SessionNotFound):
            await reading
    assert (await create(store)).fence == 1
    assert (await store.read_log(SESSION)).token_ids == PROMPT
    assert not await raw.hexists(mark, "deleted")


async def test_of_many_workers_the_kv_directory_keeps_those_used_last(store: SessionStore) -> None:
    lease = await create(store)
    for number in range(MAX_KV_LOCATIONS + 3):
        await store.put_kv_location(SESSION, lease.fence, KvLocation(WorkerId(f"v{number}"), 3))
        await asyncio.sleep(0.002)
    await store.put_kv_location(SESSION, lease.fence, KvLocation(WorkerId("v3"), 3))
    kept = {location.worker_id for location in await store.kv_locations(SESSION)}
    assert kept == {f"v{number}" for number in range(3, MAX_KV_LOCATIONS + 3)}


async def test_every_operation_on_an_unknown_session_says_not_found(store: SessionStore) -> None:
    operations: list[Coroutine[Any, Any, object]] = [
        store.acquire_lease(SESSION, "one", 1.0),
        store.renew_lease(SESSION, 1, 1.0),
        store.release_lease(SESSION, 1),
        store.append(SESSION, 1, 0, [1], decode(1)),
        store.read_log(SESSION),
        store.read_state(SESSION),
        store.update_state(SESSION, 1, status=SessionStatus.FINISHED),
        store.put_kv_location(SESSION, 1, KvLocation(WorkerId("v"), 3)),
        store.kv_locations(SESSION),
    ]
    for operation in operations:
        with pytest.raises(SessionNotFound) as caught:
            await operation
        assert code_of(caught.value) == code_of(NotFound(""))


async def test_a_session_expires_whole_after_its_last_change_and_not_before(client: StoreClient) -> None:
    store = SessionStore(client, session_ttl_s=1.5, prefix=f"test-{secrets.token_hex(4)}")
    lease = await create(store)
    for position in range(3, 7):
        await asyncio.sleep(0.45)
        await store.append(SESSION, lease.fence, position, [position], decode(1), b"\x01")
    await store.put_kv_location(SESSION, lease.fence, KvLocation(WorkerId("v"), 3))
    raw: Any = client
    assert all([0 < await raw.pttl(key) <= 1500 for key in store._keys(SESSION)])
    await asyncio.sleep(1.7)
    with pytest.raises(SessionNotFound):
        await store.read_log(SESSION)
    assert [await raw.exists(key) for key in store._keys(SESSION)] == [0] * len(PARTS)
    assert (await create(store)).fence == 1
