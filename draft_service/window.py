"""The drafter's window of one session: how far it may guess, and where it starts again.

A state machine without I/O, clock, randomness or numbers: events in, commands out. The worker carries the commands
out: `Begin` asks the drafter how many tokens it will offer and is answered by `Planned` before anything is drawn;
`Draw` asks for tokens and is answered by `Drawn`, one or several at a time, under the ticket it was given.

What it decides: when a proposal starts and how long it is, what of the chain survives a commit, when to say that
nothing will come. What it may not do: let a drawn token change the length or the moment of a proposal (non-
anticipation).

Invariants:

* `ids` is the committed text followed by the chain of the current epoch; the chain never passes `limit`;
* a proposal starts where the last one ended; it belongs to one epoch, or is abandoned unsent;
* nothing is proposed between a `Pass` and the next commit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from draft_service.events import AskFrom, Begin, Command, Count, Draw, Drawn, Event, Planned, Rewind, Scheduled, Send
from outrider.errors import ProtocolError
from outrider.ids import Epoch, SessionId
from outrider.messages import DraftCommit, DraftOpen, Pass, Proposal, ProposalHeader, SparseRow

FOREVER = 2**31 - 1
"""`until_len` of a drafter that will never propose again in this session."""


@dataclass(slots=True)
class _Draft:
    """A proposal that is being drawn."""

    ticket: int
    base_len: int
    count: int
    rows: list[SparseRow] = field(default_factory=list)


class Window:
    """State of one session on the draft worker; see the module's head."""

    def __init__(self, opened: DraftOpen) -> None:
        """Start with everything in `opened.token_ids` committed and an empty chain."""
        self.session_id: SessionId = opened.session_id
        self.epoch: Epoch = opened.epoch
        self.ids: list[int] = list(opened.token_ids)
        """Committed ids, then the chain."""
        self.seen_len = len(self.ids)
        self.speculation = opened.speculation
        self.max_len = opened.max_len or FOREVER
        self._needs_rows = opened.mode.needs_rows
        self._restarting = True
        self._passed = False
        self._tickets = 0
        self._draft: _Draft | None = None

    @property
    def limit(self) -> int:
        """Position the chain may reach before another commit."""
        return min(self.seen_len + self.speculation.window, self.max_len)

    @property
    def room(self) -> int:
        """Tokens that may still be drawn before another commit."""
        return max(0, self.limit - len(self.ids))

    @property
    def wants_time(self) -> bool:
        """Whether `Scheduled` would lead to anything."""
        exhausted = len(self.ids) >= self.max_len
        return self._draft is None and not self._passed and self.speculation.enabled and (self.room > 0 or exhausted)

    def step(self, event: Event) -> list[Command]:
        """Take one event; return what must be done, in order.

        Raises:
            ProtocolError: a commit contradicts the chain it confirms, or the worker drew more than it was asked for.
        """
        out: list[Command] = []
        match event:
            case Scheduled():
                if self.wants_time:
                    self._begin(out)
            case Planned():
                self._planned(event, out)
            case Drawn():
                self._drawn(event, out)
            case DraftCommit():
                self._committed(event, out)
            case _:
                assert_never(event)
        return out

    # -- proposing -------------------------------------------------------------------------------------------------

    def _begin(self, out: list[Command]) -> None:
        if self.room == 0:
            self._pass(FOREVER, out)
            return
        gamma = self.speculation.restart_gamma if self._restarting else self.speculation.gamma
        self._tickets += 1
        self._draft = _Draft(self._tickets, len(self.ids), min(gamma, self.room))
        out.append(Begin(self._tickets, len(self.ids), self._draft.count))

    def _pass(self, until_len: int, out: list[Command]) -> None:
        self._passed = True
        out.append(Send(Pass(self.session_id, self.epoch, len(self.ids), until_len)))

    def _planned(self, event: Planned, out: list[Command]) -> None:
        """The length is fixed, and announced where lateness must not depend on tokens, before the first draw."""
        draft = self._draft
        if draft is None or draft.ticket != event.ticket:
            return
        if event.count == 0:
            self._draft = None
            self._pass(max(event.until_len, draft.base_len + 1), out)
            return
        if not 0 < event.count <= draft.count:
            raise ProtocolError(f"{event.count} tokens planned, up to {draft.count} asked for")
        draft.count = event.count
        self._restarting = False
        if self._needs_rows:
            out.append(Send(ProposalHeader(self.session_id, self.epoch, draft.base_len, draft.count)))
        out.append(Draw(draft.ticket, draft.count))

    def _drawn(self, event: Drawn, out: list[Command]) -> None:
        draft = self._draft
        if draft is None or draft.ticket != event.ticket:
            out.append(Count("discarded", len(event.token_ids)))
            return
        self.ids.extend(event.token_ids)
        draft.rows.extend(event.rows)
        drawn = len(self.ids) - draft.base_len
        if drawn > draft.count or (self._needs_rows and len(draft.rows) != drawn):
            raise ProtocolError(f"{drawn} tokens and {len(draft.rows)} rows drawn, {draft.count} asked for")
        if drawn == draft.count:
            self._draft = None
            out.append(Send(self._proposal(draft)))

    def _proposal(self, draft: _Draft) -> Proposal:
        """The window may have been narrowed since the proposal was begun: then the chain stands still where it ends."""
        token_ids = tuple(self.ids[draft.base_len :])
        limit = max(self.limit, len(self.ids))
        return Proposal(self.session_id, self.epoch, draft.base_len, self.seen_len, limit, token_ids, tuple(draft.rows))

    # -- commits ---------------------------------------------------------------------------------------------------

    def _committed(self, commit: DraftCommit, out: list[Command]) -> None:
        """Move on, or restart at the committed length when the epoch is newer; late commits change nothing."""
        late = commit.epoch < self.epoch or commit.end < self.seen_len
        if late or commit.epoch.generation != self.epoch.generation:
            out.append(Count("late_commit"))
            return
        if commit.start > self.seen_len:
            out.append(AskFrom(self.seen_len))
            return
        fresh = commit.token_ids[self.seen_len - commit.start :]
        if commit.epoch > self.epoch:
            self.speculation = commit.speculation
            self._restart(commit, fresh, out)
        elif fresh:
            # A window moves only with a token: a chain that stands at its limit may be answered by a bonus.
            self.speculation = commit.speculation
            self._confirm(fresh)

    def _confirm(self, fresh: Sequence[int]) -> None:
        """Tokens of the chain's own were accepted."""
        if tuple(self.ids[self.seen_len : self.seen_len + len(fresh)]) != tuple(fresh):
            raise ProtocolError(f"commit at {self.seen_len} differs from the chain in epoch {self.epoch}")
        self.seen_len += len(fresh)

    def _restart(self, commit: DraftCommit, fresh: Sequence[int], out: list[Command]) -> None:
        """The epoch ended: the chain past the committed tokens is forgotten, and with it a proposal being drawn."""
        common = self.seen_len
        for token in fresh:
            if common >= len(self.ids) or self.ids[common] != token:
                break
            common += 1
        if len(self.ids) > common:
            out.append(Count("discarded", len(self.ids) - common))
            out.append(Rewind(common))
        del self.ids[self.seen_len :]
        self.ids.extend(fresh)
        self.seen_len = len(self.ids)
        self.epoch = commit.epoch
        self._restarting, self._passed, self._draft = True, False, None
