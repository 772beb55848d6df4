"""Sessions' KV and the tier: what is loaded before it would be computed, and what is stored once it is.

Loaded blocks enter the pool as cached ones, and the session takes them over like any other's. While a session waits for
blocks nothing of it is computed; others go on. A load that is not there in time is given up, and the rest computed.
All of it runs on the engine's thread; the tier has its own.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from outrider.model.runner import BLOCK_LEN, BlockAccess
from outrider.tier.format import HEADER_LEN, empty_blob
from outrider.tier.speeds import Speeds
from outrider.tier.tier import BlockTier, Load
from verify_service.alarms import Alarms
from verify_service.inbox import BlocksArrived, BlocksMissing, InboxEvent, Ticket
from verify_service.sessions import Session

MAX_PENDING = 4096
"""Blocks that are to be stored and have not been copied off yet."""
MIN_PATIENCE_S = 0.02
"""Shortest wait for a load: threads have to take turns, too."""
RETRY_S = 0.02
"""How soon to look again when nothing more could be copied off."""
MIN_REFRESH_S, MAX_REFRESH_S = 0.25, 60.0
"""How often the blocks of running sessions are kept from expiring, whatever the TTL."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Where blocks go and come from, and how long that takes."""

    blocks: BlockTier
    speeds: Speeds


@dataclass(slots=True)
class _Restore:
    """One session that waits for blocks."""

    session: Session
    load: Load
    parent: bytes | None
    """Key of the block before the next one."""
    num_blocks: int
    """How many are missing, of which the load may be only the first."""
    followers: list[Session] = field(default_factory=list)
    """Sessions that need the same first block."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What restoring needs of the engine."""

    alarms: Alarms
    clock: Callable[[], float]
    post: Callable[[InboxEvent], None]
    """Puts an event into the engine's inbox, from any thread."""
    take_over: Callable[[Session], int]
    """Lets a filling session have what the pool knows; returns how many tokens."""
    make_ready: Callable[[Session], None]
    counters: Counter[str]


