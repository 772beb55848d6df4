"""From a request, or a stored session, to a generation that is placed, in the log, and ready to run.

Every generation has a lease of its own, under a fresh owner name: its fencing number is therefore higher than that of
any generation before it, and so are the epochs its workers see.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.commit import Commit, Ends, visible
from orchestrator.drafting import Drafting, choose_drafting
from orchestrator.events import Outcome
from orchestrator.job import Job, Tools
from orchestrator.language import Language
from orchestrator.placement import Room
from orchestrator.quotas import Ticket
from orchestrator.replaying import can_redraw, check_position, replay, told
from orchestrator.requests import Defaults, check, check_length, choose_mode, session_key, with_ends
from orchestrator.text import Detokenizer
from orchestrator.tokenizing import Tokenizing
from outrider.errors import DataLoss, InvalidRequest, OutriderError, Unavailable
from outrider.generation import (
    Chunk,
    Finished,
    GenerationEvent,
    GenerationRequest,
    ResumeFrom,
    Started,
    Usage,
)
from outrider.grammar import Grammars
from outrider.ids import FinishReason, SessionId, TokenClass, WorkerId
from outrider.messages import TokenLogprobs, WorkerDescription
from outrider.store.errors import SessionNotFound
from outrider.store.records import NO_WORKER, Lease, LogSlice, SessionState, SessionStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A generation that is ready to run."""

    job: Job
    commit: Commit


@dataclass(frozen=True, slots=True)
class Over:
    """A session whose generation has ended: all that is left to tell."""

    events: tuple[GenerationEvent, ...]


