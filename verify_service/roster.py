"""Who is served: admission, the waiting line, take-over by a newer generation, and who gives way when KV runs out.

Older sessions go first: they are admitted first, and lose their KV last. So the oldest always gets on, and whatever
lost its KV is computed again later, with the same bits.
"""

import logging
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass

from outrider.errors import FailedPrecondition, ResourceExhausted
from outrider.ids import Generation, SessionId
from outrider.model.kv import num_blocks_for
from verify_service.inbox import Ticket
from verify_service.residence import Residence
from verify_service.sessions import Session

log = logging.getLogger(__name__)

MAX_REMEMBERED = 65_536
"""Sessions whose generation is remembered after they ended."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is served at once."""

    max_sessions: int = 64
    """Sessions with KV in the pool that run."""
    max_waiting: int = 256
    """Sessions that wait for a place; one more is refused."""
    retry_delay_s: float = 1.0
    """What a refused caller is told to wait."""


class Roster:
    """All open sessions, by ticket and by id; the running ones in the order in which they are to be served."""

    def __init__(self, residence: Residence, limits: Limits, counters: Counter[str]) -> None:
        self._residence = residence
        self._limits = limits
        self._counters = counters
        self._by_ticket: dict[Ticket, Session] = {}
        self._by_id: dict[SessionId, Session] = {}
        self._running: OrderedDict[Ticket, Session] = OrderedDict()
        self._waiting: list[Session] = []
        self._generations: OrderedDict[SessionId, Generation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_ticket)

    @property
    def num_waiting(self) -> int:
        """Sessions without a place."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sessions with a slot."""
        return len(self._running)

    def sessions(self) -> list[Session]:
        """Return all open sessions."""
        return list(self._by_ticket.values())

    def in_turn(self) -> list[Session]:
        """Return the running sessions, the one served longest ago first."""
        return list(self._running.values())

    def served(self, session: Session) -> None:
        """The session had its turn."""
        self._running.move_to_end(session.ticket)

    def by_ticket(self, ticket: Ticket) -> Session | None:
        """Return the session that a stream opened, unless it is over."""
        return self._by_ticket.get(ticket)

    def by_id(self, session_id: SessionId) -> Session | None:
        """Return the open session with this id."""
        return self._by_id.get(session_id)

    # -- opening and ending ----------------------------------------------------------------------------------------

    def enter(self, session: Session) -> list[Session]:
        """Take a new session in; an older stream of the same session is ended. Return who got a slot.

        Raises:
            FailedPrecondition: a higher generation of this session is known.
            ResourceExhausted: the line is full, or the pool could never hold the session.
        """
        opened = session.opened
        known = self._generations.get(opened.session_id)
        if known is not None and opened.generation < known:
            raise FailedPrecondition(f"generation {opened.generation} of {opened.session_id} is older than {known}")
        self.remember(opened.session_id, opened.generation)
        old = self._by_id.get(opened.session_id)
        if old is not None:
            old.send(FailedPrecondition(f"superseded: {opened.session_id} was opened in {opened.generation}"))
            self.leave(old, keep_kv=True)
        if num_blocks_for(len(opened.token_ids)) > self._residence.num_blocks:
            raise ResourceExhausted(f"{len(opened.token_ids)} tokens do not fit into the whole KV pool")
        self._by_ticket[session.ticket] = self._by_id[opened.session_id] = session
        self._waiting.append(session)
        admitted = self.admit()
        if session.slot is None and len(self._waiting) > self._limits.max_waiting:
            self.leave(session, keep_kv=False)
            raise ResourceExhausted(f"{self.num_waiting} sessions are waiting already", self._limits.retry_delay_s)
        return admitted

    def remember(self, session_id: SessionId, generation: Generation) -> None:
        """A generation is known: lower ones are refused from now on."""
        known = self._generations.pop(session_id, generation)
        self._generations[session_id] = max(known, generation)
        if len(self._generations) > MAX_REMEMBERED:
            self._generations.popitem(last=False)

    def leave(self, session: Session, *, keep_kv: bool) -> None:
        """The session is over; idempotent."""
        if session.closed:
            return
        session.closed = True
        self._by_ticket.pop(session.ticket, None)
        if self._by_id.get(session.opened.session_id) is session:
            del self._by_id[session.opened.session_id]
        self._running.pop(session.ticket, None)
        if session in self._waiting:
            self._waiting.remove(session)
        self._residence.move_out(session, keep=keep_kv)
        self._check_balance()

    # -- slots -----------------------------------------------------------------------------------------------------

    def admit(self) -> list[Session]:
        """Give slots to waiting sessions, oldest first, as long as there is room; return who got one."""
        admitted = []
        while self._waiting and self._take_in(self._waiting[0]):
            admitted.append(self._waiting.pop(0))
        return admitted

    def give_way(self, to: Session, busy: Container[Ticket]) -> bool:
        """Take the KV of the youngest session that is younger than `to` and not busy; say whether there was one.

        Args:
            to: who needs room.
            busy: sessions that are part of the pass being planned.
        """
        younger = [ticket for ticket in self._running if ticket > to.ticket and ticket not in busy]
        if not younger:
            return False
        victim = self._running.pop(max(younger))
        self._residence.move_out(victim, keep=True)
        insort(self._waiting, victim, key=lambda session: session.ticket)
        self._counters["preempted"] += 1
        return True

    def _take_in(self, session: Session) -> bool:
        """Give a session a slot if there is room; all that running sessions still have to fill stays reserved.

        How much it needs is known only once it has what others have computed.
        """
        if len(self._running) >= self._limits.max_sessions:
            return False
        reused = self._residence.settle_in(session)
        reserved = sum(missing_blocks(running) for running in self._running.values())
        if self._running and reserved + missing_blocks(session) > self._residence.available_blocks:
            self._residence.move_out(session, keep=True)
            return False
        self._counters["kv_reused_tokens"] += reused
        self._running[session.ticket] = session
        return True

    def _check_balance(self) -> None:
        slots = [session.slot for session in self._running.values() if session.slot is not None]
        if not self._residence.is_balanced(slots):
            self._counters["kv_unbalanced"] += 1
            log.error("KV blocks are lost or owned twice")


def missing_blocks(session: Session) -> int:
    """Return how many blocks a session still needs to hold its tokens, the last of which has not been fed."""
    present = session.slot.length if session.slot is not None else 0
    return num_blocks_for(session.chain.committed_len) - num_blocks_for(present)
