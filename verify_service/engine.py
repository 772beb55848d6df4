"""The verifier's engine: one thread that owns the model, the chains and the KV; asyncio only moves messages.

`step()` is the whole of it: take what arrived, decode one pass, settle, fill some KV. Events come in through a
thread-safe inbox, answers go out through each stream's `send`. No lock is ever held and nothing here waits, except for
the inbox when there is nothing to do.

Invariants, checked after each pass: a session's slot is exactly as long as its chain says; free blocks and those of all
sessions make up the pool.
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread
from typing import assert_never

import torch

from outrider.errors import Internal, OutriderError, Unavailable
from outrider.ids import WorkerId
from outrider.messages import DecodeAttach, Draining, Preparing, ProposalHeader
from outrider.model.kv_gauges import KvGauges
from outrider.model.runner import ModelRunner
from outrider.telemetry import log_ids
from verify_service.alarms import Alarms
from verify_service.audit import Audit, AuditSettings
from verify_service.driver import Driver
from verify_service.events import Arrived, StreamBroken
from verify_service.inbox import (
    BlocksArrived,
    BlocksMissing,
    CloseSession,
    Dismiss,
    Drain,
    InboxEvent,
    JoinWorker,
    LeaveWorker,
    Malformed,
    OpenSession,
    Proposed,
    Stop,
    TellSession,
)
from verify_service.passes import Passes
from verify_service.residence import Residence
from verify_service.restoring import Restorer, Surroundings, Tier
from verify_service.roster import Limits, Roster
from verify_service.scheduler import Scheduler
from verify_service.sessions import Session
from verify_service.workers import PARKED_S, Workers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What can be chosen about an engine."""

    limits: Limits = field(default_factory=Limits)
    body_limit_s: float = 30.0
    """Longest wait for the body of an announced proposal; running out voids the guarantee of rejection mode."""
    prefix_reuse: bool = True
    """Whether KV that was computed before, for whichever session, is used again; no text depends on it."""
    send_hints: bool = True
    """Whether draft workers that want it are told of the end of an epoch before the orchestrator's commit."""
    sign_of_life_s: float = 5.0
    """How often a session that cannot be decoded yet is told that it is not forgotten."""
    fill_beside: int = 1
    """Stretches of KV filled per step while any session can decode: decoding waits for no more than that."""
    fill_alone: int = 8
    """Stretches filled per step while none can."""
    audit: AuditSettings = field(default_factory=AuditSettings)
    """How many finished sessions are checked against their twins while there is nothing else to do."""


