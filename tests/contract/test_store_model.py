"""The store against a model of it in plain Python, lost tails included."""

import asyncio
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.ids import Mode, SessionId, TokenClass, WorkerId
from outrider.store.connect import StoreClient, open_client
from outrider.store.errors import Fenced, LeaseHeld, LogConflict, LogGap, SessionExists, SessionNotFound
from outrider.store.records import KvLocation, Lease, LogSlice, SessionState
from outrider.store.sessions import SessionStore

T = TypeVar("T")

SESSION = SessionId("s")
PROMPT = (7, 0, 4_294_967_295)
STATE = SessionState(model="toy", mode=Mode.GREEDY, prompt_len=3, max_tokens=100)


async def create(store: SessionStore) -> Lease:
    return await store.create(SESSION, STATE, PROMPT, [TokenClass.PROMPT] * 3, "one", 60.0)


def decode(count: int) -> list[TokenClass]:
    return [TokenClass.DECODE] * count


async def cut_log(client: StoreClient, store: SessionStore, session_id: SessionId, length: int) -> None:
    """Shorten a log behind the store's back, as a failover to a replica that lagged does."""
    raw: Any = client
    _, log, classes, kinds, _ = store._keys(session_id)
    for key, width in ((log, 4), (classes, 1), (kinds, 1)):
        kept = (await raw.getrange(key, 0, length * width - 1)) if length else b""
        await raw.set(key, kept, keepttl=True)


async def test_a_lost_tail_is_noticed_and_appended_again_from_the_mirror(
    client: StoreClient, store: SessionStore
) -> None:
    lease = await create(store)
    mirror = [*PROMPT, *range(20, 30)]
    await store.append(SESSION, lease.fence, 3, mirror[3:], decode(10), b"\x01" * 10)
    await cut_log(client, store, SESSION, 6)
    with pytest.raises(LogGap) as caught:
        await store.append(SESSION, lease.fence, 13, [30], decode(1), b"\x01")
    length = caught.value.length
    assert length == 6
    again = [*mirror[length:], 30]
    assert await store.append(SESSION, lease.fence, length, again, decode(len(again)), b"\x01" * len(again)) == 14
    log = await store.read_log(SESSION)
    assert log.token_ids == (*mirror, 30)
    assert log.kinds == b"\x00" * 3 + b"\x01" * 11


Tokens = list[tuple[int, TokenClass]]
REFUSALS = (Fenced, LogGap, LogConflict, LeaseHeld, SessionNotFound, SessionExists)
Refusal = type[Exception]


@dataclass
class Model:
    """What the store must hold of one session, in plain Python."""

    log: Tokens
    state: SessionState = STATE
    fence: int = 1
    owner: str = "a"
    kv: dict[str, int] = field(default_factory=dict)

    def fitting(self, start: int, tokens: Tokens) -> Refusal | None:
        """Return what refuses tokens at a place; None if they continue the log, or are there."""
        if start > len(self.log):
            return LogGap
        there = self.log[start : start + len(tokens)]
        return LogConflict if there != tokens[: len(there)] else None

    def append(self, start: int, tokens: Tokens) -> int | Refusal:
        """Apply an append; return the length, or the error that refuses it."""
        refused = self.fitting(start, tokens)
        if refused is None:
            self.log += tokens[len(self.log) - start :]
        return refused or len(self.log)

    def begin_turn(self, start: int, tokens: Tokens, state: SessionState) -> int | Refusal:
        """Apply a turn's beginning: at the end of the log, or the same again."""
        if start > len(self.log):
            return LogGap
        if start < len(self.log) and self.log[start:] != tokens:
            return LogConflict
        self.log[start:], self.state = tokens, state
        return len(self.log)


OWNERS = st.sampled_from(["a", "b", "c"])
WHO = st.sampled_from(["now", "now", "now", "now", "a", "b", "c"])
"""Whose number a call carries: mostly the present owner's."""
WORKERS = st.sampled_from(["v1", "v2"])
BEHIND = st.sampled_from([0, 0, 0, 1, 2, 5, -1])
TOKENS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(list(TokenClass))), max_size=4)
STATES = st.builds(replace, st.just(STATE), max_tokens=st.integers(1, 5), stop_strings=st.sampled_from([(), ("x",)]))


