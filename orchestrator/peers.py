"""The two workers of one generation: their streams, what the machine says on them, and what comes back as events.

Nothing here waits: each stream is a task of the driver's group, and every end that was not asked for becomes one
`VerifierLost` or `DrafterLost`.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Protocol

from orchestrator.drafting import only
from orchestrator.events import (
    CloseDrafter,
    Complete,
    DrafterLost,
    Event,
    Failed,
    OpenDrafter,
    OpenVerifier,
    TellDrafter,
    TellVerifier,
    VerdictArrived,
    VerifierLost,
)
from orchestrator.job import Drained, Job, Reported, Tools
from orchestrator.placement import PREDICTION
from orchestrator.prompt_scores import PromptScoring
from orchestrator.wire import Wire
from outrider.codec.decode import decode_request_to_proto, decode_response_from_proto
from outrider.codec.draft import draft_request_to_proto, draft_response_from_proto
from outrider.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutriderError,
    PermissionDenied,
    ProtocolError,
    Unavailable,
)
from outrider.generation import PromptLogprobs
from outrider.ids import Generation, WorkerId
from outrider.messages import (
    DecodeClose,
    DecodeOpen,
    DecodeRequestMessage,
    DecodeResponseMessage,
    DraftClose,
    DraftOpen,
    DraftRequestMessage,
    DraftResponseMessage,
    Draining,
    Preparing,
    PromptScores,
    WorkerDescription,
)
from outrider.v1 import draft_pb2_grpc, verify_pb2_grpc

log = logging.getLogger(__name__)

WORKER_FAILURES = (Unavailable, DeadlineExceeded, PermissionDenied)
"""Ends of a stream that say something about the worker; every other says something about this session only."""
REFUSALS = (InvalidRequest, NotFound, ProtocolError)
"""What every verifier would answer to this session."""

DecodeWire = Wire[DecodeRequestMessage, DecodeResponseMessage]
DraftWire = Wire[DraftRequestMessage, DraftResponseMessage]


Fed = Event | Reported | Drained | PromptLogprobs
"""What happens to a generation: events of its machine, and what goes past that."""


class Feed(Protocol):
    """Takes events; never waits."""

    def __call__(self, event: Fed, /) -> None:
        """Add an event to the driver's queue."""
        ...


