"""Concurrent owners, lost and late messages, stale numbers, restarts: one log explains all that anybody saw."""

import asyncio
import hashlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.ids import SessionId
from outrider.store import connect
from outrider.store.connect import open_client
from outrider.store.sessions import SessionStore
from tests.contract.history import History, violations
from tests.contract.owners import STATE, Mishaps, Owner
from tests.contract.servers import REDIS, Node

KINDS = ["valkey", pytest.param("redis", marks=[REDIS, pytest.mark.slow])]


class Field:
    """Sessions and their owners; `run` lets them fight and returns what each session's history cannot explain."""

    def __init__(self, node: Node, *, seed: int, rate: float, num_sessions: int = 3, num_owners: int = 4) -> None:
        self._node = node
        self._fresh = itertools.count(1)
        self.mishaps = Mishaps(node.port, random.Random(seed), rate)
        self._num_owners = num_owners
        self.histories = {SessionId(f"s{number}"): History() for number in range(num_sessions)}

    async def run(self, seconds: float, faults: Callable[[], Any] | None = None) -> list[str]:
        client = open_client(self._node.url)
        store = SessionStore(client)
        over = asyncio.Event()
        async with self.mishaps.running() as wire:
            for session_id in self.histories:
                await store.release_lease(session_id, (await store.create(session_id, STATE, [], [], "x", 1.0)).fence)
            async with asyncio.TaskGroup() as group:
                for session_id, history in self.histories.items():
                    for _ in range(self._num_owners):
                        group.create_task(Owner(wire.url, session_id, history, self._fresh).run(over))
                await (faults() if faults is not None else asyncio.sleep(seconds))
                over.set()
            await asyncio.sleep(0.6)  # what is still on its way arrives
        found = [
            violation
            for session_id, history in self.histories.items()
            for violation in violations(history, (await store.read_log(session_id)).token_ids)
        ]
        await client.aclose()
        return found

    def has_seen_enough(self) -> bool:
        """Return whether there was enough of all that may go wrong."""
        counts = self.mishaps.counts.values()
        return self.count("append", "refused") > 5 and self.count("acquire", "done") > 10 and min(counts) > 3

    def count(self, kind: str, outcome: str) -> int:
        """Return how many calls of a kind ended so, over all sessions."""
        calls = itertools.chain.from_iterable(history.calls for history in self.histories.values())
        return sum(call.kind == kind and call.outcome == outcome for call in calls)


@pytest.mark.parametrize("kind", KINDS)
async def test_one_log_explains_what_owners_saw_through_losses_late_messages_and_restarts(
    kind: str, tmp_path: Path
) -> None:
    """The file is synced with every write, so that what a killed server has confirmed is there again."""
    node = Node(kind, "--appendfsync", "always", data_dir=tmp_path / "data")

    async def restarts() -> None:
        for wanted in (30, 60, 90):
            async with asyncio.timeout(60.0):
                while field.count("append", "done") < wanted:  # noqa: ASYNC110  (it counts calls of others)
                    await asyncio.sleep(0.05)
                while wanted == 90 and not field.has_seen_enough():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            if wanted < 90:
                await node.kill()
                await node.server.start()

    async with node:
        field = Field(node, seed=3, rate=0.15)
        assert await field.run(0.0, restarts) == []


MISTAKES = {
    "append without a fence": ("append", "if refused then", "if false then"),
    "append at the end, wherever it was meant": ("append", "write_log(tonumber(ARGV[3])", "at_end(tonumber(ARGV[3])"),
    "append over what is there": ("append", "write_log(tonumber(ARGV[3])", "overwrite(tonumber(ARGV[3])"),
    "a lease that keeps its number": ("acquire", "fence = math.max(fence + 1, now_ms())", "fence = fence"),
    "a read of half of the log": ("read_log", "redis.call('GETRANGE', KEYS[2], start * 4, -1)", "half()"),
}
"""Script, what is right in it, and what is wrong."""

LENIENT = """
local function overwrite(start, ids, classes)
  redis.call('SETRANGE', KEYS[2], start * 4, ids)
  redis.call('SETRANGE', KEYS[3], start, classes)
  return nil, redis.call('STRLEN', KEYS[3])
end
local function at_end(start, ids, classes)
  redis.call('APPEND', KEYS[2], ids)
  return nil, redis.call('APPEND', KEYS[3], classes)
end
local function half()
  local ids = redis.call('GET', KEYS[2]) or ''
  return string.sub(ids, 1, 4 * math.floor(#ids / 8))
end
"""


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_planted_mistake_in_a_script_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, right, wrong = MISTAKES[mistake]
    original = connect._script

    def planted(name: str, with_prelude: bool) -> tuple[str, str]:
        text, sha = original(name, with_prelude)
        if name != wanted:
            return text, sha
        assert right in text
        text = LENIENT + text.replace(right, wrong)
        return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    monkeypatch.setattr(connect, "_script", planted)
    for seed in range(3, 23):  # how much happens in so short a time is a matter of the machine
        async with Node("valkey") as node:
            if await Field(node, seed=seed, rate=0.1).run(0.6):
                return
    pytest.fail("nobody has noticed")
