"""Sessions that share a verifier, in simulated time: the real policy and the real chain, all else made up.

Every event has a time, every draw a seed: a run says the same on every machine, and its ratios may be asserted. What a
pass takes is measured (`benchmarks/results/passes.md`): by the class of its rows, and a little for every further
session. Draft workers answer for each session on its own; tokens are accepted by chance, or not drafted for a while.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from orchestrator.figures import round_of
from orchestrator.pace import Pace
from orchestrator.pass_costs import PassCosts
from orchestrator.plans import TRIAL, Limits
from orchestrator.tuning import Tuning
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass, WorkerId
from outrider.messages import (
    DecodeOpen,
    DecodeProgress,
    DraftStatus,
    Pass,
    Proposal,
    SamplingParams,
    Speculation,
    Verdict,
)
from tests.unit.control_machines import Machine
from verify_service import events as verify
from verify_service.chain import Chain

VOCAB, MAX_ROWS = 4, 32
WORKER, SESSION = WorkerId("d"), SessionId("s")
GENERATION = Generation(1, 1)
PROMPT_LEN = 2
FREE = SpeculationChoice()
OFF = SpeculationChoice(off=True)


@dataclass(frozen=True, slots=True)
class Text:
    """What is said, as far as it matters."""

    alpha: float
    undrafted: float = 0.0
    """How often a new chain finds nothing to draft; each time in a row for twice as many tokens, up to 8."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    seconds: float
    """Until a place was left empty: what comes then says how long the last sessions were, not how fast."""
    num_tokens: int
    """Committed by then."""
    switches: tuple[tuple[float, ...], ...]
    """By session: when drafting in earnest began or ended, the first plan aside."""
    off: tuple[str, ...]
    """By session: why nothing was drafted at its end; empty: it was."""
    num_tested: int
    num_rows: int

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


@dataclass
class _Drafter:
    """A draft worker, as one session sees it."""

    text: Text
    dice: Random
    speculation: Speculation
    epoch: Epoch = field(default_factory=lambda: Epoch(GENERATION))
    position: int = PROMPT_LEN
    seen: int = PROMPT_LEN
    fresh: bool = True
    busy: int = 0
    """Number of the proposal that is being drawn; 0: none."""
    passing: bool = False
    stretch: int = 1

    def hear(self, epoch: Epoch, end: int, speculation: Speculation) -> None:
        self.speculation = speculation
        if epoch > self.epoch:
            self.epoch, self.position, self.fresh, self.busy, self.passing = epoch, end, True, 0, False
        self.seen = max(self.seen, end)

    @property
    def wants(self) -> int:
        """Tokens of the next proposal."""
        plan = self.speculation
        room = self.seen + plan.window - self.position
        return 0 if self.busy or self.passing else min(room, plan.restart_gamma if self.fresh else plan.gamma)

    def has_nothing(self) -> bool:
        if self.fresh and self.dice.random() < self.text.undrafted:
            return True
        self.stretch = 1
        return False


@dataclass
class _Session:
    number: int
    chain: Chain
    drafter: _Drafter
    tuning: Tuning
    final_len: int
    arrivals: deque[tuple[int, float]] = field(default_factory=deque)
    """Ends of the chain, and since when."""
    ahead: tuple[float, int, int] = (0.0, 0, 0)
    """Seconds, rows and sessions of the pass that ran ahead."""
    passed: tuple[float, int, int] = (0.0, 0, 0)
    queue_s: float = 0.0
    told: Epoch = field(default_factory=lambda: Epoch(GENERATION))
    committed_len: int = PROMPT_LEN
    done: bool = False
    drafts: bool = False
    switches: list[float] = field(default_factory=list)

    def note_wait(self, position: int, now_s: float) -> None:
        """Note how long the proposal with this position has been here, as the verifier does."""
        while self.arrivals and self.arrivals[0][0] <= position:
            self.arrivals.popleft()
        self.queue_s = max(self.queue_s, now_s - self.arrivals[0][1] if self.arrivals else 0.0)


