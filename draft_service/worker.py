"""The draft worker without its thread: orders in, token steps, reports out.

Owns the drafter and every session's window, and is used by one thread. A token step plans for the sessions that want to
propose, then draws one token (a drafter without a model: a whole proposal) for all that are drawing, together with a
bounded share of catching up. Orders are taken between steps, so a new epoch ends a stale draft at once.

A broken promise of one session (its window raises `ProtocolError`, its row cannot be sampled) ends that session alone;
an exception of a whole step ends the sessions of that step. `MAX_FAILED_STEPS` such steps in a row mean that the
drafter is broken: `DrafterBroken` ends the thread, and with it the process.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from draft_service.drafters.protocol import Drafter, DraftSession, Failed, GrowsTrees, Guessed, TakesFeatures, Work
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
from draft_service.metrics import DraftMetrics
from draft_service.orders import (
    Closed,
    CloseSession,
    Died,
    GiveFeatures,
    OpenSession,
    Order,
    Outgoing,
    Report,
    Reported,
    TakeCommit,
    TakeHint,
)
from draft_service.parking import Heard, Parking
from draft_service.session import Session, SessionKey
from draft_service.window import Window
from outrider.errors import Internal, OutriderError
from outrider.ids import SessionId
from outrider.messages import DraftCommit, Pass, Proposal, ProposeMessage, RollbackHint, TargetFeatures
from outrider.sparing import Sparing
from outrider.telemetry import log_ids

MAX_FAILED_STEPS = 5
"""Token steps in a row that may fail before the drafter counts as broken."""
STATUS_INTERVAL_S = 0.5
"""How often a working session reports."""
EARLY_TOKENS = 8
"""Tokens after which a session's first report does not wait for that."""

log = logging.getLogger(__name__)


class DrafterBroken(RuntimeError):
    """The drafter fails every time; only a new process helps."""


