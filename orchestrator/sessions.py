"""All generations of one process: admits, runs and calls them off, and answers what is asked about sessions."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from orchestrator.admission import RESUMING, Admission, Asked, Place
from orchestrator.driver import Driver
from orchestrator.events import Cancelled, Failed
from orchestrator.job import Tools
from orchestrator.language import Language
from orchestrator.opening import Opened, Opening, Over
from orchestrator.quotas import Ticket
from orchestrator.requests import Defaults
from outrider.codec.checks import MAX_PRIORITY
from outrider.errors import LeaseLost, Unavailable
from outrider.generation import GenerationEvent, GenerationRequest, ModelDescription, ResumeFrom, SessionSummary
from outrider.ids import SessionId
from outrider.store.errors import SessionNotFound
from outrider.store.records import SessionStatus

log = logging.getLogger(__name__)

HAND_OVER_S = 0.2
"""How often a stopping process looks for generations that have been opened since it handed the others over."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What this process allows."""

    defaults: Defaults = field(default_factory=Defaults)
    max_sessions: int = 256
    """Generations at once."""
    name: str = "orchestrator"
    """Of the process; leases are held under names that begin with it."""
    max_waiting: int = 256
    """Generations that wait for a place; one more is refused."""
    max_wait_s: float = 30.0
    """Longest wait for a place."""