class Engine:
    """See the module's head. Only `post`, `start`, `join` and the counts may be used from other threads."""

    def __init__(
        self,
        runner: ModelRunner,
        vocab_len: int,
        settings: EngineSettings = EngineSettings(),
        clock: Callable[[], float] = time.monotonic,
        tier: Tier | None = None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an engine; its thread is not started.

        Args:
            runner: probed and ready; nobody else may use it from now on.
            vocab_len: length of the tokenizer's id range.
            settings: what can be chosen.
            clock: rising seconds.
            tier: where KV is stored outside this process; None: nowhere.
            flush: called on the engine's thread whenever all that was sent so far should leave: before the model runs,
                behind its verdicts, and before the thread waits or ends.
        """
        self._runner = runner
        self._vocab_len = vocab_len
        self._settings = settings
        self._clock = clock
        self._flush = flush
        self._inbox: queue.SimpleQueue[tuple[float, InboxEvent]] = queue.SimpleQueue()
        self._posted_s = clock()
        """When what is being handled was posted: it may have waited for a pass."""
        self._stopped = False
        self._thread: Thread | None = None
        self.counters: Counter[str] = Counter()
        """Running totals by name; read-only for others."""
        self.kv_gauges = KvGauges(runner)
        """What the KV pool holds; may be read from other threads."""
        self._alarms = Alarms()
        self._workers = Workers(self.counters)
        self._residence = Residence(runner, prefix_reuse=settings.prefix_reuse)
        self._roster = Roster(self._residence, settings.limits, self.counters)
        self._driver = Driver(
            self._workers, self._alarms, self.counters, clock, settings.body_limit_s, settings.send_hints, self._fail
        )
        scheduler = Scheduler(self._roster, self._residence, self._driver, runner.info)
        self._passes = Passes(runner, scheduler, self._residence, self._driver, self.counters, clock, flush)
        self.audit = Audit(runner, vocab_len, settings.audit, clock)
        """Checks finished sessions in idle time; only its counts may be read from other threads."""
        self.restorer = self._connect(tier, scheduler) if tier is not None and settings.prefix_reuse else None
        """Loads and stores KV; only its figures may be read from other threads."""
        self._alarms.at(clock() + settings.sign_of_life_s, self._show_life)

    # -- from other threads ----------------------------------------------------------------------------------------

    def post(self, event: InboxEvent) -> None:
        """Put an event into the inbox; never blocks."""
        self._inbox.put((self._clock(), event))

    def start(self, on_end: Callable[[Exception | None], None]) -> None:
        """Start the thread; `on_end` is called on it when it ends, with the defect that ended it, if one did."""
        self._thread = Thread(target=self._run, args=(on_end,), name="engine", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; say whether it has."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._roster)

    @property
    def num_waiting(self) -> int:
        """Open sessions without a place."""
        return self._roster.num_waiting

    # -- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one round of work; return whether the model ran, so that there may be more to do at once."""
        self._drain_inbox()
        self._alarms.fire(self._clock())
        self._admit()
        decoded = self._passes.decode()
        self._settle()
        self._flush()
        # Whoever is ready may be sent a proposal at any moment, which should find no long work under way.
        alone = not any(session.ready for session in self._roster.in_turn())
        filled = self._passes.fill(self._settings.fill_alone if alone else self._settings.fill_beside)
        self._flush()
        # One block per step, behind the verdicts: a pass is never late by more than one copy.
        stored = self.restorer is not None and self.restorer.store_one()
        return decoded or filled or stored or self._idle()

    def _idle(self) -> bool:
        """Nothing is to be done for any session: check one that is over, unless a stream is just opening."""
        return not len(self._roster) and self._inbox.empty() and self.audit.step()

    def _run(self, on_end: Callable[[Exception | None], None]) -> None:
        defect: Exception | None = None
        try:
            with torch.inference_mode():
                while not self._stopped:
                    if not self.step() and not self._stopped:
                        self._sleep()
        except Exception as error:
            log.exception("the engine has stopped")
            defect = error
        for session in self._roster.sessions():
            session.send(Unavailable("the verifier has stopped"))
        self._flush()
        if self.restorer is not None and defect is None:
            while self.restorer.store_one():
                pass  # as much as the tier takes at once: nobody is left to wait for
        on_end(defect)

    @property
    def due_in_s(self) -> float | None:
        """Seconds until there is something to do even if nothing arrives; None: never."""
        return self._alarms.next_in(self._clock())

    def _sleep(self) -> None:
        """Wait for an event or the next alarm."""
        try:
            self._posted_s, event = self._inbox.get(timeout=self.due_in_s)
        except queue.Empty:
            return
        self._handle(event)

    def _drain_inbox(self) -> None:
        """Handle what is there now: what comes meanwhile, however fast, waits for the next step."""
        for _ in range(self._inbox.qsize()):
            self._posted_s, event = self._inbox.get_nowait()
            self._handle(event)

    # -- events ----------------------------------------------------------------------------------------------------

    def _handle(self, event: InboxEvent) -> None:
        match event:
            case OpenSession():
                self._open(event)
            case TellSession():
                self._tell(event)
            case CloseSession():
                self._close(event)
            case JoinWorker() | LeaveWorker():
                self._change_worker(event)
            case Proposed():
                self._proposed(event)
            case Malformed():
                self._malformed(event)
            case BlocksArrived() | BlocksMissing():
                self._restore(event)
            case Drain() | Dismiss():
                self._drain(event)
            case Stop():
                self._stopped = True
            case _:
                assert_never(event)

    def _open(self, event: OpenSession) -> None:
        self.audit.give_up()
        trees = self._runner.info.trees
        session = Session(event.ticket, event.opened, event.send, self._vocab_len, trees=trees, grammar=event.grammar)
        try:
            admitted = self._roster.enter(session)
        except OutriderError as error:
            event.send(error)
            return
        self._welcome(admitted)
        for arrived in self._workers.unpark(event.opened.session_id, self._clock()):
            self._arrive(session, arrived)

    def _tell(self, event: TellSession) -> None:
        session = self._roster.by_ticket(event.ticket)
        if session is None:
            return
        if isinstance(event.message, DecodeAttach):
            self._roster.remember(session.opened.session_id, event.message.generation)
        self._driver.deliver(session, event.message)

    def _close(self, event: CloseSession) -> None:
        session = self._roster.by_ticket(event.ticket)
        if session is None:
            return
        self._roster.leave(session, keep_kv=event.keep_kv)
        self.audit.note(session)
        session.send(None)

    def _change_worker(self, event: JoinWorker | LeaveWorker) -> None:
        broken: WorkerId | None
        if isinstance(event, LeaveWorker):
            broken = self._workers.leave(event.ticket)
        else:
            broken = event.hello.worker_id if self._workers.join(event) else None
        if broken is not None:
            self._break(broken)

    def _break(self, worker_id: WorkerId) -> None:
        """What was under way on a worker's stream may be lost: each of its sessions starts a new round."""
        for session in self._roster.sessions():
            self._driver.deliver(session, StreamBroken(worker_id))

    def _proposed(self, event: Proposed) -> None:
        worker_id = self._workers.sender_of(event.ticket)
        session = self._roster.by_id(event.message.session_id)
        if worker_id is None:
            self.counters["stale"] += 1
        elif session is None:
            self._workers.park(worker_id, event.message, self._clock())
        else:
            self._arrive(session, Arrived(worker_id, event.message))

    def _arrive(self, session: Session, arrived: Arrived) -> None:
        chain, now_s = session.chain, self._clock()
        before = chain.chain_end
        if arrived.message.epoch.generation > chain.epoch.generation:
            self._alarms.at(now_s + PARKED_S, lambda: self._expire_parked(session))
        self._driver.deliver(session, arrived)
        session.note_arrival(arrived.message, before, self._posted_s)

    def _expire_parked(self, session: Session) -> None:
        self.counters["parked_expired"] += session.chain.expire_parked()

    def _malformed(self, event: Malformed) -> None:
        worker_id = self._workers.sender_of(event.ticket)
        session = self._roster.by_id(event.session_id)
        if worker_id is None or session is None or session.chain.worker_id != worker_id:
            self.counters["garbage"] += 1
            return
        # An announcement of no tokens is garbage by the chain's own rules, so that it counts towards quarantine.
        nonsense = ProposalHeader(event.session_id, session.chain.epoch, session.chain.chain_end, 0)
        self._driver.deliver(session, Arrived(worker_id, nonsense))

    def _drain(self, event: Drain | Dismiss) -> None:
        if isinstance(event, Dismiss):
            self._workers.dismiss_all()
            return
        for session in self._roster.sessions():
            session.send(Draining(event.reason))
        self._workers.tell_all(Draining(event.reason))

    # -- sessions --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        self._welcome(self._roster.admit())

    def _welcome(self, admitted: list[Session]) -> None:
        for session in admitted:
            if session.ready:
                self._driver.make_ready(session)
            elif self.restorer is not None and session.scoring is None:
                self.restorer.begin(session)

    def _restore(self, event: BlocksArrived | BlocksMissing) -> None:
        if self.restorer is None:
            return
        if isinstance(event, BlocksArrived):
            self.restorer.arrived(event.ticket)
        else:
            self.restorer.missing(event.keys)

    def _connect(self, tier: Tier, scheduler: Scheduler) -> Restorer:
        """Let KV go to and come from a tier."""
        around = Surroundings(
            self._alarms, self._clock, self.post, self._residence.take_over, self._driver.make_ready, self.counters
        )
        restorer = Restorer(self._runner.block_access, tier, around)
        scheduler.is_awaiting_kv = restorer.is_waiting
        self._residence.on_leave = restorer.left
        self._passes.on_prompts = restorer.speeds.prefilled
        self._keep_stored(restorer)
        return restorer

    def _keep_stored(self, restorer: Restorer) -> None:
        """Refresh what is stored of running sessions, now and from time to time."""
        for session in self._roster.in_turn():
            if session.ready:
                restorer.refresh(session)
        self._alarms.at(self._clock() + restorer.refresh_s, lambda: self._keep_stored(restorer))

    def _show_life(self) -> None:
        """Tell those who hear no verdict, because none can come yet, that this thread goes round; from time to time."""
        for session in self._roster.sessions():
            if not session.ready:
                session.send(Preparing())
        self._alarms.at(self._clock() + self._settings.sign_of_life_s, self._show_life)

    def _settle(self) -> None:
        touched, self._driver.touched = self._driver.touched, {}
        for session in touched.values():
            self._driver.settle(session, flush=True)

    def _fail(self, session: Session, error: Exception) -> None:
        """End one session with an error; its KV is not trusted any more."""
        if session.closed:
            return
        if isinstance(error, OutriderError):
            session.send(error)
        else:
            with log_ids(session=session.opened.session_id):
                log.error("session %s failed", session.opened.session_id, exc_info=error)
            session.send(Internal(f"{type(error).__name__}: {error}"))
        self.counters["failed_sessions"] += 1
        self._roster.leave(session, keep_kv=False)
