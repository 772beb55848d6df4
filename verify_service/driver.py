"""Steps one chain and carries its commands out; the only place that calls `Chain.step`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never
from weakref import ref

from torch import Tensor

from outrider.model.runner import KvSlot
from verify_service.alarms import Alarms
from verify_service.events import (
    Count,
    Event,
    Keep,
    Report,
    Rewind,
    Scheduled,
    StartTimer,
    Test,
    TimerExpired,
    TimerKind,
)
from verify_service.inbox import Ticket
from verify_service.judging import judge, num_row_mismatches, rows_of
from verify_service.reports import features_of, hint_of, verdict_of
from verify_service.sessions import Session
from verify_service.workers import Workers


@dataclass(slots=True)
class Driver:
    """What carrying out a command needs."""

    workers: Workers
    alarms: Alarms
    counters: Counter[str]
    clock: Callable[[], float]
    body_limit_s: float
    send_hints: bool
    fail: Callable[[Session, Exception], None]
    """Ends one session with an error; whatever goes wrong in a session stays in it."""
    touched: dict[Ticket, Session] = field(default_factory=dict)
    """Sessions that something happened to since they were last settled."""

    def deliver(self, session: Session, event: Event) -> None:
        """Give a chain an event from outside; a session that is over ignores it, one that breaks is failed."""
        if session.closed:
            return
        self.touched[session.ticket] = session
        try:
            self.step(session, event)
        except Exception as error:
            self.fail(session, error)

    def make_ready(self, session: Session) -> None:
        """The session's KV is complete: its patience may run."""
        self.touched[session.ticket] = session
        if session.scoring is not None:
            scoring, session.scoring = session.scoring, None
            for part in scoring.parts():
                session.send(part)
        timer, session.timer = session.timer, None
        if timer is not None:
            self.start_timer(session, timer)

    def step(self, session: Session, event: Event) -> Test | None:
        """Give a chain one event; return the test it hands out, which must be judged before its next event."""
        epoch, test = session.chain.epoch, None
        for command in session.chain.step(event):
            match command:
                case Test():
                    test = command
                case Rewind():
                    _slot_of(session).truncate(command.length)
                case Keep():
                    self._keep(session, command.path)
                case Report():
                    self._report(session, command)
                case StartTimer():
                    self.start_timer(session, command)
                case Count():
                    self.counters[command.name] += command.amount
                case _:
                    assert_never(command)
        if session.chain.epoch != epoch:
            session.forget_arrivals()
        if not session.chain.held:
            session.held_row = None
        return test

    def settle(self, session: Session, *, flush: bool) -> None:
        """Do all tests that need no pass; does nothing to a session that is not ready.

        Args:
            session: any session.
            flush: also report what is committed. Not wanted right before a pass: a token accepted on the held row rides
                with that pass's verdict.
        """
        try:
            while session.ready and (session.chain.held or flush):
                test = self.step(session, Scheduled(0))
                if test is None:
                    return
                if test.token_ids and session.ahead.num_rows:
                    waited_s = session.waited_s(test.base_len, self.clock())
                    session.figures.queue_s = max(session.figures.queue_s, waited_s)
                self.judge(session, test, None)
        except Exception as error:
            self.fail(session, error)

    def judge(self, session: Session, test: Test, rows: Tensor | None) -> None:
        """Decide a test and tell the chain.

        Args:
            session: whose chain handed it out.
            test: the test.
            rows: [len(test.feed), vocab_size] logits of the pass, or [len(test.feed)] likeliest ids where the session
                wants no more; None if it needed none.
        """
        if test.rows:
            self.counters["draft_row_mismatch"] += num_row_mismatches(session, test)
        judged = judge(session, test, rows_of(session, test, rows))
        self.step(session, judged)
        if judged.drawn is not None:
            # Its epoch is over: all of it is told, no row is held, and there is nothing that settling could do.
            self.touched.pop(session.ticket, None)

    def wants_features(self, session: Session) -> bool:
        """Whether a session's drafter is connected, asked for hidden states, and drafts at present."""
        return session.chain.speculation.enabled and self.workers.wants_features(session.chain.worker_id)

    def tell_features(self, session: Session) -> None:
        """Send a drafter that asked for them the hidden states of the last pass whose positions stay, once.

        They go before the hint that its epoch ended: the drafter guesses from them as soon as it hears that.
        """
        fresh, session.fresh = session.fresh, None
        if fresh is None or session.slot is None:
            return
        kept = session.slot.length - fresh.position
        if kept > 0:
            message = features_of(session.opened.session_id, fresh, kept)
            self.workers.tell(session.chain.worker_id, message)

    def start_timer(self, session: Session, timer: StartTimer) -> None:
        """Start a chain's timer; that of a session without complete KV waits until it is ready."""
        if not session.ready:
            session.timer = timer
            return
        delay_s = session.chain.patience_s if timer.kind is TimerKind.PATIENCE else self.body_limit_s
        # Not held by it: a peer says how long patience is, and the session may be over long before.
        self.alarms.at(self.clock() + delay_s, partial(self._expire, ref(session), timer))

    def _expire(self, held: "ref[Session]", timer: StartTimer) -> None:
        session = held()
        if session is None:
            return
        if session.ready:
            self.deliver(session, TimerExpired(timer.number))
        elif session.timer is None:
            session.timer = timer

    def _keep(self, session: Session, path: tuple[int, ...]) -> None:
        """Of a tree that was fed, keep the KV of a path, and its hidden states, which are told before the others go."""
        _slot_of(session).keep(path)
        if session.fresh is not None:
            session.fresh = replace(session.fresh, hidden=session.fresh.hidden[list(path)])

    def _report(self, session: Session, report: Report) -> None:
        session.send(verdict_of(session, report))
        self.tell_features(session)
        worker_id = session.chain.worker_id
        if self.send_hints and self.workers.takes_hints(worker_id):
            hint = hint_of(session.chain, report)
            if hint is not None:
                self.workers.tell(worker_id, hint)


def _slot_of(session: Session) -> KvSlot:
    if session.slot is None:
        raise ValueError("a waiting session has no KV")
    return session.slot
