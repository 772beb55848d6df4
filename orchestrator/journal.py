"""The writing end of one session's log, and the lease that goes with it.

It keeps a mirror of the whole log and writes whatever of the mirror the store does not have yet: so an append that is
repeated, one that the store took without answering, and one whose forerunners a failover lost are the same case. Where
a failover has lost more than the log's tail, the lease or the whole session, that is written anew too.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

from orchestrator.job import Job, Settings
from outrider.errors import NotFound, StoreError, StoreUnavailable
from outrider.ids import FinishReason, TokenClass, TokenKind, WorkerId
from outrider.messages import TokenLogprobs
from outrider.store.errors import Fenced, LogGap, SessionNotFound
from outrider.store.records import KvLocation, Lease, LogSlice, SessionStatus
from outrider.store.sessions import SessionStore

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class Journal:
    """Appends in order, in the background; for one generation under one lease."""

    def __init__(self, store: SessionStore, job: Job, settings: Settings) -> None:
        """Take over what the log holds already.

        Args:
            store: the session store.
            job: the session, its log and its lease.
            settings: the lease's time, and how long the store may be away before the generation fails.
        """
        self._store, self._session_id, self._fence = store, job.session_id, job.fence
        self._lease, self._state = Lease(job.owner, job.fence, 0.0), job.state
        self._deadline_s, self._lease_ttl_s = settings.store_deadline_s, settings.lease_ttl_s
        self._token_ids, self._classes = list(job.token_ids), list(job.classes)
        self._kinds = bytearray(job.kinds or bytes(len(job.token_ids)))
        self._logged = len(job.token_ids)
        self._logprobs: list[TokenLogprobs] = []
        self._first = len(job.token_ids)
        """Position of the first token whose log-probabilities are in the mirror."""
        self._more = asyncio.Event()
        self._located: KvLocation | None = None

    def append(
        self, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs] = ()
    ) -> None:
        """Add generated tokens to the mirror; they are written in the background."""
        self._logprobs.extend(logprobs)
        self._token_ids.extend(token_ids)
        self._classes.extend([TokenClass.DECODE] * len(token_ids))
        self._kinds.extend(kinds or bytes(len(token_ids)))
        self._more.set()

    async def write(self, on_logged: Callable[[int, float], None]) -> None:
        """Write until cancelled.

        Args:
            on_logged: told the log's new length and the seconds that writing took, after every append.

        Raises:
            StoreUnavailable: the store was not reached for the deadline.
            LeaseLost: a newer owner has the session.
            StoreError: the store refused for another reason.
        """
        while True:
            await self._more.wait()
            self._more.clear()
            while self._logged < len(self._token_ids):
                started_s = time.monotonic()
                await self._append_rest()
                on_logged(self._logged, time.monotonic() - started_s)

    async def _append_rest(self) -> None:
        """Append all that the store lacks, trying again with growing pauses while it cannot be reached."""
        give_up_s = time.monotonic() + self._deadline_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self._logged = await self._append_once()
                return
            except LogGap as gap:
                log.warning("the log has lost its tail at %d; writing it again", gap.length)
                self._logged = gap.length
                if gap.length < self._state.prompt_len:
                    await self._restore(gap)
            except StoreUnavailable:
                if time.monotonic() + pause_s > give_up_s:
                    raise
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _append_once(self) -> int:
        """Append what follows the known end, into a session written anew if that is lost; return the log's length."""
        start = self._logged
        rest = self._token_ids[start:], self._classes[start:], bytes(self._kinds[start:])
        await self._put_logprobs(max(0, start - self._first))  # the mirror may grow meanwhile: after `rest` is taken
        try:
            return await self._store.append(self._session_id, self._fence, start, *rest)
        except (Fenced, SessionNotFound) as error:
            return await self._restore(error)

    async def _put_logprobs(self, start: int) -> None:
        """Write log-probabilities from the mirror's `start` on, which must be there before their tokens are logged."""
        rest = self._logprobs[start:]
        if rest:
            at = self._first + start - self._state.prompt_len
            try:
                await self._store.put_logprobs(self._session_id, self._fence, at, rest, self._state.num_logprobs)
            except (Fenced, SessionNotFound) as error:
                await self._restore(error)
                await self._store.put_logprobs(self._session_id, self._fence, at, rest, self._state.num_logprobs)

    async def _restore(self, error: Fenced | LogGap | SessionNotFound) -> int:
        """Write the session anew after a failover that lost it, its last turn or our lease; return the log's length.

        Raises:
            LeaseLost: nothing of the kind: a newer owner has the session.
            SessionNotFound: it was deleted.
            StoreError: the store is not reached, or holds another log.
        """
        if isinstance(error, Fenced) and error.current >= self._fence:
            raise error
        mirror = LogSlice(0, tuple(self._token_ids), tuple(self._classes), len(self._token_ids), bytes(self._kinds))
        length = await self._store.restore(self._session_id, self._lease, self._state, mirror, self._lease_ttl_s)
        log.warning("the store had lost what this session rests on; it is written anew (%s)", error)
        return length

    async def keep_lease(self, resident: Callable[[], KvLocation]) -> None:
        """Renew the lease within every third of its time until cancelled, and note where the session's KV lies.

        An outage is outlived: what is written is fenced all the same.

        Args:
            resident: tells which KV the present verifier holds.

        Raises:
            LeaseLost: a newer owner has the session.
            SessionNotFound: it was deleted.
            StoreError: the store refuses.
        """
        while True:
            # Generations that began together would all renew in one moment, and delay everybody's rounds.
            await asyncio.sleep(self._lease_ttl_s / 3 * random.uniform(0.5, 1.0))
            try:
                await self._renew()
                await self._locate(resident())
            except StoreUnavailable as error:
                log.debug("the lease is not renewed: %s", error)

    async def _renew(self) -> None:
        try:
            await self._store.renew_lease(self._session_id, self._fence, self._lease_ttl_s)
        except (Fenced, SessionNotFound) as error:
            await self._restore(error)

    async def _locate(self, location: KvLocation) -> None:
        """Enter a worker's KV into the session's directory, if that has changed."""
        if location != self._located:
            await self._store.put_kv_location(self._session_id, self._fence, location)
            self._located = location

    async def finish(self, reason: FinishReason, resident: KvLocation, drafter_id: WorkerId) -> None:
        """Note that the generation is over and where its KV lies, and give the lease up.

        One that was called off stays resumable. Failing here changes nothing that was promised: the tokens are in the
        log, and whoever opens the session finds its end in them.

        Args:
            reason: why it is over.
            resident: the KV that its verifier holds.
            drafter_id: its last draft worker.
        """
        try:
            if reason is not FinishReason.CANCELLED:
                await self._store.update_state(
                    self._session_id,
                    self._fence,
                    status=SessionStatus.FINISHED,
                    finish_reason=reason,
                    verifier_id=resident.worker_id,
                    draft_id=drafter_id,
                )
            await self._locate(resident)
        except (NotFound, StoreError) as error:
            log.warning("the end is not in the store: %s", error)
        await self.release()

    async def release(self) -> None:
        """Give the lease up, if it is still ours."""
        try:
            await self._store.release_lease(self._session_id, self._fence)
        except (NotFound, StoreError) as error:
            log.debug("the lease is not released: %s", error)
