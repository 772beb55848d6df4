"""The rounds of one generation: what is committed, logged and shown, and who drafts and verifies for it.

A state machine without I/O, clock or randomness: events in, commands out; the driver carries them out. Text, stops and
lengths are the business of one pure committer, which is asked for every run of tokens exactly once and in order.

What it decides: generations and attachments; what each worker is told and when; when a token may be shown (never
before it is in the log); when the generation is over. What it may not do: decide whether a token is accepted.

Invariants:

* `tokens` grows only by verdicts of the verifier stream that is open, each continuing exactly at its end;
* the drafter attached last is the only one that is told anything, and it is told every commit of its generation in
  order;
* shown <= logged <= committed <= commit limit;
* after `Finish` or `Fail` no event leads to a command.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

from orchestrator.events import (
    AppendLog,
    Cancelled,
    ChooseDrafter,
    ChooseVerifier,
    CloseDrafter,
    CloseVerifier,
    Command,
    Committer,
    Complete,
    Count,
    DrafterAsked,
    DrafterChosen,
    DrafterLost,
    Emit,
    Event,
    Fail,
    Failed,
    Finish,
    Logged,
    OpenDrafter,
    OpenVerifier,
    Started,
    Taken,
    TellDrafter,
    TellVerifier,
    Tuned,
    VerdictArrived,
    VerifierChosen,
    VerifierLost,
)
from outrider.errors import ProtocolError, Unavailable
from outrider.generation import Chunk
from outrider.ids import Epoch, FinishReason, Generation, TokenClass, WorkerId
from outrider.messages import DecodeAttach, DecodeProgress, DraftCommit, Verdict, VerdictCause

MAX_AHEAD_OF_LOG = 256
"""Tokens the verifier may commit beyond what is in the log."""
MAX_AHEAD_OF_CLIENT = 1024
"""Tokens the verifier may commit beyond what the client has taken."""
PROGRESS_STRIDE = 64
"""The verifier is told a new commit limit when it has moved at least so far, or reached its end."""
MAX_EXPIRIES = 3
"""Patience running out so often in a row replaces the drafter."""
MOVED = "moved"
"""Why a drafter is given up that has done nothing wrong."""
MAX_REOPENS = 5
"""Verifiers that may be lost in one generation before it fails."""


class _Phase(Enum):
    IDLE = auto()
    RUNNING = auto()
    REOPENING = auto()
    """Waiting for another verifier."""
    FINISHING = auto()
    """The last token is known; its append is under way."""
    OVER = auto()


@dataclass(slots=True)
class _Drafter:
    worker_id: WorkerId
    generation: Generation
    opened: bool = False
    """False until the verifier has named the length it starts from."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is fixed when a generation starts."""

    fence: int
    token_ids: tuple[int, ...]
    classes: tuple[TokenClass, ...]
    final_len: int
    """Position the generation may not pass: prompt + max_tokens, or the context."""
    tuned: Tuned
    """The policy's first choice."""