class StoreAgainstModel(RuleBasedStateMachine):
    """Random owners, turns, repeats, losses, deletions, expiries: the store answers, and holds, what the model says.

    `model` is None while there is no session; `grants` are the numbers that each owner was given last.
    """

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.client = open_client(self.url)
        self.store = SessionStore(self.client, prefix=f"test-{secrets.token_hex(4)}")
        self.model: Model | None = None
        self.deleted = False
        self.grants: dict[str, int] = {}
        self.last: tuple[int, int, Tokens] | None = None

    def teardown(self) -> None:
        self.run(self.client.aclose())
        self.loop.close()

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(operation)

    def outcome(self, operation: Coroutine[Any, Any, T]) -> T | Refusal:
        try:
            return self.run(operation)
        except REFUSALS as error:
            return type(error)

    def number(self, owner: str) -> int:
        """Return the number that an owner was given last; 0 if none was."""
        if owner == "now" and self.model is not None:
            return self.model.fence
        return self.grants.get(owner, 0)

    def refusal(self, fence: int) -> Refusal | None:
        """Return what refuses an owner's number, whatever it wants."""
        if self.model is None:
            return SessionNotFound
        return None if fence == self.model.fence else Fenced

    @initialize(tokens=TOKENS)
    def first(self, tokens: Tokens) -> None:
        self.create("a", tokens)

    @rule(owner=OWNERS, tokens=TOKENS)
    def create(self, owner: str, tokens: Tokens) -> None:
        ids, classes = [t for t, _ in tokens], [c for _, c in tokens]
        found = self.outcome(self.store.create(SESSION, STATE, ids, classes, owner, 600.0))
        model = self.model
        if model is None:
            self.model, self.deleted = Model(list(tokens), owner=owner), False
            assert isinstance(found, Lease)
        else:
            repeated = (model.owner, model.fence, model.log) == (owner, 1, tokens)
            assert (found is SessionExists) != repeated
        if isinstance(found, Lease):
            assert found.fence == 1
            self.grants[owner] = 1

    @rule(owner=OWNERS, force=st.booleans())
    def acquire(self, owner: str, force: bool) -> None:
        found = self.outcome(self.store.acquire_lease(SESSION, owner, 600.0, force))
        if self.model is None:
            assert found is SessionNotFound
        elif owner != self.model.owner and self.model.owner and not force:
            assert found is LeaseHeld
        else:
            assert isinstance(found, Lease)
            if owner == self.model.owner:
                assert found.fence == self.model.fence
            else:
                assert found.fence > max(self.model.fence, *self.grants.values())
            self.model.owner, self.model.fence = owner, found.fence
            self.grants[owner] = found.fence

    @rule(owner=WHO)
    def renew(self, owner: str) -> None:
        refused = self.refusal(self.number(owner))
        found = self.outcome(self.store.renew_lease(SESSION, self.number(owner), 600.0))
        if self.model is not None and refused is None:
            refused = None if self.model.owner else Fenced
        assert (None if isinstance(found, Lease) else found) == refused

    @rule(owner=WHO)
    def release(self, owner: str) -> None:
        fence = self.number(owner)
        assert self.outcome(self.store.release_lease(SESSION, fence)) == self.refusal(fence)
        if self.model is not None and self.refusal(fence) is None:
            self.model.owner = ""

    @rule(owner=WHO, behind=BEHIND, tokens=TOKENS)
    def append(self, owner: str, behind: int, tokens: Tokens) -> None:
        self.last = (self.number(owner), self.place(behind), tokens)
        self.send()

    @rule(fence=st.sampled_from([-1, 0, 1]), behind=st.integers(0, 4), tokens=TOKENS)
    def append_with_a_made_up_fence(self, fence: int, behind: int, tokens: Tokens) -> None:
        self.last = ((self.model.fence if self.model else 5) + fence, self.place(behind), tokens)
        self.send()

    @rule()
    def send(self) -> None:
        """Send the last append, once more if this is not its first time."""
        if self.last is not None:
            fence, start, tokens = self.last
            operation = self.store.append(SESSION, fence, start, [t for t, _ in tokens], [c for _, c in tokens])
            expected = self.refusal(fence)
            if self.model is not None and expected is None:
                assert self.outcome(operation) == self.model.append(start, tokens)
            else:
                assert self.outcome(operation) == expected

    @rule(owner=WHO, behind=BEHIND, tokens=TOKENS, state=STATES)
    def begin_turn(self, owner: str, behind: int, tokens: Tokens, state: SessionState) -> None:
        """Begin a turn, and then the same once more, as after a lost reply."""
        fence, start = self.number(owner), self.place(behind)
        ids, classes = [t for t, _ in tokens], [c for _, c in tokens]
        for _ in range(2):
            found = self.outcome(self.store.begin_turn(SESSION, fence, start, ids, classes, state))
            expected = self.refusal(fence)
            if self.model is not None and expected is None:
                assert found == self.model.begin_turn(start, tokens, state)
            else:
                assert found == expected

    @rule(owner=WHO, seed=st.integers(0, 3))
    def update(self, owner: str, seed: int) -> None:
        fence = self.number(owner)
        assert self.outcome(self.store.update_state(SESSION, fence, seed=seed)) == self.refusal(fence)
        if self.model is not None and self.refusal(fence) is None:
            self.model.state = replace(self.model.state, seed=seed)

    @rule(owner=WHO, worker=WORKERS, length=st.sampled_from([0, 2, 3]))
    def put_kv(self, owner: str, worker: str, length: int) -> None:
        fence = self.number(owner)
        operation = self.store.put_kv_location(SESSION, fence, KvLocation(WorkerId(worker), length))
        assert self.outcome(operation) == self.refusal(fence)
        if self.model is not None and self.refusal(fence) is None:
            self.model.kv[worker] = length

    @rule(owner=WHO, named=st.booleans(), then=st.sampled_from(["create", "create", "restore", "nothing"]))
    def delete(self, owner: str, named: bool, then: str) -> None:
        fence = self.number(owner)
        found = self.outcome(self.store.delete(SESSION, fence if named else None))
        if self.model is None:
            assert found is False
        elif named and fence != self.model.fence:
            assert found is Fenced
        else:
            assert found is True
            self.model, self.deleted = None, True
            if then == "restore":
                self.restore(owner, 0, [], STATE)
            elif then == "create":
                self.create("a", [])

    @precondition(lambda self: self.deleted or (self.model is not None and len(self.model.log) > 2))
    @rule(again=st.sampled_from([True, True, False]))
    def expire(self, again: bool) -> None:
        """Let the time to live of all keys run out; the mark of a deletion is forgotten too."""
        raw: Any = self.client
        for key in self.store._keys(SESSION):
            self.run(raw.pexpire(key, 0))
        self.model, self.deleted = None, False
        if again:
            self.create("a", [])

    @rule(count=st.integers(1, 6))
    def lose_the_tail(self, count: int) -> None:
        if self.model is not None:
            del self.model.log[max(0, len(self.model.log) - count) :]
            self.run(cut_log(self.client, self.store, SESSION, len(self.model.log)))

    @rule(owner=WHO, keep=st.integers(0, 9), more=TOKENS, state=STATES)
    def restore(self, owner: str, keep: int, more: Tokens, state: SessionState) -> None:
        """Write a mirror back: what the log holds, less some, and some more."""
        fence, model = self.number(owner), self.model
        tokens = [*(model.log[:keep] if model else []), *more]
        mirror = LogSlice(0, tuple(t for t, _ in tokens), tuple(c for _, c in tokens), len(tokens))
        found = self.outcome(self.store.restore(SESSION, Lease(owner, fence, 0.0), state, mirror, 600.0))
        if self.deleted:
            assert found is SessionNotFound
        elif model is not None and model.fence > fence:
            assert found is Fenced
        else:
            model = model or Model([])
            expected = model.append(0, tokens)
            assert found == expected
            if expected is not LogConflict:
                model.owner, model.fence, model.state, self.model = owner, fence, state, model

    def place(self, behind: int) -> int:
        """Return a position so far before the log's end."""
        return max(0, (len(self.model.log) if self.model else 0) - behind)

    @invariant()
    def the_store_holds_what_the_model_does(self) -> None:
        if self.model is None:
            assert self.outcome(self.store.read_log(SESSION)) is SessionNotFound
            return
        log, state, locations = self.run(self.everything())
        assert list(zip(log.token_ids, log.classes, strict=True)) == self.model.log
        assert log.length == len(self.model.log)
        assert state == self.model.state
        kv = {location.worker_id: location.prefix_len for location in locations}
        assert kv == {worker: length for worker, length in self.model.kv.items() if length}

    async def everything(self) -> tuple[LogSlice, SessionState, tuple[KvLocation, ...]]:
        """Read all that the store holds of the session."""
        store = self.store
        return await asyncio.gather(store.read_log(SESSION), store.read_state(SESSION), store.kv_locations(SESSION))


def test_the_store_agrees_with_a_model_of_it_under_random_owners_retries_and_losses(store_url: str) -> None:
    """Deterministic: the same histories every time; fewer on clusters, which run the same scripts."""
    machine = type("Machine", (StoreAgainstModel,), {"url": store_url})
    num_histories = 25 if "cluster" in store_url else 100
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=num_histories, stateful_step_count=30, deadline=None, derandomize=True),
    )