class DraftWorker:
    """Sessions and drafter of one model thread; see the module's head."""

    def __init__(
        self,
        drafter: Drafter,
        post: Callable[[Sequence[Report]], None],
        metrics: DraftMetrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over a drafter.

        Args:
            drafter: used by this worker only.
            post: takes reports in order; called on the worker's thread, must not block.
            metrics: where to count.
            clock: seconds, rising; only durations are used.
        """
        self._drafter = drafter
        self._taker = drafter if isinstance(drafter, TakesFeatures) else None
        self._post = post
        self._metrics = metrics
        self._clock = clock
        self._sessions: dict[SessionId, Session] = {}
        self._reports: list[Report] = []
        self._failed_steps = 0
        self._parking = Parking()
        self._sparing = Sparing()

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def outstanding_window(self) -> int:
        """Tokens that windows have room for, of sessions that would draw them; may be read from any thread."""
        return sum(each.window.room for each in tuple(self._sessions.values()) if each.wants_work)

    @property
    def has_work(self) -> bool:
        """Whether a token step would do anything."""
        return any(session.wants_work for session in self._sessions.values())

    # -- orders ------------------------------------------------------------------------------------------------------

    def handle(self, order: Order) -> None:
        """Carry out one order; late ones, of an opening that is gone, change nothing."""
        match order:
            case OpenSession():
                self._open(order)
            case TakeCommit():
                self._tell(order.key, order.commit)
            case TakeHint():
                self._tell(order.key, order.hint)
            case CloseSession():
                self._close(order)
            case GiveFeatures():
                self._hear(Heard(order.verifier_address, order.features))
            case _:
                assert_never(order)
        self._flush()

    def _open(self, order: OpenSession) -> None:
        opened = order.opened
        previous = self._sessions.get(opened.session_id)
        if previous is not None:
            self._end(previous, keep=True)
        drafter = opened.drafter or self._drafter.info.kind
        session = Session(order.key, Window(opened), opened.verifier_address, drafter, reported_at_s=self._clock())
        self._sessions[opened.session_id] = session
        self._metrics.sessions.set(len(self._sessions))
        described = DraftSession(
            opened.session_id, opened.mode, opened.sampling, opened.draft_key, opened.prompt_len, opened.sample_index,
            opened.prediction, opened.drafter, order.grammar,
        )  # fmt: skip
        try:
            self._drafter.open(described, opened.token_ids)
        except Exception as error:
            self._fail(session, error, "open")
        for heard in self._parking.take(order.key, self._clock()):
            self._hear(heard)

    def _close(self, order: CloseSession) -> None:
        session = self._find(order.key)
        if session is not None:
            self._report(session)
            self._end(session, order.keep_kv)
        self._reports.append(Closed(order.key))

    def _tell(self, key: SessionKey, said: DraftCommit | RollbackHint) -> None:
        session = self._find(key)
        if session is not None:
            self._advance(session, said)

    def _hear(self, heard: Heard) -> None:
        """Give features to the drafter if they are for an opening there is; for a newer one they are kept a while."""
        if self._taker is None:
            return
        session = self._sessions.get(heard.key.session_id)
        if session is None or heard.key.generation > session.key.generation:
            fate = "parked" if self._parking.put(heard, self._clock()) else "overflow"
        elif heard.key != session.key or heard.verifier_address != session.verifier_address:
            fate = "stale"
        else:
            fate = self._give(self._taker, session, heard.features)
        self._metrics.features.labels(fate).inc(heard.features.features.shape[1])

    def _give(self, taker: TakesFeatures, session: Session, features: TargetFeatures) -> str:
        """Hand features over; return what came of it."""
        try:
            taker.take_features(features)
        except Exception as error:  # the session goes on without them
            if self._sparing.allows("features"):
                log.warning("session %s: features that cannot be used: %s", session.key.session_id, error)
            return "unusable"
        session.behind = True
        return "taken"

    def _find(self, key: SessionKey) -> Session | None:
        session = self._sessions.get(key.session_id)
        return session if session is not None and session.key == key else None

    # -- token steps -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one token step.

        Raises:
            DrafterBroken: too many steps failed in a row.
        """
        started_s = self._clock()
        for session in list(self._sessions.values()):
            self._plan(session)
        batch = [(session, work) for session in self._sessions.values() if (work := session.work) is not None]
        self._rotate()
        # Whoever waits for a header or a pass has it before the first token is drawn.
        self._flush()
        if batch:
            self._draw(batch, started_s)
        self._report_working()
        self._flush()

    def _plan(self, session: Session) -> None:
        """Let a session begin a proposal, or go on waiting for its drafter to catch up."""
        if len(session.window.ids) >= session.window.max_len:
            self._mark_ready(session)  # nothing can be drafted, so nothing needs to be computed
        if session.planning is not None:
            self._carry_out(session, [session.planning])
        elif session.window.wants_time:
            self._advance(session, Scheduled())

    def _rotate(self) -> None:
        """Let another session be the first of the next step: prompt passes and KV go to the first that asks."""
        if self._sessions:
            first = next(iter(self._sessions))
            self._sessions[first] = self._sessions.pop(first)

    def _draw(self, batch: list[tuple[Session, Work]], started_s: float) -> None:
        try:
            outcomes = self._drafter.draw([work for _, work in batch])
        except Exception as error:
            self._fail_step([session for session, _ in batch], error)
            return
        self._failed_steps = 0
        step_s = self._clock() - started_s
        self._metrics.step_s.observe(step_s)
        for (session, _), outcome in zip(batch, outcomes, strict=True):
            match outcome:
                case Failed():
                    self._fail(session, outcome.error, "sample")
                case Guessed():
                    self._take(session, outcome, step_s)
                case _:
                    assert_never(outcome)

    def _take(self, session: Session, guessed: Guessed, step_s: float) -> None:
        if guessed.caught_up:
            session.behind = False
            self._mark_ready(session)
        drawing, num = session.drawing, len(guessed.token_ids)
        if drawing is not None and drawing.parents and guessed.caught_up:
            session.grew(num, step_s)
        if drawing is None or not num:
            return
        if not drawing.parents:
            session.drew(num, step_s)
        self._metrics.drafted.labels(session.drafter).inc(num)
        session.drawing = replace(drawing, count=drawing.count - num) if num < drawing.count else None
        self._advance(session, Drawn(drawing.ticket, guessed.token_ids, guessed.rows))

    def _fail_step(self, sessions: list[Session], error: Exception) -> None:
        log.error("a token step of %d sessions failed", len(sessions), exc_info=error)
        for session in sessions:
            self._fail(session, error, "draw")
        self._failed_steps += 1
        self._flush()
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise DrafterBroken(f"{self._failed_steps} token steps in a row failed") from error

    # -- carrying out what a window says -----------------------------------------------------------------------------

    def _advance(self, session: Session, event: Event) -> None:
        """Give a window an event and do what it says; its errors, and the drafter's, end this session alone."""
        try:
            commands = session.window.step(event)
        except OutriderError as error:
            self._fail(session, error, "protocol")
            return
        session.drop_stale()
        self._carry_out(session, commands)

    def _carry_out(self, session: Session, commands: Sequence[Command]) -> None:
        for command in commands:
            try:
                self._do(session, command)
            except Exception as error:
                self._fail(session, error, "plan")
                return

    def _do(self, session: Session, command: Command) -> None:
        match command:
            case Begin():
                self._begin(session, command)
            case Draw():
                session.drawing = command
            case Send():
                self._send(session, command.message)
            case Rewind():
                self._drafter.rewind(session.key.session_id, command.length)
            case Followed():
                if isinstance(self._drafter, GrowsTrees):
                    self._drafter.learn(session.key.session_id, command.families)
            case AskFrom():
                self._report(session, command.position)
            case Count():
                self._count(session, command)
            case _:
                assert_never(command)

    def _begin(self, session: Session, begin: Begin) -> None:
        session.begun_s = self._clock() if session.planning is None else session.begun_s
        plan = self._drafter.plan(session.key.session_id, session.window.ids, begin.count)
        if plan is None:
            session.planning = begin
            return
        session.planning = None
        session.drafter = plan.drafter or session.drafter
        self._mark_ready(session)
        if not plan.count:
            self._metrics.passes.labels(plan.reason).inc()
        self._advance(session, Planned(begin.ticket, plan.count, plan.until_len, plan.parents))

    def _send(self, session: Session, message: ProposeMessage) -> None:
        if isinstance(message, Proposal):
            self._metrics.proposals.labels(session.drafter).inc()
            self._metrics.proposal_s.observe(self._clock() - session.begun_s)
        elif isinstance(message, Pass) and len(session.window.ids) >= session.window.max_len:
            self._metrics.passes.labels("max_len").inc()
        self._reports.append(Outgoing(session.verifier_address, message))

    def _count(self, session: Session, count: Count) -> None:
        if count.name == "discarded":
            session.num_discarded += count.amount
            self._metrics.discarded.inc(count.amount)
        elif count.name == "late_commit":
            self._metrics.late_commits.inc(count.amount)
        else:
            self._metrics.hints.labels(count.name.removesuffix("_hint")).inc(count.amount)

    # -- reporting and ending ----------------------------------------------------------------------------------------

    def _mark_ready(self, session: Session) -> None:
        if not session.ready:
            session.ready = True
            self._report(session)

    def _report(self, session: Session, missing_from: int = -1) -> None:
        session.reported_at_s, session.num_reported = self._clock(), session.num_drafted
        self._reports.append(Reported(session.key, session.status(missing_from)))

    def _report_working(self) -> None:
        """Report the sessions that have drawn since a report that is old, also those that wait for a verdict now."""
        now_s = self._clock()
        for session in self._sessions.values():
            has_news = session.num_drafted != session.num_reported
            # What drafting takes is of use at once: a short generation is over before the interval is.
            is_first = session.num_reported == 0 and session.num_drafted >= EARLY_TOKENS
            if has_news and session.ready and (is_first or now_s - session.reported_at_s >= STATUS_INTERVAL_S):
                self._report(session)

    def _fail(self, session: Session, error: Exception, cause: str) -> None:
        """End a session by an error of its own or of its step; idempotent."""
        if self._sessions.get(session.key.session_id) is not session:
            return
        if self._sparing.allows(cause):
            with log_ids(session=session.key.session_id):
                log.warning("session %s ends in %s: %r", session.key.session_id, cause, error)
        self._metrics.failures.labels(cause).inc()
        known = error if isinstance(error, OutriderError) else Internal(f"the drafter failed ({cause}): {error!r}")
        self._reports.append(Died(session.key, known, session.status()))
        self._end(session, keep=False)

    def _end(self, session: Session, keep: bool) -> None:
        del self._sessions[session.key.session_id]
        self._metrics.sessions.set(len(self._sessions))
        try:
            self._drafter.close(session.key.session_id, keep)
        except Exception:  # the session is over either way
            log.exception("closing session %s failed in the drafter", session.key.session_id)
            self._metrics.failures.labels("close").inc()

    def _flush(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            self._post(reports)