class Restorer:
    """See the module's head."""

    def __init__(self, access: BlockAccess, tier: Tier, around: Surroundings) -> None:
        """Store from now on what becomes known in the pool.

        Args:
            access: of the pool.
            tier: where blocks go and come from.
            around: the engine.
        """
        self.tier = tier.blocks
        self.speeds = tier.speeds
        self._access = access
        self._around = around
        self._restores: dict[Ticket, _Restore] = {}
        self._leaders: dict[bytes, Ticket] = {}
        """First key of a load -> whose it is."""
        self._following: set[Ticket] = set()
        self._pending: OrderedDict[bytes, None] = OrderedDict()
        access.watch(self._note_known)

    # -- loading ---------------------------------------------------------------------------------------------------

    def is_waiting(self, session: Session) -> bool:
        """Whether a session waits for blocks, so that nothing of it is to be computed now."""
        return session.ticket in self._restores or session.ticket in self._following

    def begin(self, session: Session) -> None:
        """Load what a filling session lacks, if that is faster than computing it."""
        keys, num_held = self._missing_keys(session)
        if not keys:
            return
        if keys[0] in self._leaders:
            self._restores[self._leaders[keys[0]]].followers.append(session)
            self._following.add(session.ticket)
            return
        num_blocks = self.speeds.plan(len(keys), self._around.clock())
        if not num_blocks:
            self.tier.tally.add("skipped", "slower")
            return
        notify = partial(self._around.post, BlocksArrived(session.ticket))
        load = self.tier.load(keys[:num_blocks], notify)
        if load is None:
            return
        parent = self._keys(session)[num_held - 1] if num_held else None
        restore = _Restore(session, load, parent, len(keys))
        self._restores[session.ticket] = restore
        self._leaders[keys[0]] = session.ticket
        wait_s = max(MIN_PATIENCE_S, self.speeds.patience_s(num_blocks, self.tier.settings.deadline_s))
        self._around.alarms.at(self._around.clock() + wait_s, partial(self._give_up, restore))

    def arrived(self, ticket: Ticket) -> None:
        """Something is there for a session, or its load has ended."""
        restore = self._restores.get(ticket)
        if restore is None:
            return
        # Asked first: what arrives between the two is announced once more.
        ended = restore.load.ended.is_set()
        has_room = self._take_in(restore)
        if ended or not has_room or not restore.session.filling:
            if restore.load.num_loaded:
                self.speeds.loaded(restore.load.num_loaded, restore.load.seconds)
            self._finish(restore, go_on=has_room)

    def left(self, session: Session, keep: bool) -> None:
        """The session is about to lose its slot: nothing more is wanted for it; idempotent.

        Args:
            session: any.
            keep: whether its blocks are worth keeping.
        """
        if session.ready and keep:
            self.refresh(session)
        restore = self._restores.get(session.ticket)
        self._following.discard(session.ticket)
        if restore is not None:
            restore.load.cancelled.set()
            self._remove(restore)
            self._release(restore)

    def _take_in(self, restore: _Restore) -> bool:
        """Put what has arrived into the pool and give it to the session; False if the pool has no room."""
        has_room = True
        while has_room and (arrived := restore.load.take()) is not None:
            key, data = arrived
            has_room = self._access.adopt(key, restore.parent, data)
            restore.parent = key
            # At once: a cached block may be given up for the next one.
            self._around.counters["kv_restored_tokens"] += self._around.take_over(restore.session)
        return has_room

    def _finish(self, restore: _Restore, *, go_on: bool) -> None:
        """A load is over: the session is ready, loads on (if this was only to find out), or computes the rest."""
        load, session = restore.load, restore.session
        load.cancelled.set()
        self._remove(restore)
        complete = load.num_loaded == len(load.keys) < restore.num_blocks
        if not session.filling:
            self._around.make_ready(session)
        elif go_on and complete:
            self.begin(session)
        self._release(restore)

    def _release(self, restore: _Restore) -> None:
        """Let those who waited for the same blocks take them over, and load what they still lack."""
        for follower in restore.followers:
            if follower.ticket not in self._following:
                continue
            self._following.discard(follower.ticket)
            self._around.counters["kv_reused_tokens"] += self._around.take_over(follower)
            if follower.filling:
                self.begin(follower)
            else:
                self._around.make_ready(follower)

    def _give_up(self, restore: _Restore) -> None:
        if self._restores.get(restore.session.ticket) is not restore:
            return
        if restore.load.ended.is_set():
            self.arrived(restore.session.ticket)
            return
        self.tier.give_up(restore.load)
        self._take_in(restore)
        self.speeds.loaded(restore.load.num_loaded, time.perf_counter() - restore.load.asked_s)
        self._finish(restore, go_on=False)

    def _remove(self, restore: _Restore) -> None:
        self._restores.pop(restore.session.ticket, None)
        first = restore.load.keys[0]
        if self._leaders.get(first) == restore.session.ticket:
            del self._leaders[first]

    def _keys(self, session: Session) -> list[bytes]:
        length = session.chain.kv_len
        return self._access.keys(session.chain.tokens[:length], session.classes(length))

    def _missing_keys(self, session: Session) -> tuple[list[bytes], int]:
        """Return the keys of the full blocks that a session lacks, and how many blocks it has."""
        if session.slot is None or session.slot.length % BLOCK_LEN:
            return [], 0
        num_held = session.slot.length // BLOCK_LEN
        return self._keys(session)[num_held:], num_held

    # -- storing ---------------------------------------------------------------------------------------------------

    def store_one(self) -> bool:
        """Copy one block off, to be stored; say whether there may be more to do at once."""
        if not self._pending:
            return False
        if not self.tier.can_store:
            self.tier.tally.add("dropped", "breaker", len(self._pending))
            self._pending.clear()
            return False
        if not self.tier.has_room:
            self._around.alarms.at(self._around.clock() + RETRY_S, lambda: None)
            return False
        key, _ = self._pending.popitem(last=False)
        blob = empty_blob(self.tier.identity)
        if self._access.read(key, memoryview(blob)[HEADER_LEN:]):
            self.tier.store(key, blob)
        else:
            self.tier.tally.add("dropped", "gone")
        return True

    def refresh(self, session: Session) -> None:
        """Keep the stored blocks of a session from expiring; those that have gone missing are stored again."""
        keys = [key for key in self._keys(session) if key not in self._pending]
        if keys and self.tier.can_store:
            self.tier.refresh(keys, lambda missing: self._around.post(BlocksMissing(tuple(missing))))

    @property
    def refresh_s(self) -> float:
        """How often running sessions are to be refreshed."""
        return min(MAX_REFRESH_S, max(MIN_REFRESH_S, self.tier.settings.ttl_s / 4))

    def missing(self, keys: tuple[bytes, ...]) -> None:
        """Blocks of sessions are not stored (any more)."""
        for key in keys:
            self._note_known(key)

    def _note_known(self, key: bytes) -> None:
        self._pending[key] = None
        if len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)
            self.tier.tally.add("dropped", "queue_full")
