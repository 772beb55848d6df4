"""The store against a model of it in plain Python, lost tails included."""

import asyncio
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from outrider.ids import Mode, SessionId, TokenClass
from outrider.store.connect import StoreClient, open_client
from outrider.store.errors import Fenced, LeaseHeld, LogConflict, LogGap
from outrider.store.records import Lease, SessionState
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


@dataclass
class Model:
    """What the store must hold, in plain Python."""

    log: list[tuple[int, TokenClass]]
    fence: int = 1
    owner: str = "a"
    held: dict[str, int] = field(default_factory=lambda: {"a": 1})

    def append(self, fence: int, start: int, tokens: list[tuple[int, TokenClass]]) -> int | type[Exception]:
        """Apply an append; return the length, or the error that refuses it."""
        if fence != self.fence:
            return Fenced
        if start > len(self.log):
            return LogGap
        there = self.log[start : start + len(tokens)]
        if there != tokens[: len(there)]:
            return LogConflict
        self.log += tokens[len(there) :]
        return len(self.log)

    def acquire(self, owner: str, force: bool) -> int | type[Exception]:
        """Apply an acquisition; return the fence, or the error that refuses it."""
        if owner != self.owner:
            if self.owner and not force:
                return LeaseHeld
            self.owner, self.fence = owner, self.fence + 1
        self.held[owner] = self.fence
        return self.fence


OWNERS = st.sampled_from(["a", "b", "c"])
TOKENS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(list(TokenClass))), max_size=4)


class StoreAgainstModel(RuleBasedStateMachine):
    """Random owners, appends, repeats and lost tails: the store answers, and holds, what the model says."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.client = open_client(self.url)
        self.store = SessionStore(self.client, prefix=f"test-{secrets.token_hex(4)}")
        self.last: tuple[int, int, list[tuple[int, TokenClass]]] | None = None

    def teardown(self) -> None:
        self.run(self.client.aclose())
        self.loop.close()

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(operation)

    def outcome(self, operation: Coroutine[Any, Any, T]) -> T | type[Exception]:
        try:
            return self.run(operation)
        except (Fenced, LogGap, LogConflict, LeaseHeld) as error:
            return type(error)

    @initialize(tokens=TOKENS)
    def create(self, tokens: list[tuple[int, TokenClass]]) -> None:
        self.model = Model(list(tokens))
        self.run(self.store.create(SESSION, STATE, [t for t, _ in tokens], [c for _, c in tokens], "a", 600.0))

    @rule(owner=OWNERS, force=st.booleans())
    def acquire(self, owner: str, force: bool) -> None:
        found = self.outcome(self.store.acquire_lease(SESSION, owner, 600.0, force))
        assert (found.fence if isinstance(found, Lease) else found) == self.model.acquire(owner, force)

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        fence = self.model.held.get(owner, 0)
        expected = None if fence == self.model.fence else Fenced
        assert self.outcome(self.store.release_lease(SESSION, fence)) == expected
        if expected is None:
            self.model.owner = ""

    @rule(owner=OWNERS, behind=st.sampled_from([0, 0, 0, 1, 2, 5, -1]), tokens=TOKENS)
    def append(self, owner: str, behind: int, tokens: list[tuple[int, TokenClass]]) -> None:
        self.last = (self.model.held.get(owner, 0), max(0, len(self.model.log) - behind), tokens)
        self.send()

    @rule(fence=st.sampled_from([-1, 0, 1]), behind=st.integers(0, 4), tokens=TOKENS)
    def append_with_a_made_up_fence(self, fence: int, behind: int, tokens: list[tuple[int, TokenClass]]) -> None:
        self.last = (self.model.fence + fence, max(0, len(self.model.log) - behind), tokens)
        self.send()

    @rule()
    def send(self) -> None:
        """Send the last append, once more if this is not its first time."""
        if self.last is not None:
            fence, start, tokens = self.last
            operation = self.store.append(SESSION, fence, start, [t for t, _ in tokens], [c for _, c in tokens])
            assert self.outcome(operation) == self.model.append(fence, start, tokens)

    @rule(count=st.integers(1, 6))
    def lose_the_tail(self, count: int) -> None:
        del self.model.log[max(0, len(self.model.log) - count) :]
        self.run(cut_log(self.client, self.store, SESSION, len(self.model.log)))

    @invariant()
    def the_log_is_the_models(self) -> None:
        log = self.run(self.store.read_log(SESSION))
        assert list(zip(log.token_ids, log.classes, strict=True)) == self.model.log
        assert log.length == len(self.model.log)


def test_the_store_agrees_with_a_model_of_it_under_random_owners_retries_and_losses(store_url: str) -> None:
    """Deterministic: the same 40 histories every time."""
    machine = type("Machine", (StoreAgainstModel,), {"url": store_url})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
    )