class Peers:
    """The open streams of one generation."""

    def __init__(self, job: Job, tools: Tools, feed: Feed, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        """Open nothing yet.

        Args:
            job: the generation.
            tools: placement has the channels, and is told of failures.
            feed: takes what happens.
            metadata: that the calls carry.
        """
        self._job, self._feed = job, feed
        self.scoring = PromptScoring(job)
        """What has been told of the prompt."""
        self._placement, self._breakers = tools.placement, tools.placement.breakers
        self._timeout_s, self._metadata = tools.settings.generation_timeout_s, metadata
        self._verdict_timeout_s = tools.settings.verdict_timeout_s
        self._dropped = tools.metrics.speculation.dropped
        self.known: dict[WorkerId, WorkerDescription] = {job.verifier.worker_id: job.verifier}
        """Workers that were chosen for this generation."""
        if job.drafter is not None:
            self.known[job.drafter.worker_id] = job.drafter
        self.verifier = job.verifier
        """The one opened last."""
        self.drafter_id = WorkerId("")
        self.drafter_kind = ""
        self.opened = Generation()
        """Generation in which the open `Decode` stream was opened."""
        self._heard_s = time.monotonic()
        """When the verifier was last heard of, or opened."""
        self.arrivals: deque[tuple[int, float]] = deque()
        """Of verdicts whose tokens nobody has been shown yet: length of the session behind them, and when they came."""
        self._has_spoken = False
        self.last_error: OutriderError | None = None
        """Why a verifier was lost last."""
        self._decode: DecodeWire | None = None
        self._drafts: dict[Generation, DraftWire] = {}
        self._decode_opened_s = self._draft_opened_s = self._breakers.now_s()

    def open_verifier(self, command: OpenVerifier, tasks: asyncio.TaskGroup) -> None:
        """Open `Decode`."""
        worker, opened = self.known[command.worker_id], command.generation
        opening = _decode_open(self._job, command, self.scoring)
        wire = DecodeWire(opening, decode_request_to_proto, decode_response_from_proto)
        self._decode, self.verifier, self.opened, self._heard_s = wire, worker, opened, time.monotonic()
        self._decode_opened_s, self._has_spoken = self._breakers.now_s(), False
        self.arrivals.clear()
        stub = verify_pb2_grpc.VerifyServiceStub(self._placement.channels.to(worker.address, "verify"))
        run = wire.run(
            lambda: stub.Decode(timeout=self._timeout_s, metadata=self._metadata),
            lambda heard: self._from_verifier(opened, heard),
            lambda error: self._lose_verifier(opened, worker.worker_id, error),
        )
        tasks.create_task(run)

    def tell_verifier(self, command: TellVerifier) -> None:
        """Say something on `Decode`."""
        if self._decode is None:
            return
        try:
            self._decode.send(command.message)
        except Unavailable as error:
            self._lose_verifier(self.opened, self.verifier.worker_id, error)

    def close_verifier(self) -> None:
        """Close `Decode`."""
        if self._decode is not None:
            self._decode.close(DecodeClose())
            self._dropped.labels("malformed").inc(self._decode.num_malformed)
            self._decode = None

    def require_word(self, *, may_go_on: bool) -> None:
        """Give up a verifier that is silent for too long though it has something to do.

        Before its first word it may only have no room yet: that is no failure of the worker.

        Args:
            may_go_on: whether it may commit more tokens.
        """
        now_s = time.monotonic()
        if not (may_go_on or self.scoring.is_open):
            self._heard_s = now_s
        if now_s - self._heard_s <= self._verdict_timeout_s:
            return
        self._heard_s = now_s
        if self._decode is not None and self._has_spoken:
            self._breakers.failed(self.verifier.worker_id)
        self._feed(VerifierLost(self.opened, "silent"))

    def open_drafter(self, command: OpenDrafter, tasks: asyncio.TaskGroup) -> None:
        """Open `Draft`."""
        worker, generation = self.known[command.worker_id], command.epoch.generation
        opening = _draft_open(self._job, command, self.verifier, worker, self._kind())
        wire = DraftWire(opening, draft_request_to_proto, draft_response_from_proto)
        self._drafts[generation] = wire
        self.drafter_id, self.drafter_kind = worker.worker_id, only(worker, self._kind()) or worker.drafter
        self._draft_opened_s = self._breakers.now_s()
        stub = draft_pb2_grpc.DraftServiceStub(self._placement.channels.to(worker.address, "draft"))
        run = wire.run(
            lambda: stub.Draft(timeout=self._timeout_s, metadata=self._metadata),
            lambda heard: self._from_drafter(generation, heard),
            lambda error: self._lose_drafter(generation, worker.worker_id, error),
        )
        tasks.create_task(run)

    def _kind(self) -> str:
        """Return the one kind that should draft: asked for, or assigned in a split, which yields to a prediction."""
        job = self._job
        split = "" if job.state.prediction else self._placement.steering.policy.assigned(job.session_id)
        return job.state.drafter_kind or split

    def tell_drafter(self, command: TellDrafter) -> None:
        """Say something on `Draft`."""
        generation = command.commit.epoch.generation
        wire = self._drafts.get(generation)
        if wire is None:
            return
        try:
            wire.send(command.commit)
        except Unavailable:
            self._feed(DrafterLost(generation, "stuck"))

    def close_drafter(self, command: CloseDrafter) -> None:
        """Close `Draft`."""
        wire = self._drafts.pop(command.generation, None)
        if wire is not None:
            wire.close(DraftClose())
            self._dropped.labels("malformed").inc(wire.num_malformed)

    def close_all(self) -> None:
        """Close what is still open."""
        self.close_verifier()
        for generation in list(self._drafts):
            self.close_drafter(CloseDrafter(generation))

    # -- what comes back -------------------------------------------------------------------------------------------

    def _from_verifier(self, opened: Generation, heard: DecodeResponseMessage) -> None:
        if opened == self.opened:
            self._heard_s, self._has_spoken = time.monotonic(), True
        if isinstance(heard, Draining):
            self._feed(Drained(opened))
        elif isinstance(heard, PromptScores):
            self._scored(opened, heard)
        elif not isinstance(heard, Preparing):
            if opened == self.opened:
                self._breakers.succeeded(self.verifier.worker_id, self._decode_opened_s)
                if heard.token_ids:
                    self.arrivals.append((heard.start + len(heard.token_ids), self._heard_s))
            if heard.num_tested and heard.epoch.generation in self._drafts:
                self._breakers.succeeded(self.drafter_id, self._draft_opened_s)
            self._feed(VerdictArrived(opened, heard))

    def _scored(self, opened: Generation, scores: PromptScores) -> None:
        """Pass on what is new of the prompt's scores; where nothing else was asked for, that is all."""
        if opened != self.opened:
            return
        try:
            new = self.scoring.take(scores)
        except ProtocolError as error:
            self._feed(VerifierLost(opened, error.message))
            return
        if new is not None:
            self._feed(new)
        if not self.scoring.is_open and not self._job.state.max_tokens:
            self._feed(Complete())

    def _from_drafter(self, generation: Generation, heard: DraftResponseMessage) -> None:
        if isinstance(heard, Draining):
            self._feed(DrafterLost(generation, "draining"))
        else:
            self._feed(Reported(generation, heard))

    def _lose_verifier(self, opened: Generation, worker_id: WorkerId, error: OutriderError) -> None:
        log.info("verifier %s is lost: %s", worker_id, error)
        self.last_error = error
        if isinstance(error, WORKER_FAILURES):
            self._breakers.failed(worker_id)
        if opened == self.opened and isinstance(error, FailedPrecondition):
            # The one thing a verifier forbids: a stream that is older than another one of the same session.
            self._feed(Failed(LeaseLost(f"session {self._job.session_id} was taken over: {error}")))
        elif opened == self.opened and isinstance(error, REFUSALS):
            self._feed(Failed(error))
        else:
            self._feed(VerifierLost(opened, error.reason.lower()))

    def _lose_drafter(self, generation: Generation, worker_id: WorkerId, error: OutriderError) -> None:
        log.info("draft worker %s is lost: %s", worker_id, error)
        self._drafts.pop(generation, None)
        if isinstance(error, WORKER_FAILURES):
            self._breakers.failed(worker_id)
        self._feed(DrafterLost(generation, error.reason.lower()))


def _decode_open(job: Job, command: OpenVerifier, scoring: PromptScoring) -> DecodeOpen:
    state = job.state
    return DecodeOpen(
        session_id=job.session_id,
        generation=command.generation,
        token_ids=command.token_ids,
        classes=command.classes,
        mode=state.mode,
        sampling=state.sampling,
        key=state.key,
        sample_index=state.sample_index,
        prompt_len=state.prompt_len,
        num_logprobs=state.num_logprobs,
        num_prompt_logprobs=state.num_prompt_logprobs if scoring.is_open else -1,
        processed_logprobs=state.processed_logprobs,
        commit_limit=command.commit_limit,
        speculation=command.speculation,
        patience_s=command.patience_s,
        worker_id=command.drafter_id or WorkerId(""),
    )


def _draft_open(
    job: Job, command: OpenDrafter, verifier: WorkerDescription, worker: WorkerDescription, kind: str
) -> DraftOpen:
    state = job.state
    return DraftOpen(
        session_id=job.session_id,
        epoch=command.epoch,
        token_ids=command.token_ids,
        mode=state.mode,
        sampling=state.sampling,
        draft_key=job.draft_key,
        speculation=command.speculation,
        verifier_id=verifier.worker_id,
        verifier_address=verifier.address,
        sample_index=state.sample_index,
        prompt_len=state.prompt_len,
        max_len=job.final_len,
        prediction=state.prediction if worker.offers(PREDICTION) else (),
        drafter=only(worker, kind),
    )
