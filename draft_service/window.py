"""The drafter's window of one session: how far it may guess, and where it starts again.

A state machine without I/O, clock, randomness or numbers: events in, commands out. The worker carries the commands
out: `Begin` asks the drafter how many tokens it will offer and is answered by `Planned` before anything is drawn;
`Draw` asks for tokens and is answered by `Drawn`, one or several at a time, under the ticket it was given.

What it decides: when a proposal starts and how long it is, what of the chain survives a commit, when to say that
nothing will come. What it may not do: let a drawn token change the length or the moment of a proposal (non-
anticipation).

The verifier's hint that an epoch ended starts the next one at once; the orchestrator's commit confirms it, or overrules
it. A hint is taken only as the very next round, at a place the chain has reached: everything else waits for the commit
(`docs/decisions/rollback-hints.md`).

Invariants:

* `ids` is the committed text followed by the chain of the current epoch; the chain never passes `limit`;
* `confirmed_len` <= `seen_len` <= len(ids); what lies between the first two rests on hints;
* a proposal starts where the last one ended; it belongs to one epoch, or is abandoned unsent;
* nothing is proposed between a `Pass` and the next commit, nor behind a tree in its epoch; a tree is no part of `ids`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from draft_service.events import (
    AskFrom,
    Begin,
    Command,
    Count,
    Draw,
    Drawn,
    Event,
    Followed,
    Planned,
    Rewind,
    Scheduled,
    Send,
)
from outrider.errors import ProtocolError
from outrider.ids import Epoch, SessionId
from outrider.messages import DraftCommit, DraftOpen, Pass, Proposal, ProposalHeader, RollbackHint, SparseRow
from outrider.shape import Shape
from outrider.verification.tree import ROOT, Tree

FOREVER = 2**31 - 1
"""`until_len` of a drafter that will never propose again in this session."""


@dataclass(slots=True)
class _Draft:
    """A proposal that is being drawn."""

    ticket: int
    base_len: int
    count: int
    rows: list[SparseRow] = field(default_factory=list)
    parents: tuple[int, ...] = ()
    """Of a tree; else empty."""


class Window:
    """State of one session on the draft worker; see the module's head."""

    def __init__(self, opened: DraftOpen) -> None:
        """Start with everything in `opened.token_ids` committed and an empty chain."""
        self.session_id: SessionId = opened.session_id
        self.epoch: Epoch = opened.epoch
        self.ids: list[int] = list(opened.token_ids)
        """Committed ids, then the chain."""
        self.seen_len = self.confirmed_len = len(self.ids)
        """Committed length that it was told of, by commits or hints, and by commits alone."""
        self.speculation = self._told = opened.speculation
        """What it drafts by, and what it was told last."""
        self.max_len = opened.max_len or FOREVER
        self._needs_rows = opened.mode.needs_rows
        self._restarting = True
        self._passed = False
        self._misled = False
        """Whether a commit has overruled a hint: no other one is taken."""
        self._confirmed_epoch = opened.epoch
        self._claimed = -1
        """Limit that the last proposal of this epoch claimed; -1: there was none."""
        self._tickets = 0
        self._draft: _Draft | None = None
        self._tree: Tree | None = None
        """What the chain of this epoch ends in."""

    @property
    def limit(self) -> int:
        """Position the chain may reach before another commit."""
        return min(self.seen_len + self.speculation.window, self.max_len)

    @property
    def room(self) -> int:
        """Tokens that may still be drawn before another commit."""
        return max(0, self.limit - len(self.ids))

    @property
    def ticket(self) -> int:
        """Ticket of the proposal under way; 0: none is."""
        return self._draft.ticket if self._draft is not None else 0

    @property
    def wants_time(self) -> bool:
        """Whether `Scheduled` would lead to anything."""
        # Asked of every session before every token step, most of which wait: what is cheap first.
        if self._draft is not None or self._passed or self._tree is not None or not self.speculation.enabled:
            return False
        length = len(self.ids)
        return length < self.seen_len + self.speculation.window or length >= self.max_len

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
            case RollbackHint():
                self._hinted(event, out)
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
        depth = len(Shape(event.parents).levels)
        if not 0 < (depth or event.count) <= draft.count or (depth and len(event.parents) != event.count):
            raise ProtocolError(f"{event.count} tokens planned, {depth} deep, up to {draft.count} asked for")
        draft.count, draft.parents = event.count, event.parents
        self._restarting = False
        if self._needs_rows:
            out.append(Send(ProposalHeader(self.session_id, self.epoch, draft.base_len, draft.count, depth)))
        out.append(Draw(draft.ticket, draft.count, draft.parents))

    def _drawn(self, event: Drawn, out: list[Command]) -> None:
        draft = self._draft
        if draft is None or draft.ticket != event.ticket:
            out.append(Count("discarded", len(event.token_ids)))
            return
        if draft.parents:
            self._grown(draft, event, out)
            return
        self.ids.extend(event.token_ids)
        draft.rows.extend(event.rows)
        drawn = len(self.ids) - draft.base_len
        if drawn > draft.count or (self._needs_rows and len(draft.rows) != drawn):
            raise ProtocolError(f"{drawn} tokens and {len(draft.rows)} rows drawn, {draft.count} asked for")
        if drawn == draft.count:
            self._draft = None
            out.append(Send(self._proposal(draft)))

    def _grown(self, draft: _Draft, event: Drawn, out: list[Command]) -> None:
        """A tree is complete; it stands until the epoch ends."""
        self._draft, self._tree = None, Tree(event.token_ids, draft.parents, event.rows)
        wanted = len(self._tree.families) if self._needs_rows else 0
        if (len(event.token_ids), len(event.rows)) != (draft.count, wanted):
            raise ProtocolError(f"a tree of {len(event.token_ids)} tokens and {len(event.rows)} rows was drawn")
        self._claimed = limit = max(self.limit, draft.base_len + self._tree.depth)
        proposal = Proposal(
            self.session_id, self.epoch, draft.base_len, self.seen_len, limit, event.token_ids, event.rows,
            draft.parents,
        )  # fmt: skip
        out.append(Send(proposal))

    def _proposal(self, draft: _Draft) -> Proposal:
        """The window may have been narrowed since the proposal was begun: then the chain stands still where it ends."""
        token_ids = tuple(self.ids[draft.base_len :])
        self._claimed = limit = max(self.limit, len(self.ids))
        return Proposal(self.session_id, self.epoch, draft.base_len, self.seen_len, limit, token_ids, tuple(draft.rows))

    # -- commits ---------------------------------------------------------------------------------------------------

    def _committed(self, commit: DraftCommit, out: list[Command]) -> None:
        """Move on, or restart at the committed length when the epoch is newer; late commits change nothing."""
        late = commit.epoch < self._confirmed_epoch or commit.end < self.confirmed_len
        if late or commit.epoch.generation != self.epoch.generation:
            out.append(Count("late_commit"))
            return
        if commit.start > self.confirmed_len:
            out.append(AskFrom(self.confirmed_len))
            return
        fresh = commit.token_ids[self.confirmed_len - commit.start :]
        if commit.epoch > self.epoch:
            self._follow(commit, fresh, out)
        elif fresh or commit.epoch > self._confirmed_epoch:
            self._confirm(commit, fresh, out)

    def _confirm(self, commit: DraftCommit, fresh: Sequence[int], out: list[Command]) -> None:
        """Tokens of the chain's own were accepted, or a hint was true; a contradicted hint never happened.

        A window moves only with a token: a chain that stands at the limit it claimed may be answered by a bonus.
        """
        hinted = self.confirmed_len < self.seen_len or self._confirmed_epoch < self.epoch
        if not self._agrees(commit, fresh):
            if not (hinted or self._misled):
                raise ProtocolError(f"commit at {self.confirmed_len} differs from the chain in epoch {self.epoch}")
            self._overrule(commit, fresh, out)
            return
        moves = commit.end > self.seen_len
        self.confirmed_len, self._confirmed_epoch, self._told = commit.end, commit.epoch, commit.speculation
        self.seen_len = max(self.seen_len, commit.end)
        stands = self._draft is None and self._claimed == len(self.ids)
        if moves or not stands:
            self.speculation = self._told

    def _agrees(self, commit: DraftCommit, fresh: Sequence[int]) -> bool:
        """Whether a commit of this epoch, or of one that a hint ended, says what `ids` says, as far as it must."""
        same_text = tuple(self.ids[self.confirmed_len : commit.end]) == tuple(fresh)
        reaches = commit.end >= self.seen_len if commit.epoch == self.epoch else commit.end <= self.seen_len
        return same_text and reaches

    def _overrule(self, commit: DraftCommit, fresh: Sequence[int], out: list[Command]) -> None:
        """The commit holds; what the verifier has of this epoch's chain is nobody's, so the epoch is sat out.

        Saying so ends the verifier's waiting, be it for a header or for a body that will not come.
        """
        out.append(Count("overruled_hint"))
        self._follow(commit, fresh, out)
        self._misled = True
        self._pass(len(self.ids) + 1, out)

    def _follow(self, commit: DraftCommit, fresh: Sequence[int], out: list[Command]) -> None:
        """Restart where a commit says."""
        self.speculation = self._told = commit.speculation
        self._restart(commit.epoch, self.confirmed_len, fresh, out)
        self.confirmed_len, self._confirmed_epoch = self.seen_len, commit.epoch

    # -- hints -----------------------------------------------------------------------------------------------------

    def _hinted(self, hint: RollbackHint, out: list[Command]) -> None:
        """Restart before the commit, if the hint can only mean the end of the chain at hand."""
        if self._misled or hint.epoch != self.epoch.next_round() or not self.seen_len <= hint.start <= len(self.ids):
            out.append(Count("late_hint" if hint.epoch <= self.epoch else "odd_hint"))
            return
        out.append(Count("taken_hint"))
        self.speculation = self._told
        self._restart(hint.epoch, hint.start, () if hint.token_id is None else (hint.token_id,), out)

    def _fell(self, length: int, fresh: Sequence[int], out: list[Command]) -> None:
        """The epoch of a tree is over: say how far it was followed, unless that cannot be told."""
        tree, self._tree = self._tree, None
        if tree is None:
            return
        # What was committed together with the tree's own tokens came before them.
        path = tree.follow(fresh[max(0, len(self.ids) - length) :])
        out.append(Count("discarded", len(tree) - len(path)))
        if fresh:
            reached = [tree.families[node] for node in (ROOT, *path) if node in tree.families]
            taken = [*path, None][: len(reached)]
            ranks = [-1 if node is None else own.index(node) for own, node in zip(reached, taken, strict=True)]
            out.append(Followed(tuple(zip(map(len, reached), ranks, strict=True))))

    def _restart(self, epoch: Epoch, length: int, fresh: Sequence[int], out: list[Command]) -> None:
        """Begin an epoch behind `ids[:length]` and the fresh tokens; a proposal being drawn is forgotten, too."""
        self._fell(length, fresh, out)
        common = length
        for token in fresh:
            if common >= len(self.ids) or self.ids[common] != token:
                break
            common += 1
        if len(self.ids) > common:
            out.append(Count("discarded", len(self.ids) - common))
            out.append(Rewind(common))
        del self.ids[length:]
        self.ids.extend(fresh)
        self.seen_len = len(self.ids)
        self.epoch, self._claimed = epoch, -1
        self._restarting, self._passed, self._draft = True, False, None
