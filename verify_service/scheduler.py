"""Chooses what goes into the next pass.

Decode passes: runs to be tested and single tokens, of all sessions, the one served longest ago first, up to the rows of
the largest row class. Prompt passes: one stretch of missing KV per session. How much of a chain fits is decided by
counts alone, never by what its tokens are.

Nobody waits without bound. A session that holds its KV and has something to feed gets rows within `longest_wait` decode
passes, and commits a token with them: each other session goes first at most once, and a pass that has no row left for
it was full, or too full for a block or a tree, which are never cut. Between two of those passes at most `fill_beside`
stretches of prompt are computed, however many prompts wait. So with n sessions that feed up to w tokens each, two
tokens of one are never further apart than (n - 1) * w // max_rows + 1 passes, or n where it feeds blocks or trees, each
with a stretch beside it. Nothing is promised to a session that gave its KV up for an older one: it goes on when that
one lets it; the oldest never gives way.
"""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import ResourceExhausted
from outrider.ids import TokenClass
from outrider.model.runner import BLOCK_LEN, Feed, KvSlot, ModelInfo
from verify_service.driver import Driver
from verify_service.events import Scheduled, Test
from verify_service.inbox import Ticket
from verify_service.residence import Residence
from verify_service.roster import Roster
from verify_service.sessions import PassFigures, Session
from verify_service.workers import FEATURE_REACH


def longest_wait(num_sessions: int, max_rows: int, most_rows: int, *, whole: bool = False) -> int:
    """Return how many decode passes it takes at most until a session with something to feed has had its rows.

    Args:
        num_sessions: Sessions that hold their KV, itself included.
        max_rows: Rows of the largest pass.
        most_rows: Most rows that one session wants, at most `max_rows`.
        whole: Whether it feeds blocks or trees, which are never cut and may have to wait until they are first in line.
    """
    others = num_sessions - 1
    return others + 1 if whole else others * most_rows // max_rows + 1