class Simulation:
    """One verifier, so many places, each with one session after another."""

    def __init__(
        self,
        machine: Machine,
        texts: Sequence[Text],
        places: int,
        *,
        choice: SpeculationChoice = FREE,
        num_tokens: int = 96,
        passes: PassCosts | None = None,
    ) -> None:
        """Take the texts in turn; `passes` is what was measured before."""
        self.machine, self.choice, self.num_tokens = machine, choice, num_tokens
        self.passes = passes or PassCosts()
        self.limits = Limits()
        self.waiting = list(enumerate(texts))
        self.places = places
        self.now_s = 0.0
        self.sessions: list[_Session] = []
        self.over: list[_Session] = []
        self.running = False
        self.inbox: list[tuple[float, _Session, verify.Event]] = []
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = count(1)
        self.num_tested = self.num_rows = self.num_committed = 0
        self.full_until: tuple[float, int] | None = None

    def run(self) -> Outcome:
        for _ in range(min(self.places, len(self.waiting))):
            self.begin()
        while self.heap:
            self.now_s, _, act, given = heapq.heappop(self.heap)
            act(*given)
        assert self.full_until is not None
        ends = sorted(self.over, key=lambda session: session.number)
        reasons = tuple("" if each.tuning.speculation.enabled else each.tuning.reason for each in ends)
        switches = tuple(tuple(each.switches) for each in ends)
        return Outcome(*self.full_until, switches, reasons, self.num_tested, self.num_rows)

    def at(self, delay_s: float, act: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self.heap, (self.now_s + delay_s, next(self.numbers), act, given))

    def begin(self) -> None:
        number, text = self.waiting.pop(0)
        tuning = Tuning(self.choice, self.limits, Pace(self.passes), self.num_tokens)
        tuning.begin(self.now_s, "d")
        tuning.observe_status(DraftStatus(draft_s_per_token=self.machine.draft_s, num_drafted=1))
        plan, final_len = tuning.speculation, PROMPT_LEN + self.num_tokens
        opened = DecodeOpen(
            SESSION, GENERATION, (0,) * PROMPT_LEN, (TokenClass.PROMPT,) * PROMPT_LEN, Mode.GREEDY, SamplingParams(),
            b"", commit_limit=final_len, speculation=plan, worker_id=WORKER, patience_s=tuning.patience_s,
        )  # fmt: skip
        session = _Session(
            number, Chain(opened, VOCAB), _Drafter(text, Random(number), plan), tuning, final_len, drafts=_drafts(plan)
        )
        self.sessions.append(session)
        self.draft(session)
        self.tell(session, verify.Scheduled(0))

    # -- the drafter -------------------------------------------------------------------------------------------------

    def draft(self, session: _Session) -> None:
        drafter = session.drafter
        if drafter.wants < 1 or session.done:
            return
        if drafter.has_nothing():
            drafter.passing = True
            until = drafter.position + drafter.stretch
            drafter.stretch = min(8, 2 * drafter.stretch)
            message = Pass(SESSION, drafter.epoch, drafter.position, until)
            self.at(self.machine.hop_s, self.tell, session, verify.Arrived(WORKER, message))
            return
        num, drafter.busy = drafter.wants, next(self.numbers)
        self.at(num * self.machine.draft_s, self.drawn, session, drafter.busy, num)

    def drawn(self, session: _Session, number: int, num: int) -> None:
        drafter = session.drafter
        if drafter.busy != number:
            return
        limit = drafter.seen + max(drafter.speculation.window, num)
        message = Proposal(SESSION, drafter.epoch, drafter.position, drafter.seen, limit, (1,) * num)
        drafter.busy, drafter.fresh = 0, False
        drafter.position += num
        self.at(self.machine.hop_s, self.tell, session, verify.Arrived(WORKER, message))
        self.draft(session)

    # -- the verifier ------------------------------------------------------------------------------------------------

    def tell(self, session: _Session, event: verify.Event) -> None:
        if self.running:
            self.inbox.append((self.now_s, session, event))
        elif not session.done:
            self.take(self.now_s, session, event)
            self.settle(session, flush=True)
            self.start_pass()

    def hand(self, session: _Session, event: verify.Event) -> verify.Test | None:
        test, epoch = None, session.chain.epoch
        for command in session.chain.step(event):
            match command:
                case verify.Test():
                    test = command
                case verify.Report():
                    self.report(session, command)
                case verify.StartTimer():
                    expired = verify.TimerExpired(command.number)
                    self.at(session.chain.patience_s, self.tell, session, expired)
                case _:
                    pass
        if session.chain.epoch != epoch:
            session.arrivals.clear()
        return test

    def take(self, posted_s: float, session: _Session, event: verify.Event) -> None:
        before = session.chain.chain_end
        self.hand(session, event)
        if session.chain.chain_end > before:
            session.arrivals.append((session.chain.chain_end, posted_s))

    def settle(self, session: _Session, *, flush: bool) -> None:
        while session.chain.held or flush:
            test = self.hand(session, verify.Scheduled(0))
            if test is None:
                return
            if test.token_ids and session.ahead[1]:
                session.note_wait(test.base_len, self.now_s)
            self.judge(session, test)

    def judge(self, session: _Session, test: verify.Test) -> None:
        alpha, dice = session.drafter.text.alpha, session.drafter.dice
        if test.is_ahead:
            answer = verify.Judged(0, 0, None)
        elif not test.token_ids:
            answer = verify.Judged(0, 0, 0)
        else:
            num = len(test.token_ids)
            good = next((index for index in range(num) if dice.random() >= alpha), num)
            answer = verify.Judged(good, min(num, good + 1), 0 if good < num else None)
            self.num_tested += answer.num_tested
        self.hand(session, answer)

    def start_pass(self) -> None:
        works: list[tuple[_Session, verify.Test]] = []
        rows = MAX_ROWS
        for plan in (self.planned, self.planned_ahead):
            beside = bool(works)
            for session in list(self.sessions):
                test = plan(session, rows, beside)
                if test is not None:
                    works.append((session, test))
                    rows -= len(test.feed)
        if not works:
            return
        for session, _ in works:
            self.sessions.remove(session)
            self.sessions.append(session)
        self.running = True
        seconds = self.machine.pass_s(MAX_ROWS - rows, len(works))
        busy_s = self.machine.draft_s * sum(session.drafter.speculation.gamma for session in self.sessions)
        seconds += (self.machine.drafted - 1.0) * min(seconds, busy_s)
        self.num_rows += MAX_ROWS - rows
        beside_s = self.machine.message_s * sum(session.drafter.speculation.enabled for session, _ in works)
        self.at(seconds + beside_s, self.end_pass, works, (seconds, MAX_ROWS - rows, len(works)))

    def planned_ahead(self, session: _Session, rows: int, beside: bool) -> verify.Test | None:
        chain = session.chain
        if not rows or not (beside or chain.speculation.ahead) or not chain.may_feed_ahead:
            return None
        return self.hand(session, verify.Scheduled(1, ahead=True))

    def planned(self, session: _Session, rows: int, _beside: bool) -> verify.Test | None:
        chain = session.chain
        self.settle(session, flush=False)
        wanted = min(chain.wants_rows, rows)
        test = self.hand(session, verify.Scheduled(wanted)) if wanted else None
        if test is not None and test.token_ids:
            session.note_wait(test.base_len, self.now_s)
        return test

    def end_pass(self, works: list[tuple[_Session, verify.Test]], figures: tuple[float, int, int]) -> None:
        for session, test in works:
            if test.is_ahead:
                session.ahead = figures
            else:
                session.passed = figures
            self.judge(session, test)
        for session, _ in works:
            self.settle(session, flush=True)
        self.running = False
        inbox, self.inbox = self.inbox, []
        for posted_s, session, event in inbox:
            if not session.done:
                self.take(posted_s, session, event)
        for session in list(self.sessions):
            self.settle(session, flush=True)
        self.start_pass()

    def report(self, session: _Session, report: verify.Report) -> None:
        from_ahead = bool(session.ahead[1]) and not session.passed[1]
        seconds, rows, num = session.ahead if from_ahead else session.passed
        verdict = Verdict(
            SESSION, report.epoch, report.start, report.token_ids, report.kinds, report.num_accepted, report.num_tested,
            report.next_epoch, report.cause, verify_s=seconds, queue_s=session.queue_s, num_rows=rows,
            num_sessions=num, from_ahead=from_ahead,
        )  # fmt: skip
        session.ahead = session.passed = (0.0, 0, 0)
        session.queue_s = 0.0
        if session.chain.committed_len >= session.final_len:
            session.done = True
            self.sessions.remove(session)
        self.at(self.machine.hop_s, self.verdict, session, verdict)

    # -- the orchestrator --------------------------------------------------------------------------------------------

    def verdict(self, session: _Session, verdict: Verdict) -> None:
        tuning, num = session.tuning, len(verdict.token_ids)
        session.committed_len += num
        self.num_committed += num
        tuned = tuning.observe(round_of(verdict, 0, num), self.now_s)
        if session.committed_len >= session.final_len:
            self.end(session)
            return
        if verdict.next_epoch > session.told:
            session.told = verdict.next_epoch
            tuning.restarted(verdict.next_epoch, self.now_s)
        self.at(self.machine.hop_s, self.hear, session, verdict.next_epoch, session.committed_len, tuning.speculation)
        if tuned is not None:
            if _drafts(tuned.speculation) != session.drafts:
                session.drafts = not session.drafts
                session.switches.append(self.now_s)
            progress = DecodeProgress(
                GENERATION, session.committed_len, session.final_len, tuned.speculation, tuned.patience_s
            )
            self.at(self.machine.hop_s, self.tell, session, progress)

    def hear(self, session: _Session, epoch: Epoch, end: int, speculation: Speculation) -> None:
        session.drafter.hear(epoch, end, speculation)
        self.draft(session)

    def end(self, session: _Session) -> None:
        session.tuning.take_worth()
        session.tuning.left()
        session.tuning.end()
        self.over.append(session)
        if self.waiting:
            self.begin()
        elif self.full_until is None:
            self.full_until = (self.now_s, self.num_committed)


def _drafts(plan: Speculation) -> bool:
    """Whether a plan drafts in earnest."""
    return plan.enabled and plan != TRIAL