class Sessions:
    """All generations of one process. An async context manager: leaving it calls off what runs."""

    def __init__(self, language: Language, tools: Tools, policy: Policy) -> None:
        """Keep what generations need.

        Args:
            language: of the served model.
            tools: what generations share.
            policy: what is allowed.
        """
        self.language = language
        self._tools, self._policy = tools, policy
        self._opening = Opening(language, tools, policy.defaults, policy.name)
        self._running: dict[SessionId, Driver] = {}
        self._opening_now = 0
        self._admission = Admission(
            policy.max_sessions,
            max_waiting=policy.max_waiting,
            max_wait_s=policy.max_wait_s,
            registry=tools.metrics.registry,
        )
        self._exits = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        """Begin to take requests."""
        self._tasks = await self._exits.enter_async_context(asyncio.TaskGroup())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Call off what runs, and wait for its end."""
        self._draining = True
        self._admission.close()
        for driver in self._running.values():
            driver.feed(Cancelled())
        self._tasks = None  # what is being opened still comes too late
        await self._exits.aclose()

    def __len__(self) -> int:
        """Return how many generations run or are being opened."""
        return len(self._running) + self._opening_now

    async def drain(self, patience_s: float) -> None:
        """Take nothing new, wait until nothing runs, and hand over what still runs after a while.

        Args:
            patience_s: how long generations may go on.
        """
        self._draining = True
        self._admission.close()
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            log.info("%d generations are handed over", len(self))
            while len(self):
                for driver in self._running.values():
                    driver.hand_over()
                with suppress(TimeoutError):
                    async with asyncio.timeout(HAND_OVER_S):
                        await self._idle.wait()

    @property
    def tools(self) -> Tools:
        """What generations share."""
        return self._tools

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken any more."""
        return self._draining

    def running(self) -> list[Driver]:
        """Return the generations under way."""
        return list(self._running.values())

    def movable(self) -> list[Driver]:
        """Return the generations that have a draft worker."""
        return [driver for driver in self._running.values() if driver.drafter_id]

    # -- generations -----------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerationRequest, ticket: Ticket | None = None
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Run a request; leaving the iterator early calls it off.

        Args:
            request: what is asked for.
            ticket: of the caller; none: anybody's.

        Raises:
            OutriderError: it is refused, or failed.
        """
        started_s, ticket = time.monotonic(), ticket or Ticket()
        with self._tools.metrics.refusing():
            async with self._admitted(_asked(ticket, request.priority, request.max_wait_s)) as place:
                ticket.waited_s = time.monotonic() - started_s
                opened = await self._opening.begin(request, started_s, ticket)
                driver = self._launch(opened, place) if isinstance(opened, Opened) else None
        if driver is None:
            place.give_back()
        async with aclosing(self._told(opened, driver)) as events:
            async for event in events:
                yield event

    async def resume(self, asked: ResumeFrom, ticket: Ticket | None = None) -> AsyncGenerator[GenerationEvent, None]:
        """Go on with a generation whose stream was lost, wherever it ran.

        Args:
            asked: the session, and from where on.
            ticket: of the caller; none: anybody's.

        Raises:
            OutriderError: there is nothing to go on with, what was shown is lost, or it failed.
        """
        started_s, ticket = time.monotonic(), ticket or Ticket()
        with self._tools.metrics.refusing():
            before = self._owned(asked.session_id, ticket.caller.key_id)
            if before is not None:
                # Before a place is waited for: it has the one that this call needs.
                before.feed(Failed(LeaseLost(f"session {asked.session_id} is resumed by another call")))
            async with self._admitted(_asked(ticket, RESUMING, None, may=RESUMING)) as place:
                ticket.waited_s = time.monotonic() - started_s
                opened = await self._opening.resume(asked, started_s, ticket)
                driver = self._launch(opened, place) if isinstance(opened, Opened) else None
        if driver is None:
            place.give_back()
        async with aclosing(self._told(opened, driver)) as events:
            async for event in events:
                yield event

    def _owned(self, session_id: SessionId, owner: str) -> Driver | None:
        """Return the generation of a session that runs here, None if none does.

        Raises:
            SessionNotFound: the session is somebody else's.
        """
        driver = self._running.get(session_id)
        if driver is not None and driver.owner != owner:
            raise SessionNotFound.of(session_id)
        return driver

    @asynccontextmanager
    async def _admitted(self, asked: Asked) -> AsyncIterator[Place]:
        """Wait for a place; it is whoever's is opened in the block."""
        if self._draining or self._tasks is None:
            raise Unavailable("the orchestrator is stopping")
        async with self._admission.place(asked) as place:
            self._opening_now += 1
            self._idle.clear()
            try:
                yield place
            finally:
                self._opening_now -= 1
                self._note_idle()

    def _launch(self, opened: Opened, place: Place) -> Driver:
        if self._tasks is None:
            raise Unavailable("the orchestrator is stopping")
        session_id = opened.job.session_id
        self._take_over(session_id, opened.job.fence)
        driver = self._running[session_id] = Driver(opened.job, opened.commit, self._tools)

        def forget(_: object) -> None:
            place.give_back()
            if self._running.get(session_id) is driver:
                del self._running[session_id]
            self._note_idle()

        self._tasks.create_task(driver.run(), name=f"generation {session_id}").add_done_callback(forget)
        return driver

    def _take_over(self, session_id: SessionId, fence: int) -> None:
        """End a generation of the session that began before the lease `fence`; calls may be opened in another order.

        Raises:
            LeaseLost: one under a newer lease runs already.
        """
        before = self._running.get(session_id)
        if before is None:
            return
        taken = LeaseLost(f"session {session_id} is resumed by another call")
        if before.fence > fence:
            raise taken
        before.feed(Failed(taken))

    def _note_idle(self) -> None:
        if not len(self):
            self._idle.set()

    @staticmethod
    async def _told(opened: Opened | Over, driver: Driver | None) -> AsyncGenerator[GenerationEvent, None]:
        """Yield what the client is told; whoever leaves early calls the generation off."""
        if isinstance(opened, Over):
            for told in opened.events:
                yield told
        if driver is None:
            return
        try:
            async with aclosing(driver.events()) as events:
                async for event in events:
                    yield event
        finally:
            driver.feed(Cancelled())

    # -- what is asked about sessions ------------------------------------------------------------------------------

    async def summary(
        self, session_id: SessionId, *, owner: str = "", include_token_ids: bool = False
    ) -> SessionSummary:
        """Return what is stored about a session.

        Args:
            session_id: the session.
            owner: id of the key of whoever asks.
            include_token_ids: whether to return its log.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        state = await self._opening.require_owner(session_id, owner)
        logged = await self._tools.store.read_log(session_id)
        return SessionSummary(
            session_id,
            state.model,
            state.status is SessionStatus.RUNNING,
            logged.length,
            state.prompt_len,
            state.mode,
            logged.token_ids if include_token_ids else (),
        )

    async def delete(self, session_id: SessionId, *, owner: str = "") -> None:
        """Forget a session; a generation of it is called off.

        Args:
            session_id: the session.
            owner: id of the key of whoever asks.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        driver = self._owned(session_id, owner)
        if driver is None:
            await self._opening.require_owner(session_id, owner)
        else:
            driver.feed(Cancelled())
        if not await self._tools.store.delete(session_id) and driver is None:
            raise SessionNotFound.of(session_id)

    async def models(self) -> list[ModelDescription]:
        """Return the models that can be asked for now."""
        language, placement = self.language, self._tools.placement
        verifiers = await placement.verifiers(language.model)
        offered = await placement.offered(verifiers[0]) if verifiers else []
        return [
            ModelDescription(
                language.model,
                language.vocabulary,
                max((worker.context_len for worker in verifiers), default=0),
                len(verifiers),
                tuple(offered),
                is_default=True,
            )
        ]


def _asked(ticket: Ticket, priority: int, max_wait_s: float | None, may: int = 0) -> Asked:
    """Return what decides about a call's place.

    Args:
        ticket: of the caller.
        priority: asked for.
        max_wait_s: longest wait; None: the process's.
        may: a priority that is allowed whatever the key allows.

    Raises:
        InvalidRequest: the key does not allow the priority.
    """
    caller = ticket.caller
    most = max(may, caller.limits.max_priority if caller.key_id else MAX_PRIORITY)
    return Asked(caller.key_id, caller.limits.weight, priority, most, max_wait_s)