LEAST_ROWS = 2
"""Rows that the shortest test of a run takes where no row is held."""


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a pass."""

    session: Session
    feed: Feed
    test: Test | None
    """What the rows are for; None while KV is being filled."""
    start: int
    """Absolute position of the first token fed."""

    @property
    def num_blocks(self) -> int:
        """Blocks that it will take from the pool."""
        return self.feed.slot.growth(len(self.feed.token_ids))

    @property
    def figures(self) -> PassFigures:
        """Where the pass is counted."""
        return self.session.ahead if self.test is not None and self.test.is_ahead else self.session.figures


class Parts:
    """The parts of a pass that is being planned, and what they take; counted as they come, for passes have hundreds."""

    def __init__(self) -> None:
        """Have none."""
        self.works: list[Work] = []
        self.busy: set[Ticket] = set()
        """Sessions that have a part."""
        self.num_blocks = 0
        """Blocks that all parts together will take from the pool."""

    def add(self, work: Work) -> None:
        """Take a part in."""
        self.works.append(work)
        self.busy.add(work.session.ticket)
        self.num_blocks += work.num_blocks

    def count_again(self) -> None:
        """Count blocks anew: a session has left the pool, and blocks that it shared need not be copied any more."""
        self.num_blocks = sum(work.num_blocks for work in self.works)


class Scheduler:
    """Plans passes over the roster's sessions."""

    def __init__(self, roster: Roster, residence: Residence, driver: Driver, info: ModelInfo) -> None:
        self.is_awaiting_kv: Callable[[Session], bool] = lambda _session: False
        """Whether a session's KV is being loaded, so that none of it is to be computed now."""
        self._roster = roster
        self._residence = residence
        self._driver = driver
        self._info = info

    def decode_work(self) -> list[Work]:
        """Return the parts of the next decode pass; empty if no session has anything to feed."""
        parts, rows_left = Parts(), self._info.max_rows
        for session in self._roster.in_turn():
            self._driver.settle(session, flush=False)
            rows = self._offer(session, rows_left, alone=not parts.works) if session.ready else 0
            rows = self._spared(session, rows, parts)
            if not rows or not self._make_room(session, rows, parts):
                continue
            test = self._test(session, rows)
            if test is not None:
                parts.add(self._testing(session, test))
                rows_left -= len(test.feed)
        self._take_turns(parts.works)
        self._add_ahead(parts, rows_left)
        return parts.works

    def _add_ahead(self, parts: Parts, rows_left: int) -> None:
        """Add one row each for sessions that await their drafter, to a pass that runs anyway, or where it is wished.

        Without it a session that starts a new chain beside others misses the pass that begins meanwhile. Alone it would
        wait for its drafter and then for a whole pass; a pass at once costs it nothing if the drafter is quicker.
        """
        runs_anyway = bool(parts.works)
        for session in self._roster.in_turn():
            if rows_left < 1:
                return
            wished = runs_anyway or session.chain.speculation.ahead
            if not (wished and session.ready and session.chain.may_feed_ahead):
                continue
            if not self._make_room(session, 1, parts):
                continue
            test = self._test(session, 1, ahead=True)
            if test is not None:
                parts.add(self._testing(session, test))
                rows_left -= 1

    def fill_work(self, max_stretches: int) -> list[Work]:
        """Return the parts of the next prompt pass: at most `max_stretches` sessions, one stretch of each."""
        parts = Parts()
        for session in self._roster.in_turn():
            if len(parts.works) >= max_stretches:
                break
            if not session.filling or self.is_awaiting_kv(session) or self._complete(session):
                continue
            first, last, token_class = session.fill_range(
                classes_differ=self._info.classes_differ, max_decode=self._info.max_rows
            )
            if self._is_under_way(session, first, last, parts.works):
                continue
            if self._make_room(session, last - first, parts):
                parts.add(self._filling(session, first, last, token_class))
        return self._take_turns(parts.works)

    def _complete(self, session: Session) -> bool:
        """Let a session take over what others have computed meanwhile; say whether it needs nothing more."""
        self._driver.counters["kv_reused_tokens"] += self._residence.take_over(session)
        if not session.filling:
            self._driver.make_ready(session)
        return not session.filling

    def _is_under_way(self, session: Session, first: int, last: int, works: list[Work]) -> bool:
        """Whether another session computes this very block in this pass, so that it can be taken over afterwards."""
        if not self._residence.prefix_reuse or session.scoring is not None:
            return False
        if first % BLOCK_LEN or last - first < BLOCK_LEN:
            return False
        return any(work.start == first and self._is_alike(session, work.session, last) for work in works)

    def _is_alike(self, session: Session, other: Session, length: int) -> bool:
        """Whether two sessions' first tokens leave the same KV."""
        if session.chain.tokens[:length] != other.chain.tokens[:length]:
            return False
        return not self._info.classes_differ or session.classes(length) == other.classes(length)

    def _offer(self, session: Session, rows_left: int, *, alone: bool) -> int:
        """Return how many rows a session may use.

        A block or a tree cannot be cut: it waits for a pass with enough room, or gets one for itself.
        """
        wanted = session.chain.wants_rows
        if session.chain.wants_all_rows:
            return wanted if wanted <= rows_left or alone else 0
        # None are left, or fewer, behind a block or a tree that is larger than a pass.
        return min(wanted, max(0, rows_left))

    def _spared(self, session: Session, rows: int, parts: Parts) -> int:
        """Return how many rows a session gets where more of them would cost another one its KV.

        Drafts are worth a pass's speed, KV that has to be computed again many passes': so a run is cut to the blocks
        that are free, and a block or a tree that cannot be cut takes its chance. Two rows stay, of the unfed token and
        of a draft: with one, nothing could be tested, and sessions that need a block each would wait for one another.
        """
        if rows <= LEAST_ROWS or session.chain.wants_all_rows or self._roster.num_running == 1:
            return rows
        free, slot = self._residence.available_blocks - parts.num_blocks, _slot_of(session)
        fitting = next((num for num in range(rows, LEAST_ROWS, -1) if slot.growth(num) <= free), LEAST_ROWS)
        self._driver.counters["rows_spared_for_kv"] += rows - fitting
        return fitting

    def _test(self, session: Session, rows: int, *, ahead: bool = False) -> Test | None:
        try:
            return self._driver.step(session, Scheduled(rows, ahead))
        except Exception as error:
            self._driver.fail(session, error)
            return None

    def _testing(self, session: Session, test: Test) -> Work:
        slot = _slot_of(session)
        hidden = self._driver.wants_features(session)
        self._driver.touched[session.ticket] = session
        num, best = len(test.feed), session.best_below
        feed = Feed(slot, test.feed, TokenClass.DECODE, num, hidden, best, parents=test.feed_parents)
        return Work(session, feed, test, slot.length)

    def _filling(self, session: Session, first: int, last: int, token_class: TokenClass) -> Work:
        # Of what is computed at once a drafter uses the end only.
        hidden = last > session.chain.kv_len - FEATURE_REACH and self._driver.wants_features(session)
        scored = session.scoring is not None
        token_ids = tuple(session.chain.tokens[first:last])
        rows = len(token_ids) if hidden or scored else 0
        feed = Feed(_slot_of(session), token_ids, token_class, rows, hidden, hidden_only=hidden and not scored)
        return Work(session, feed, None, first)

    def _make_room(self, session: Session, num_tokens: int, parts: Parts) -> bool:
        """Free the blocks that a feed needs, on top of those of the parts chosen already; say whether it succeeded.

        Room is made before a chain hands out a test: a test under way cannot be taken back.
        """
        while self._residence.available_blocks < parts.num_blocks + _slot_of(session).growth(num_tokens):
            if self._roster.give_way(session, parts.busy):
                parts.count_again()
                continue
            if self._roster.num_running == 1:
                self._driver.fail(session, ResourceExhausted("the session has outgrown the whole KV pool"))
            return False
        return True

    def _take_turns(self, works: list[Work]) -> list[Work]:
        for work in works:
            self._roster.served(work.session)
        return works


def _slot_of(session: Session) -> KvSlot:
    if session.slot is None:
        raise ValueError("a waiting session cannot be fed")
    return session.slot
