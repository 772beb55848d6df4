"""The streams between orchestrators, verifiers and draft workers: messages that take their time, and ends of streams.

Every pair of places has one constant delay, so that messages of a stream stay in order. What is sent to somebody who is
gone is lost; whoever waits for an answer notices after a while.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from draft_service.orders import CloseSession as CloseDraft
from draft_service.orders import Died, Outgoing, Report, Reported, TakeCommit, TakeHint
from draft_service.orders import OpenSession as OpenDraft
from draft_service.session import SessionKey
from outrider.errors import OutriderError
from outrider.ids import Generation, SessionId, WorkerId
from outrider.messages import (
    DecodeAttach,
    DecodeOpen,
    DecodeProgress,
    DecodeResponseMessage,
    DraftCommit,
    DraftOpen,
    Proposal,
    ProposeHello,
    ProposeResponseMessage,
    RollbackHint,
    Verdict,
)
from simulator.clock import Clock
from simulator.costs import Costs
from simulator.generation import TimedGeneration
from simulator.workers import VOCABULARY, TimedDraftWorker, TimedVerifier
from verify_service.inbox import CloseSession, JoinWorker, LeaveWorker, OpenSession, Proposed, TellSession, Ticket

if TYPE_CHECKING:
    from simulator.orchestrator import TimedOrchestrator


class Wires:
    """All streams of a cluster."""

    def __init__(self, clock: Clock, costs: Costs, detect_s: float) -> None:
        """Open none yet; `detect_s` is how long the end of a peer goes unnoticed."""
        self._clock, self._costs, self.detect_s = clock, costs, detect_s
        self.verifiers: dict[WorkerId, TimedVerifier] = {}
        self.drafts: dict[WorkerId, TimedDraftWorker] = {}
        self._tickets = count(1)
        self._joined: dict[tuple[WorkerId, WorkerId], Ticket] = {}
        """By draft worker and verifier: the stream between them."""
        self._drafting: dict[SessionKey, tuple[TimedOrchestrator, TimedGeneration]] = {}
        """Who hears of a session's drafting."""

    def _send(self, origin: int, target: int, at_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._clock.at(at_s + self._costs.hop(origin, target), action, *arguments)

    # -- orchestrator and verifier -----------------------------------------------------------------------------------

    def open_verifier(self, who: "TimedOrchestrator", generation: TimedGeneration, opened: DecodeOpen) -> None:
        """Open `Decode`."""
        held, ticket = generation.held, Ticket(next(self._tickets))
        held.ticket, held.verifier_opened_s = ticket, self._clock.now_s
        verifier, session = self.verifiers[held.verifier.worker_id], opened.generation

        def send(message: DecodeResponseMessage | OutriderError | None) -> None:
            if isinstance(message, Verdict):
                verifier.now_s += self._costs.verdict_s
            self._send(verifier.zone, who.zone, verifier.now_s, who.heard_verifier, generation, session, message)

        if not verifier.alive:
            self._clock.after(self.detect_s, who.break_verifier, generation, session)
            return
        event = OpenSession(ticket, opened, send)
        self._send(who.zone, verifier.zone, self._clock.now_s, verifier.post, event)

    def tell_verifier(
        self, who: "TimedOrchestrator", generation: TimedGeneration, message: DecodeAttach | DecodeProgress
    ) -> None:
        """Say something on `Decode`."""
        held = generation.held
        verifier = self.verifiers[held.verifier.worker_id]
        self._send(who.zone, verifier.zone, self._clock.now_s, verifier.post, TellSession(Ticket(held.ticket), message))

    def close_verifier(self, who: "TimedOrchestrator", generation: TimedGeneration) -> None:
        """Close `Decode`."""
        held = generation.held
        verifier = self.verifiers[held.verifier.worker_id]
        self._send(who.zone, verifier.zone, self._clock.now_s, verifier.post, CloseSession(Ticket(held.ticket), True))

    # -- orchestrator and draft worker -------------------------------------------------------------------------------

    def open_drafter(self, who: "TimedOrchestrator", generation: TimedGeneration, opened: DraftOpen) -> None:
        """Open `Draft`, and with it the draft worker's stream to the verifier if there is none."""
        held = generation.held
        if held.drafter is None:
            return
        held.drafter_opened_s = self._clock.now_s
        worker, key = self.drafts[held.drafter.worker_id], SessionKey(opened.session_id, opened.epoch.generation)
        if not worker.alive:
            self._clock.after(self.detect_s, who.lost_drafter, generation, key.generation, "unavailable")
            return
        self._drafting[key] = (who, generation)
        self._send(who.zone, worker.zone, self._clock.now_s, self._start_drafting, worker, opened)

    def _start_drafting(self, worker: TimedDraftWorker, opened: DraftOpen) -> None:
        key = SessionKey(opened.session_id, opened.epoch.generation)
        if worker.alive and not worker.sit_down(key):
            self._end_drafting(worker, key, self._clock.now_s, "resource_exhausted")
            return
        verifier = self.verifiers[opened.verifier_id]
        pair = (worker.worker_id, verifier.worker_id)
        if worker.alive and pair not in self._joined:
            ticket = self._joined[pair] = Ticket(next(self._tickets))
            hello = ProposeHello(worker.worker_id, VOCABULARY, takes_hints=True)

            def send(message: ProposeResponseMessage | OutriderError | None) -> None:
                if isinstance(message, RollbackHint):
                    key = SessionKey(message.session_id, message.epoch.generation)
                    self._send(verifier.zone, worker.zone, verifier.now_s, worker.give, TakeHint(key, message))

            event = JoinWorker(ticket, hello, send)
            self._send(worker.zone, verifier.zone, self._clock.now_s, verifier.post, event)
        worker.give(OpenDraft(opened))

    def tell_drafter(self, who: "TimedOrchestrator", generation: TimedGeneration, commit: DraftCommit) -> None:
        """Say something on `Draft`."""
        drafter = generation.held.drafter
        if drafter is not None:
            worker = self.drafts[drafter.worker_id]
            key = SessionKey(generation.job.session_id, commit.epoch.generation)
            self._send(who.zone, worker.zone, self._clock.now_s, worker.give, TakeCommit(key, commit))

    def close_drafter(self, who: "TimedOrchestrator", generation: TimedGeneration, drafting: Generation) -> None:
        """Close `Draft`."""
        held = generation.held
        key = SessionKey(generation.job.session_id, drafting)
        self._drafting.pop(key, None)
        if held.drafter is not None:
            worker = self.drafts[held.drafter.worker_id]
            self._send(who.zone, worker.zone, self._clock.now_s, worker.give, CloseDraft(key, True))
        held.drafting = None

    def close(self, generation: TimedGeneration) -> None:
        """A generation is over: nobody hears of its drafting any more."""
        if generation.held.drafting is not None:
            self._drafting.pop(SessionKey(generation.job.session_id, generation.held.drafting), None)

    # -- from draft workers ------------------------------------------------------------------------------------------

    def reported(self, worker: TimedDraftWorker, reports: Sequence[Report]) -> None:
        """A draft worker says something, at its own time."""
        for report in reports:
            match report:
                case Outgoing():
                    self._propose(worker, report)
                case Reported():
                    self._status(worker, report)
                case Died():
                    worker.stand_up(report.key)
                    self._end_drafting(worker, report.key, worker.now_s, "internal")
                case _:
                    pass

    def _propose(self, worker: TimedDraftWorker, report: Outgoing) -> None:
        if isinstance(report.message, Proposal):
            worker.now_s += self._costs.proposal_s
        verifier = self.verifiers[WorkerId(report.verifier_address)]
        ticket = self._joined.get((worker.worker_id, verifier.worker_id))
        if ticket is not None:
            self._send(worker.zone, verifier.zone, worker.now_s, verifier.post, Proposed(ticket, report.message))

    def _status(self, worker: TimedDraftWorker, report: Reported) -> None:
        listener = self._drafting.get(report.key)
        if listener is not None:
            who, generation = listener
            said = (generation, report.key.generation, report.status)
            self._send(worker.zone, who.zone, worker.now_s, who.heard_drafter, *said)

    def _end_drafting(self, worker: TimedDraftWorker, key: SessionKey, now_s: float, reason: str) -> None:
        """A draft worker ends a stream."""
        listener = self._drafting.pop(key, None)
        if listener is not None:
            who, generation = listener
            said = (generation, key.generation, reason)
            self._send(worker.zone, who.zone, now_s, who.lost_drafter, *said)

    # -- losses ------------------------------------------------------------------------------------------------------

    def lose_draft_worker(self, worker: TimedDraftWorker) -> None:
        """A draft worker is gone: verifiers, and orchestrators by `lost_drafter`, notice after a while."""
        for pair, ticket in [entry for entry in self._joined.items() if entry[0][0] == worker.worker_id]:
            del self._joined[pair]
            self._clock.after(self.detect_s, self.verifiers[pair[1]].post, LeaveWorker(ticket))

    def lose_verifier(self, verifier: TimedVerifier) -> None:
        """A verifier is gone: its streams with draft workers are no more."""
        for pair in [pair for pair in self._joined if pair[1] == verifier.worker_id]:
            del self._joined[pair]

    def abandon(self, generation: TimedGeneration) -> None:
        """The orchestrator of a generation is gone: its workers notice after a while, and close the streams."""
        held = generation.held
        self.close(generation)
        verifier = self.verifiers[held.verifier.worker_id]
        self._clock.after(self.detect_s, verifier.post, CloseSession(Ticket(held.ticket), True))
        if held.drafter is not None and held.drafting is not None:
            key = SessionKey(SessionId(generation.job.session_id), held.drafting)
            self._clock.after(self.detect_s, self.drafts[held.drafter.worker_id].give, CloseDraft(key, True))