@dataclass(slots=True)
class Rounds:
    """State of one generation; see the module's head."""

    plan: Plan
    committer: Committer
    tokens: list[int] = field(init=False)
    generation: Generation = field(init=False)
    epoch: Epoch = field(init=False)
    tuned: Tuned = field(init=False)
    logged_len: int = field(init=False)
    taken_len: int = field(init=False)
    off_reason: str = field(init=False, default="")
    """Why nothing is drafted now; empty while a drafter is attached."""
    _classes: list[TokenClass] = field(init=False)
    _phase: _Phase = field(init=False, default=_Phase.IDLE)
    _opened: Generation = field(init=False)
    _drafter: _Drafter | None = field(init=False, default=None)
    _verifier_id: WorkerId = field(init=False, default=WorkerId(""))
    _limit_told: int = field(init=False, default=0)
    _tuned_told: Tuned = field(init=False)
    _outbox: deque[Chunk] = field(init=False, default_factory=deque)
    _finish: FinishReason | None = field(init=False, default=None)
    _expiries: int = field(init=False, default=0)
    _reopens: int = field(init=False, default=0)
    _lost_drafters: set[WorkerId] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        """Start from the plan."""
        self.tokens = list(self.plan.token_ids)
        self._classes = list(self.plan.classes)
        self.generation = self._opened = Generation(self.plan.fence, 0)
        self.epoch = Epoch(self.generation)
        self.tuned = self._tuned_told = self.plan.tuned
        self.logged_len = self.taken_len = len(self.tokens)

    @property
    def over(self) -> bool:
        """Whether the generation has finished or failed."""
        return self._phase is _Phase.OVER

    @property
    def drafter_id(self) -> WorkerId:
        """The draft worker that is attached, also while nothing is asked of it; empty: none."""
        return self._drafter.worker_id if self._drafter is not None else WorkerId("")

    @property
    def commit_limit(self) -> int:
        """Position the verifier may not commit past now."""
        return min(self.plan.final_len, self.logged_len + MAX_AHEAD_OF_LOG, self.taken_len + MAX_AHEAD_OF_CLIENT)

    def step(self, event: Event) -> list[Command]:
        """Take one event; return what must be done, in order. Late events change nothing.

        Raises:
            ProtocolError: the generation is started twice.
        """
        out: list[Command] = []
        if self._phase is _Phase.OVER:
            return out
        match event:
            case Started():
                self._start(event, out)
            case VerdictArrived():
                self._verdict(event, out)
            case Tuned():
                self._tune(event, out)
            case Logged():
                self._logged(event.length, out)
            case Taken():
                self.taken_len = max(self.taken_len, event.length)
                self._tell_progress(out)
            case DrafterLost() | DrafterChosen() | DrafterAsked():
                self._drafter_event(event, out)
            case VerifierLost() | VerifierChosen():
                self._verifier_event(event, out)
            case Complete() | Cancelled() | Failed():
                self._end(_last_command(event), out)
            case _:
                assert_never(event)
        return out

    # -- opening ---------------------------------------------------------------------------------------------------

    def _start(self, event: Started, out: list[Command]) -> None:
        if self._phase is not _Phase.IDLE:
            raise ProtocolError("Started twice")
        self._phase = _Phase.RUNNING
        self.off_reason = event.off_reason
        self._open_both(event.verifier_id, event.drafter_id, out)

    def _open_both(self, verifier_id: WorkerId, drafter_id: WorkerId | None, out: list[Command]) -> None:
        """Open verifier and drafter at once: both know the length to start from, so drafting begins without waiting."""
        self._verifier_id = verifier_id
        self._drafter = None
        if drafter_id is not None:
            self._make_drafter(drafter_id)
        self._opened = self.generation
        self.epoch = Epoch(self.generation)
        self._limit_told, self._tuned_told = self.commit_limit, self.tuned
        log, told = (tuple(self.tokens), tuple(self._classes)), (self.tuned.speculation, self.tuned.patience_s)
        out.append(OpenVerifier(verifier_id, self.generation, drafter_id, *log, self._limit_told, *told))
        self._open_drafter(self.epoch, out)

    def _make_drafter(self, worker_id: WorkerId) -> None:
        """Every drafter is the only one of its generation."""
        self.generation = Generation(self.generation.fence, self.generation.attach + 1)
        self._drafter = _Drafter(worker_id, self.generation)
        self.off_reason = self.tuned.off_reason
        self._expiries = 0

    def _open_drafter(self, epoch: Epoch, out: list[Command]) -> None:
        if self._drafter is None or self._drafter.opened:
            return
        self._drafter.opened = True
        out.append(OpenDrafter(self._drafter.worker_id, epoch, tuple(self.tokens), self.tuned.speculation))

    # -- commits ---------------------------------------------------------------------------------------------------

    def _verdict(self, event: VerdictArrived, out: list[Command]) -> None:
        """The one way tokens enter: continue exactly at the end, then log, then tell the drafter."""
        verdict = event.verdict
        known = len(self.tokens) - verdict.start
        late = known > len(verdict.token_ids) or (known > 0 and verdict.next_epoch <= self.epoch)
        if event.opened != self._opened or self._phase is not _Phase.RUNNING or late:
            out.append(Count("late_verdict"))
            return
        if known < 0:
            self._lose_verifier(f"verdict at {verdict.start}, expected {len(self.tokens)}", out)
            return
        start = len(self.tokens)
        self._take(verdict, known, out)
        self.epoch = max(self.epoch, verdict.next_epoch)
        if self._finish is None:
            self._tell_drafter(verdict, start, out)
            self._tell_progress(out)

    def _take(self, verdict: Verdict, known: int, out: list[Command]) -> None:
        """Commit the verdict's new tokens up to the one that ends the generation."""
        if len(verdict.token_ids) == known:
            return
        outcome = self.committer.take(
            len(self.tokens), verdict.token_ids[known:], verdict.kinds[known:], verdict.logprobs[known:]
        )
        chunk = outcome.chunk
        self.tokens.extend(chunk.token_ids)
        self._classes.extend([TokenClass.DECODE] * len(chunk.token_ids))
        self._outbox.append(chunk)
        out.append(AppendLog(chunk.start, chunk.token_ids, chunk.kinds, chunk.logprobs))
        if outcome.finish is not None:
            self._finish = outcome.finish
            self._close(out)
            self._phase = _Phase.FINISHING

    def _tell_drafter(self, verdict: Verdict, start: int, out: list[Command]) -> None:
        """Pass the commit on; a drafter waiting to be opened is opened by the verdict that answers its attachment."""
        drafter = self._drafter
        if drafter is None or verdict.next_epoch.generation != drafter.generation:
            return
        if verdict.cause == VerdictCause.QUARANTINED:
            self._lose_drafter(drafter, "quarantined", out)
        elif self._patience_ran_out(verdict):
            self._lose_drafter(drafter, "slow", out)
        elif not drafter.opened:
            self._open_drafter(verdict.next_epoch, out)
        elif verdict.token_ids or verdict.cause != VerdictCause.ATTACHED:
            self._commit_from(start, verdict.next_epoch, out)

    def _commit_from(self, start: int, epoch: Epoch, out: list[Command]) -> None:
        commit = DraftCommit(epoch, start, tuple(self.tokens[start:]), self.tuned.speculation)
        out.append(TellDrafter(commit))

    def _patience_ran_out(self, verdict: Verdict) -> bool:
        """Count expiries in a row."""
        if verdict.cause == VerdictCause.PATIENCE:
            self._expiries += 1
        elif verdict.num_tested:
            self._expiries = 0
        return self._expiries >= MAX_EXPIRIES

    def _logged(self, length: int, out: list[Command]) -> None:
        """Show what the log holds now; the last chunk ends the generation."""
        self.logged_len = max(self.logged_len, min(length, len(self.tokens)))
        while self._outbox and self._outbox[0].start + len(self._outbox[0].token_ids) <= self.logged_len:
            out.append(Emit(self._outbox.popleft()))
        if self._finish is not None and not self._outbox:
            self._end(Finish(self._finish), out)
        else:
            self._tell_progress(out)

    def _tune(self, event: Tuned, out: list[Command]) -> None:
        self.tuned = event
        if self._drafter is not None:
            self.off_reason = event.off_reason
        self._tell_progress(out)

    def _tell_progress(self, out: list[Command]) -> None:
        """Tell the verifier new limits when they matter."""
        if self._phase is not _Phase.RUNNING:
            return
        limit = self.commit_limit
        moved = limit - self._limit_told
        matters = moved >= PROGRESS_STRIDE or (moved > 0 and limit == self.plan.final_len)
        if self.tuned == self._tuned_told and not matters:
            return
        self._limit_told, self._tuned_told = limit, self.tuned
        told = (self.tuned.speculation, self.tuned.patience_s)
        out.append(TellVerifier(DecodeProgress(self.generation, self.logged_len, limit, *told)))

    # -- losing workers --------------------------------------------------------------------------------------------

    def _drafter_event(self, event: DrafterLost | DrafterChosen | DrafterAsked, out: list[Command]) -> None:
        drafter = self._drafter
        running = self._phase is _Phase.RUNNING
        match event:
            case DrafterChosen() if running and drafter is None:
                if event.worker_id is not None:
                    self._make_drafter(event.worker_id)
                    out.append(TellVerifier(DecodeAttach(self.generation, event.worker_id)))
            case DrafterLost() if running and drafter is not None and drafter.generation == event.generation:
                self._lose_drafter(drafter, event.reason, out)
            case DrafterAsked() if running and drafter is not None and drafter.generation == event.generation:
                self._commit_from(max(0, min(event.position, len(self.tokens))), self.epoch, out)
            case _:
                out.append(Count("late_event"))

    def _lose_drafter(self, drafter: _Drafter, reason: str, out: list[Command]) -> None:
        """Go on without a drafter at once, and ask for another."""
        self._drafter = None
        out.append(Count("drafter_moved" if reason == MOVED else "drafter_lost"))
        self.off_reason = f"drafter_{reason}"
        if reason != MOVED:
            self._lost_drafters.add(drafter.worker_id)
        if drafter.opened:
            out.append(CloseDrafter(drafter.generation))
        self.generation = Generation(self.generation.fence, self.generation.attach + 1)
        out.append(TellVerifier(DecodeAttach(self.generation, WorkerId(""))))
        out.append(ChooseDrafter(frozenset({*self._lost_drafters, drafter.worker_id})))

    def _verifier_event(self, event: VerifierLost | VerifierChosen, out: list[Command]) -> None:
        match event:
            case VerifierLost() if self._phase is _Phase.RUNNING and event.opened == self._opened:
                self._lose_verifier(event.reason, out)
            case VerifierChosen() if self._phase is _Phase.REOPENING:
                self._reopen(event.worker_id, out)
            case _:
                out.append(Count("late_event"))

    def _lose_verifier(self, reason: str, out: list[Command]) -> None:
        """Pause, and ask for another verifier; the drafter is kept in mind for it."""
        self._reopens += 1
        out.append(Count("verifier_lost"))
        if self._reopens > MAX_REOPENS:
            self._end(Fail(Unavailable(f"verifier lost {self._reopens} times, last: {reason}")), out)
            return
        self._close(out)
        self._phase = _Phase.REOPENING
        out.append(ChooseVerifier(frozenset({self._verifier_id})))

    def _reopen(self, worker_id: WorkerId | None, out: list[Command]) -> None:
        if worker_id is None:
            self._end(Fail(Unavailable("no verifier is available")), out)
            return
        self._phase = _Phase.RUNNING
        self.generation = Generation(self.generation.fence, self.generation.attach + 1)
        drafter_id = self._drafter.worker_id if self._drafter is not None else None
        self._open_both(worker_id, drafter_id, out)
        if drafter_id is None and self.tuned.speculation.enabled:
            out.append(ChooseDrafter(frozenset(self._lost_drafters)))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _close(self, out: list[Command]) -> None:
        if self._drafter is not None and self._drafter.opened:
            self._drafter.opened = False
            out.append(CloseDrafter(self._drafter.generation))
        if self._phase is _Phase.RUNNING:
            out.append(CloseVerifier())

    def _end(self, last: Finish | Fail, out: list[Command]) -> None:
        self._close(out)
        self._phase = _Phase.OVER
        self._outbox.clear()
        out.append(last)


def _last_command(event: Complete | Cancelled | Failed) -> Finish | Fail:
    """Return what a generation that is ended from outside ends with."""
    if isinstance(event, Failed):
        return Fail(event.error)
    return Finish(FinishReason.LENGTH if isinstance(event, Complete) else FinishReason.CANCELLED)
