"""One generation in simulated time: the real rounds and the real tuning, between simulated workers.

It does what `orchestrator.driver` does, without its streams, tasks and counters: events of one moment are taken one
after the other, and what the machine asks for is a message that takes its time, or a question that is answered at once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.events import (
    ChooseDrafter,
    CloseDrafter,
    Command,
    Count,
    DrafterAsked,
    DrafterChosen,
    Event,
    Fail,
    Finish,
    OpenVerifier,
    Outcome,
    Started,
    TellDrafter,
    VerdictArrived,
    VerifierChosen,
)
from orchestrator.figures import Round, round_of
from orchestrator.job import OFF_BY_CHOICE
from orchestrator.pace import Pace
from orchestrator.pass_costs import PassCosts
from orchestrator.rounds import Plan, Rounds
from orchestrator.steering import Steering, Witness
from orchestrator.tuning import REASONS, Limits, Tuning
from outrider.drafter_policy import sort_of
from outrider.generation import Chunk, SpeculationChoice
from outrider.ids import Epoch, FinishReason, Generation, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import DraftStatus, TokenLogprobs, Verdict, WorkerDescription

DRAFTER_RETRY_S = 1.0
"""Pause between two searches for a draft worker."""


@dataclass(frozen=True, slots=True)
class Length:
    """A committer that ends at a length."""

    final_len: int

    def take(
        self, start: int, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs]
    ) -> Outcome:
        """Take tokens up to the length; see `orchestrator.events.Committer`."""
        count = min(len(token_ids), self.final_len - start)
        chunk = Chunk(start, tuple(token_ids[:count]), "", tuple(kinds[:count]))
        return Outcome(chunk, FinishReason.LENGTH if start + count >= self.final_len else None)


class Surroundings(Protocol):
    """What a generation needs of its orchestrator; nothing here waits."""

    def carry(self, generation: "TimedGeneration", command: Command) -> None:
        """Send what is for a worker, append to the log, show to the client, look for a worker."""
        ...

    def pass_costs(self, verifier_id: WorkerId) -> PassCosts:
        """Return a verifier's costs, as all sessions of the orchestrator see them."""
        ...

    def noted(self, generation: "TimedGeneration", committed: Round) -> None:
        """A verdict was committed."""
        ...

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have something done later."""
        ...

    @property
    def now_s(self) -> float:
        """The time."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What is fixed about a generation when it starts."""

    session_id: SessionId
    fence: int
    token_ids: tuple[int, ...]
    """The log."""
    prompt_len: int
    final_len: int
    verifier: WorkerDescription
    drafter: WorkerDescription | None
    off_reason: str
    choice: SpeculationChoice
    limits: Limits


@dataclass(slots=True)
class Held:
    """Which workers a generation has, and how they are called in messages."""

    verifier: WorkerDescription
    drafter: WorkerDescription | None = None
    opened: Generation = field(default_factory=Generation)
    """Of the stream to the verifier."""
    ticket: int = 0
    verifier_opened_s: float = 0.0
    drafter_opened_s: float = 0.0
    drafting: Generation | None = None
    """Of the stream to the draft worker, while it is open."""


class TimedGeneration:
    """See the module's head."""

    def __init__(self, job: Job, around: Surroundings, steering: Steering) -> None:
        """Make everything; nothing is opened yet."""
        self.job, self._around = job, around
        self.held = Held(job.verifier, job.drafter)
        self.lost_ids: set[WorkerId] = set()
        """Draft workers that it does not want any more."""
        self.tuning = Tuning(job.choice, job.limits, Pace(around.pass_costs(job.verifier.worker_id)))
        self.tuning.begin(around.now_s, sort_of(job.drafter) if job.drafter is not None else "")
        self._witness = Witness(steering, self.tuning, job.drafter)
        classes = (TokenClass.PROMPT,) * len(job.token_ids)
        plan = Plan(job.fence, job.token_ids, classes, job.final_len, self.tuning.tuned)
        self.rounds = Rounds(plan, Length(job.final_len))
        self._events: deque[Event] = deque()
        self._busy = False
        self._told_epoch = Epoch()
        self._looks = False

    def start(self) -> None:
        """Open both workers."""
        drafter_id = self.job.drafter.worker_id if self.job.drafter is not None else None
        self.feed(Started(self.job.verifier.worker_id, drafter_id, self.job.off_reason))

    def feed(self, event: Event) -> None:
        """Take an event, behind those that are being taken."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        while self._events:
            self._step(self._events.popleft())
        self._busy = False

    def heard(self, status: DraftStatus, generation: Generation) -> None:
        """The draft worker of a generation reports."""
        self.tuning.observe_status(status)
        if status.missing_from >= 0:
            self.feed(DrafterAsked(generation, status.missing_from))

    def _step(self, event: Event) -> None:
        if self.rounds.over:
            return
        if isinstance(event, DrafterChosen | VerifierChosen):
            if isinstance(event, DrafterChosen) and self.held.drafter is not None and not self.rounds.drafter_id:
                self._witness.chosen(self.held.drafter)
            self._take(self.tuning.attached(len(self.rounds.tokens)))
        self._take(event)

    def _take(self, event: Event) -> None:
        length = len(self.rounds.tokens)
        commands = self.rounds.step(event)
        if isinstance(event, VerdictArrived) and Count("late_verdict") not in commands:
            self._judge(event.verdict, length)
        for command in commands:
            self._do(command)
        self._look_again()

    def _judge(self, verdict: Verdict, length: int) -> None:
        committed = round_of(verdict, length - verdict.start, len(self.rounds.tokens) - length)
        self._around.noted(self, committed)
        self._witness.observe(committed)
        tuned = self.tuning.observe(committed, self._around.now_s)
        if tuned is not None:
            self._events.append(tuned)

    def _do(self, command: Command) -> None:
        match command:
            case OpenVerifier():
                self.tuning.moved(self._around.pass_costs(command.worker_id))
            case TellDrafter() if command.commit.epoch > self._told_epoch:
                self._told_epoch = command.commit.epoch
                self.tuning.restarted(command.commit.epoch, self._around.now_s)
            case CloseDrafter():
                self._witness.closed()
            case Finish() | Fail():
                self.tuning.end()
            case _:
                pass
        self._around.carry(self, command)

    def _look_again(self) -> None:
        """Look for a draft worker at intervals while there is none."""
        reason = self.rounds.off_reason
        if self.rounds.over or self._looks or reason in ("", *REASONS, *OFF_BY_CHOICE):
            return
        self._looks = True
        self._around.later(DRAFTER_RETRY_S, self._look)

    def _look(self) -> None:
        self._looks = False
        if not self.rounds.over and not self.rounds.drafter_id:
            self._around.carry(self, ChooseDrafter(frozenset()))
            self._look_again()
