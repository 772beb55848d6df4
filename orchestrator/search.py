"""Finds workers for a running generation: another verifier within a deadline, a draft worker whenever there is one."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection

from orchestrator.events import DrafterChosen, VerifierChosen, VerifierLost
from orchestrator.job import OFF_BY_CHOICE, Job, Tools
from orchestrator.peers import Feed, Peers
from orchestrator.placement import Room, Wanted
from outrider.errors import InvalidRequest, StoreUnavailable, Unavailable
from outrider.ids import Generation, WorkerId

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
MAX_REFUSALS = 3
"""A draft worker that refuses a session, or fails at it, so often is left out for the rest of the generation."""

TRANSIENT = ("drafter_unavailable", "drafter_deadline_exceeded", "drafter_cancelled", "drafter_resource_exhausted")
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
            self._placement.failed(worker_id)
        elif off_reason not in TRANSIENT:
            self._refusals[worker_id] += 1
            if self._refusals[worker_id] >= MAX_REFUSALS:
                self._unwanted.add(worker_id)

    def due(self, off_reason: str) -> bool:
        """Whether a draft worker should be looked for again now.

        Args:
            off_reason: why nothing is drafted; empty or "policy" while a draft worker is attached.
        """
        if off_reason in ("", "policy", *OFF_BY_CHOICE) or self._looking:
            return False
        return time.monotonic() - self._looked_s >= self._settings.drafter_retry_s

    async def drafter(self, length: int, exclude: Collection[WorkerId] = ()) -> None:
        """Look once for a draft worker, and say what was found.

        Args:
            length: tokens it must hold.
            exclude: workers not to take this time.
        """
        self._looking, self._looked_s = True, time.monotonic()
        try:
            wanted = Wanted(self._job.drafter_kind, length, {*exclude, *self._unwanted})
            worker, _ = await self._placement.choose_drafter(self._peers.verifier, wanted)
        except StoreUnavailable as error:
            log.debug("no search for a draft worker: %s", error)
            worker = None
        finally:
            self._looking = False
        if worker is not None:
            self._peers.known[worker.worker_id] = worker
            self._feed(DrafterChosen(worker.worker_id))

    async def hand_over(self, opened: Generation) -> None:
        """Give up a verifier that is stopping if there is another one; else it finishes within its grace."""
        leaving = self._peers.verifier.worker_id
        try:
            found = await self._placement.verifiers(self._job.state.model)
        except StoreUnavailable as error:
            log.debug("no search for another verifier: %s", error)
            return
        final_len = self._job.final_len
        if any(worker.worker_id != leaving and worker.context_len >= final_len for worker in found):
            self._feed(VerifierLost(opened, "draining"))

    async def verifier(self, exclude: Collection[WorkerId]) -> None:
        """Look for a verifier until there is one or the deadline has passed, and say what was found.

        It must hold the generation to its end, for that has been promised: one with less context is no verifier here.

        Args:
            exclude: workers to avoid; taken when nothing else comes.
        """
        give_up_s = time.monotonic() + self._settings.verifier_deadline_s
        pause_s, model, room = FIRST_PAUSE_S, self._job.state.model, Room(self._job.final_len)
        while True:
            try:
                worker = await self._placement.choose_verifier(model, exclude, room=room)
            except (InvalidRequest, Unavailable, StoreUnavailable) as error:
                if time.monotonic() + pause_s > give_up_s:
                    log.warning("no verifier was found: %s", error)
                    self._feed(VerifierChosen(None))
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            else:
                self._peers.known[worker.worker_id] = worker
                self._feed(VerifierChosen(worker.worker_id))
                return