class Opening:
    """Opens generations; one per process."""

    def __init__(self, language: Language, tools: Tools, defaults: Defaults, name: str) -> None:
        """Keep what is needed.

        Args:
            language: of the served model.
            tools: what generations share.
            defaults: for requests that do not say.
            name: of this process; first part of the names that leases are held under.
        """
        self._language, self._tools, self._defaults, self._name = language, tools, defaults, name
        self._grammars = Grammars(language.encoder, language.vocabulary.size)
        self._tokenizing = Tokenizing(language)

    # -- a new generation ------------------------------------------------------------------------------------------

    async def begin(self, request: GenerationRequest, started_s: float, ticket: Ticket) -> Opened | Over:
        """Check a request, place it, and write its prompt; a repeat of the session's last request goes on with it.

        Args:
            request: what is asked for.
            started_s: when it arrived, on the monotonic clock.
            ticket: of the caller, who will own a new session, and must own an old one.

        Raises:
            InvalidRequest: a field's value is not allowed.
            NotFound: it names a session that does not exist, or is somebody else's.
            LimitReached: the caller has no tokens left.
            FailedPrecondition: another generation of the session is under way.
            Unavailable: no verifier can be reached.
            StoreError: the session could not be written.
        """
        self._require_model(request.model)
        request = with_ends(request, self._language.end_ids)
        check(request, self._language.vocabulary)
        if request.sampling.grammar is not None:
            await asyncio.to_thread(self._grammars.begin, request.sampling)
        if request.session_id:
            return await self._continue(request, started_s, ticket)
        prompt = await self._tokenizing.prompt(request.prompt)
        room = self._room(request, len(prompt))
        verifier = await self._tools.placement.choose_verifier(self._language.model, room=room)
        state = await self._state(request, len(prompt), verifier, ticket)
        session_id, classes = ticket.session_id, _prompt_classes(len(prompt))
        state, drafting = await self._drafting(state, len(prompt), verifier, {}, session_id)
        await ticket.reserve(len(prompt), len(prompt), len(prompt) + state.max_tokens)
        lease = await self._tools.store.create(
            session_id, state, prompt, classes, self._owner(), self._tools.settings.lease_ttl_s
        )
        logged = LogSlice(0, prompt, classes, len(prompt))
        return self._opened(request, _Found(session_id, lease, state, logged, verifier, drafting), started_s)

    async def _continue(self, request: GenerationRequest, started_s: float, ticket: Ticket) -> Opened | Over:
        """Begin a session's next turn, unless this request has begun it before."""
        session_id = request.session_id
        await self.require_owner(session_id, ticket.caller.key_id)
        if request.request_id:
            last = await self._tools.store.read_state(session_id)
            if last.request_id == request.request_id:
                return await self.resume(ResumeFrom(session_id, last.prompt_len), started_s, ticket)
        async with self._lease(session_id, force=False) as lease:
            return await self._begin_turn(request, lease, started_s, ticket)

    async def _begin_turn(self, request: GenerationRequest, lease: Lease, started_s: float, ticket: Ticket) -> Opened:
        """Append a prompt to the log of an existing session."""
        store, session_id = self._tools.store, request.session_id
        before, logged = await asyncio.gather(store.read_state(session_id), store.read_log(session_id))
        self._require_model(before.model)
        prompt = await self._tokenizing.prompt(request.prompt, logged.token_ids)
        length = logged.length + len(prompt)
        resident = await self._resident(session_id, before)
        verifier = await self._tools.placement.choose_verifier(
            self._language.model, resident=resident, room=self._room(request, length)
        )
        state = await self._state(request, length, verifier, ticket)
        state, drafting = await self._drafting(state, length, verifier, resident, session_id)
        classes = _prompt_classes(len(prompt))
        await ticket.reserve(length, length, length + state.max_tokens)
        await store.begin_turn(session_id, lease.fence, logged.length, prompt, classes, state)
        logged = LogSlice(0, logged.token_ids + prompt, logged.classes + classes, length)
        return self._opened(request, _Found(session_id, lease, state, logged, verifier, drafting), started_s)

    def _opened(self, request: GenerationRequest, found: "_Found", started_s: float) -> Opened:
        commit = self._commit(found.state, found.logged.token_ids, 0)
        return Opened(found.job(told=found.drafting.notices, started_s=started_s), commit)

    async def _state(
        self, request: GenerationRequest, prompt_len: int, verifier: WorkerDescription, ticket: Ticket
    ) -> SessionState:
        """Return the state that a request begins with."""
        mode = choose_mode(request, self._defaults)
        return SessionState(
            model=self._language.model,
            mode=mode,
            prompt_len=prompt_len,
            max_tokens=check_length(
                prompt_len, request.max_tokens, verifier.context_len, self._defaults, request.sampling.min_tokens
            ),
            sampling=request.sampling,
            seed=request.seed,
            key=session_key(mode, request.seed),
            sample_index=request.sample_index,
            num_logprobs=-1 if request.num_logprobs is None else request.num_logprobs,
            num_prompt_logprobs=-1 if request.num_prompt_logprobs is None else request.num_prompt_logprobs,
            processed_logprobs=request.processed_logprobs,
            stop_strings=request.stop,
            stop_ids=tuple(sorted({*request.stop_token_ids, *(() if request.ignore_eos else self._language.end_ids)})),
            speculation=request.speculation,
            drafter_kind=request.drafter,
            prediction=await self._tokenizing.prediction(request.prediction),
            return_origin=request.return_token_origin,
            request_id=request.request_id,
            skip_special_tokens=request.skip_special_tokens,
            fingerprint=verifier.fingerprint,
            verifier_id=verifier.worker_id,
            owner=ticket.caller.key_id,
        )

    # -- a stored one ----------------------------------------------------------------------------------------------

    async def resume(self, asked: ResumeFrom, started_s: float, ticket: Ticket) -> Opened | Over:
        """Take a session over and go on from its log.

        What the log holds from the position on is told again, its text derived again.

        Args:
            asked: the session, and from where on.
            started_s: when the call arrived, on the monotonic clock.
            ticket: of the caller, who must own the session.

        Raises:
            NotFound: there is no such session, or it is somebody else's.
            LimitReached: the caller has no tokens left.
            InvalidRequest: the position is before the generation or past where it must have ended.
            DataLoss: tokens that were shown are lost, and another draw would give others.
            Unavailable: no verifier can be reached.
            StoreError: the session could not be read.
        """
        await self.require_owner(asked.session_id, ticket.caller.key_id)
        async with self._lease(asked.session_id, force=True) as lease:
            store = self._tools.store
            state, logged = await asyncio.gather(store.read_state(asked.session_id), store.read_log(asked.session_id))
            check_position(asked.next_position, state)
            commit = self._commit(state, logged.token_ids[: state.prompt_len], asked.next_position)
            logprobs = await self._logprobs(asked.session_id, state)
            outcome = await asyncio.to_thread(replay, commit, state, logged, logprobs)  # thousands of tokens, perhaps
            seen = visible(outcome.chunk, asked.next_position)
            if state.status is SessionStatus.FINISHED or outcome.finish is not None:
                return await self._over(asked.session_id, lease, state, outcome, seen)
            resident = await self._resident(asked.session_id, state)
            verifier = await self._verifier_again(asked.session_id, state, resident)
            if asked.next_position > logged.length and not can_redraw(state, verifier):
                raise DataLoss(
                    f"the log of session {asked.session_id} ends at {logged.length}: what was shown from there to "
                    f"{asked.next_position} is lost, and would be drawn differently"
                )
            await ticket.reserve(0, logged.length, state.prompt_len + state.max_tokens)
            state, drafting = await self._drafting(state, logged.length, verifier, resident, asked.session_id)
            found = _Found(asked.session_id, lease, state, logged, verifier, drafting)
            greeting = (*drafting.notices, *(() if seen is None else (told(seen, state),)))
            return Opened(found.job(next_position=asked.next_position, told=greeting, started_s=started_s), commit)

    async def _over(
        self, session_id: SessionId, lease: Lease, state: SessionState, outcome: Outcome, seen: Chunk | None
    ) -> Over:
        """Tell the rest of a generation whose end is in the log."""
        store, reason = self._tools.store, outcome.finish or state.finish_reason or FinishReason.CANCELLED
        if state.status is not SessionStatus.FINISHED:
            await store.update_state(session_id, lease.fence, status=SessionStatus.FINISHED, finish_reason=reason)
        await store.release_lease(session_id, lease.fence)
        usage = Usage(state.prompt_len, len(outcome.chunk.token_ids))
        started = Started(session_id, state.prompt_len, state.mode, await self._exactness_of(state), state.model)
        finished = Finished(reason, outcome.matched, usage)
        return Over((started, finished) if seen is None else (started, told(seen, state), finished))

    async def _exactness_of(self, state: SessionState) -> str:
        """Return what the verifier of a finished generation promises; nothing more than needed if it is gone."""
        found = await self._tools.placement.verifiers(state.model)
        promises = [worker.exactness for worker in found if worker.worker_id == state.verifier_id]
        return promises[0] if promises else "distribution"

    # -- parts of both ---------------------------------------------------------------------------------------------

    async def require_owner(self, session_id: SessionId, owner: str) -> SessionState:
        """Return a session's state; before the lease, which others must be able neither to take nor to see.

        Raises:
            SessionNotFound: there is no such session, or it is somebody else's: the answer is the same.
        """
        state = await self._tools.store.read_state(session_id)
        if state.owner != owner:
            raise SessionNotFound.of(session_id)
        return state

    @asynccontextmanager
    async def _lease(self, session_id: SessionId, *, force: bool) -> AsyncIterator[Lease]:
        """Hold a session's lease; it is given up if the block fails, and kept if not."""
        ttl_s = self._tools.settings.lease_ttl_s
        lease = await self._tools.store.acquire_lease(session_id, self._owner(), ttl_s, force)
        try:
            yield lease
        except BaseException:
            try:
                await self._tools.store.release_lease(session_id, lease.fence)
            except OutriderError as error:
                log.debug("the lease of session %s runs out by itself: %s", session_id, error)
            raise

    def _owner(self) -> str:
        return f"{self._name}/{secrets.token_hex(8)}"

    def _require_model(self, model: str) -> None:
        if model not in ("", self._language.model):
            raise InvalidRequest("model", model, f"{self._language.model!r}, or nothing")

    def _room(self, request: GenerationRequest, prompt_len: int) -> Room:
        """Return what a request needs of a verifier's context."""
        max_tokens = request.max_tokens or self._defaults.max_tokens or 0
        return Room(prompt_len + 1, prompt_len + max_tokens)

    async def _verifier_again(
        self, session_id: SessionId, state: SessionState, resident: Mapping[WorkerId, int]
    ) -> WorkerDescription:
        """Choose a verifier for a generation that has begun: it must hold what was promised, to the end.

        One with the engine that it began on is taken if there is one, for its text is the same there bit for bit.

        Raises:
            Unavailable: there is none now.
        """
        room = Room(state.prompt_len + state.max_tokens)
        try:
            return await self._tools.placement.choose_verifier(
                self._language.model, resident=resident, fingerprint=state.fingerprint, room=room
            )
        except InvalidRequest as error:
            raise Unavailable(f"no verifier can hold session {session_id} to its end: {error}") from error

    async def _logprobs(self, session_id: SessionId, state: SessionState) -> Sequence[TokenLogprobs]:
        """Return the log-probabilities that were told so far, if any were asked for."""
        if state.num_logprobs < 0:
            return ()
        return await self._tools.store.read_logprobs(session_id, state.num_logprobs)

    async def _resident(self, session_id: SessionId, state: SessionState) -> dict[WorkerId, int]:
        """Return which worker holds how many tokens of a session's KV.

        Those that a generation began on hold its prompt at least, also where nobody lived to write that down.
        """
        locations = await self._tools.store.kv_locations(session_id)
        begun = {worker_id: state.prompt_len for worker_id in (state.verifier_id, state.draft_id) if worker_id}
        return begun | {location.worker_id: location.prefix_len for location in locations}

    async def _drafting(
        self,
        state: SessionState,
        length: int,
        verifier: WorkerDescription,
        resident: Mapping[WorkerId, int],
        session_id: SessionId,
    ) -> tuple[SessionState, Drafting]:
        """Choose a draft worker for what is left behind `length`, or say why there is none; note it in the state."""
        drafting = Drafting(None, "configured")
        if self._tools.settings.limits.speculates:
            drafting = await choose_drafting(self._tools.placement, state, length, verifier, resident, session_id)
        return replace(state, draft_id=drafting.worker.worker_id if drafting.worker else NO_WORKER), drafting

    def _commit(self, state: SessionState, prompt: Sequence[int], mute_until: int) -> Commit:
        ends = Ends(
            final_len=state.prompt_len + state.max_tokens,
            stop_ids=frozenset(state.stop_ids),
            eos_ids=self._language.end_ids,
            stop_strings=state.stop_strings,
            min_len=state.prompt_len + state.sampling.min_tokens,
        )
        language = self._language
        decoder = language.decoder if state.skip_special_tokens else language.full_decoder
        return Commit(ends, Detokenizer(decoder, prompt), mute_until)


@dataclass(frozen=True, slots=True)
class _Found:
    """A session with its lease, its log and its workers."""

    session_id: SessionId
    lease: Lease
    state: SessionState
    logged: LogSlice
    verifier: WorkerDescription
    drafting: Drafting

    def job(self, told: tuple[GenerationEvent, ...] = (), **rest: Any) -> Job:
        """Return the generation.

        Args:
            told: what the client is told at once.
            **rest: further fields of `Job`.
        """
        state = self.state
        started = Started(self.session_id, state.prompt_len, state.mode, self.verifier.exactness, state.model)
        return Job(
            session_id=self.session_id,
            fence=self.lease.fence,
            owner=self.lease.owner,
            state=state,
            token_ids=self.logged.token_ids,
            classes=self.logged.classes,
            kinds=self.logged.kinds,
            verifier=self.verifier,
            drafter=self.drafting.worker,
            off_reason=self.drafting.off_reason,
            greeting=(started, *told),
            **rest,
        )


def _prompt_classes(length: int) -> tuple[TokenClass, ...]:
    """Return the classes of a turn's prompt: its last token goes through the model with the first run that follows."""
    return (*(TokenClass.PROMPT,) * (length - 1), *(TokenClass.DECODE,) * min(length, 1))
