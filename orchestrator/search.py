"""Finds workers for a running generation: another verifier within a deadline, a draft worker whenever there is one."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection

from orchestrator.events import DrafterChosen, VerifierChosen, VerifierLost
from orchestrator.job import OFF_BY_CHOICE, Job, Tools
from orchestrator.peers import Feed, Peers
from orchestrator.placement import PREDICTION, Room, Wanted
from orchestrator.tuning import REASONS
from outrider.backoff import Backoff
from outrider.errors import InvalidRequest, StoreError, Unavailable
from outrider.ids import Generation, WorkerId
from outrider.messages import WorkerDescription

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Of the search for a verifier."""
HAND_OVER_PAUSE_S = 0.5
"""Pause between two looks for somebody to take over from a verifier that is stopping."""
MAX_REFUSALS = 3
"""A draft worker that refuses a session, or fails at it, so often is left out for the rest of the generation."""

TRANSIENT = (
    "drafter_unavailable",
    "drafter_handshake_failed",
    "drafter_deadline_exceeded",
    "drafter_cancelled",
    "drafter_resource_exhausted",
)
"""Losses of a draft worker that pass by themselves."""


class Search:
    """The searches of one generation; at most one of each kind at a time."""

    def __init__(self, job: Job, tools: Tools, peers: Peers, feed: Feed) -> None:
        """Search for nothing yet; the arguments are the driver's."""
        self._job, self._placement, self._settings = job, tools.placement, tools.settings
        self._peers, self._feed = peers, feed
        self._unwanted: set[WorkerId] = set()
        self._refusals: Counter[WorkerId] = Counter()
        self._looked_s = time.monotonic()
        self._looking = False

    def lost(self, worker_id: WorkerId, off_reason: str) -> None:
        """Avoid a draft worker that was lost: for the generation if it sent garbage, else until it answers again.

        A broken stream is a failure already when it is told here. A refusal is none: others may get on with the worker.
        """
        if off_reason == "drafter_quarantined":
            self._unwanted.add(worker_id)
        elif off_reason in ("drafter_slow", "drafter_stuck", "drafter_draining"):
            self._placement.breakers.failed(worker_id)
        elif off_reason not in TRANSIENT:
            self._refusals[worker_id] += 1
            if self._refusals[worker_id] >= MAX_REFUSALS:
                self._unwanted.add(worker_id)

    def due(self, off_reason: str) -> bool:
        """Whether a draft worker should be looked for again now.

        Args:
            off_reason: why nothing is drafted; empty, or a reason of the policy's, while a draft worker is attached.
        """
        if off_reason in ("", *REASONS, *OFF_BY_CHOICE) or self._looking:
            return False
        return time.monotonic() - self._looked_s >= self._settings.drafter_retry_s

    def as_now(self, length: int) -> Wanted:
        """Return what is needed of a draft worker that takes the place of the present one, with `length` tokens."""
        state, worker = self._job.state, self._peers.known.get(self._peers.drafter_id)
        follows = state.prediction and worker is not None and worker.offers(PREDICTION)
        drafter = state.drafter_kind or (PREDICTION if follows else "")
        return Wanted(drafter, length, session_id=self._job.session_id)

    async def drafter(self, length: int, exclude: Collection[WorkerId] = ()) -> None:
        """Look once for a draft worker, and say what was found.

        Args:
            length: tokens it must hold.
            exclude: workers not to take this time.
        """
        self._looking, self._looked_s = True, time.monotonic()
        try:
            state, unwanted = self._job.state, {*exclude, *self._unwanted}
            predicted, insists = bool(state.prediction), state.speculation.gamma is not None
            wanted = Wanted(
                state.drafter_kind, length, unwanted, predicted=predicted, session_id=self._job.session_id,
                insists=insists, again=True,
            )  # fmt: skip
            worker, _ = await self._placement.choose_drafter(self._peers.verifier, wanted)
        except StoreError as error:
            log.debug("no search for a draft worker: %s", error)
            worker = None
        finally:
            self._looking = False
        if worker is not None:
            self._peers.known[worker.worker_id] = worker
            self._feed(DrafterChosen(worker.worker_id))

    async def hand_over(self, opened: Generation) -> None:
        """Give up a verifier that is stopping as soon as there is another one; else it finishes within its grace.

        Args:
            opened: its stream; one that is over leaves nothing to look for.
        """
        # Nothing announces verifiers.
        while opened == self._peers.opened and not await self._has_other(self._peers.verifier):  # noqa: ASYNC110
            await asyncio.sleep(HAND_OVER_PAUSE_S)
        self._feed(VerifierLost(opened, "draining"))

    async def _has_other(self, leaving: WorkerDescription) -> bool:
        """Whether another verifier could take the generation to its end."""
        try:
            found = await self._placement.verifiers(self._job.state.model, again=True)
        except StoreError as error:
            log.debug("no search for another verifier: %s", error)
            return False
        final_len, name = self._job.final_len, leaving.worker_id
        return any(worker.worker_id != name and worker.context_len >= final_len for worker in found)

    async def verifier(self, exclude: Collection[WorkerId]) -> None:
        """Look for a verifier until there is one or the deadline has passed, and say what was found.

        It must hold the generation to its end, for that has been promised: one with less context is no verifier here.

        Args:
            exclude: workers to avoid; taken when nothing else comes.
        """
        give_up_s = time.monotonic() + self._settings.verifier_deadline_s
        backoff, state, room = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), self._job.state, Room(self._job.final_len)
        while True:
            try:
                worker = await self._placement.choose_verifier(
                    state.model, exclude, fingerprint=state.fingerprint, room=room
                )
            except (InvalidRequest, Unavailable, StoreError) as error:
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s > give_up_s:
                    log.warning("no verifier was found: %s", error)
                    self._feed(VerifierChosen(None))
                    return
                await asyncio.sleep(pause_s)
            else:
                self._peers.known[worker.worker_id] = worker
                self._feed(VerifierChosen(worker.worker_id))
                return
