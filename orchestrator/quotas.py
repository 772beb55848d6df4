"""What callers use: a ticket for every generation, which holds its place among its key's and what is set aside for it.

Nothing is asked of the store for a key without limits.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from prometheus_client import Counter

from orchestrator.access import ANYBODY, Caller
from outrider.errors import LimitReached, StoreError
from outrider.generation import Chunk, GenerationEvent
from outrider.ids import SessionId
from outrider.store.usage import Usage

log = logging.getLogger(__name__)


class Ticket:
    """One generation's leave to run; without a caller's limits it does nothing."""

    def __init__(
        self, caller: Caller = ANYBODY, session_id: SessionId | None = None, usage: Usage | None = None
    ) -> None:
        """Make a ticket that holds nothing yet.

        Args:
            caller: whose.
            session_id: the session that is continued; none: a new one, which gets a fresh name.
            usage: where it is counted; none: nowhere.
        """
        self.caller = caller
        self.session_id = session_id or SessionId(secrets.token_hex(12))
        """Name of the session. 96 random bits: nobody comes upon another's by trying."""
        self.waited_s = 0.0
        """How long it waited for a place at this process, once it has one."""
        self._usage = usage
        self._name = f"{self.session_id}/{secrets.token_hex(6)}"
        self._held = False
        self._start = self._final_len = 0

    @property
    def remaining(self) -> int:
        """Tokens that are set aside and not used yet."""
        return max(0, self._final_len - self._start)

    async def enter(self, *, resuming: bool) -> None:
        """Count the call and take a place.

        Raises:
            LimitReached: there is none.
        """
        caller, usage = self.caller, self._usage
        if usage is None:
            return
        if not caller.limits.holds_places:
            if caller.limits.requests_per_minute:
                await usage.request(caller.key_id, caller.limits)
            return
        self._held = True
        try:
            await usage.enter(caller.key_id, caller.limits, self._name, resuming=resuming)
        except LimitReached:
            self._held = False
            raise

    async def reserve(self, prompt_tokens: int, start: int, final_len: int) -> None:
        """Set aside what a generation may take.

        Args:
            prompt_tokens: what its prompt costs.
            start: position of its first token.
            final_len: position that it may not pass.

        Raises:
            LimitReached: no tokens are left.
        """
        if self._usage is None or not self.caller.limits.counts_tokens:
            return
        tokens = prompt_tokens + final_len - start
        await self._usage.reserve(self.caller.key_id, self.caller.limits, self._name, tokens)
        self._start, self._final_len = start, final_len

    def count(self, event: GenerationEvent) -> None:
        """Note what was told."""
        if isinstance(event, Chunk):
            self._start = max(self._start, event.start + len(event.token_ids))

    async def renew(self) -> None:
        """Hold the place for longer."""
        if self._usage is not None and self._held:
            await self._usage.renew(self.caller.key_id, self.caller.limits, self._name, self.remaining)

    async def leave(self) -> None:
        """Give back the place and what was not used. Idempotent; if the store is away they come back by themselves."""
        if self._usage is None or not self._held:
            return
        self._held = False
        try:
            await self._usage.leave(self.caller.key_id, self.caller.limits, self._name, self.remaining)
        except StoreError as error:
            log.info("a place of key %s comes back later: %s", self.caller.key_id, error)


class Quotas:
    """All tickets of a process; `run` keeps them."""

    def __init__(self, usage: Usage, refused: Counter) -> None:
        """Keep where use is counted.

        Args:
            usage: the counts.
            refused: counts refusals by reason.
        """
        self._usage, self._refused = usage, refused
        self._open: set[Ticket] = set()

    async def request(self, caller: Caller) -> None:
        """Count a call that generates nothing.

        Raises:
            LimitReached: too many.
        """
        if caller.limits.requests_per_minute:
            with _counted(self._refused):
                await self._usage.request(caller.key_id, caller.limits)

    @asynccontextmanager
    async def ticket(
        self, caller: Caller, session_id: SessionId | None = None, *, resuming: bool = False
    ) -> AsyncIterator[Ticket]:
        """Hold a ticket for the time of the block.

        Args:
            caller: whose.
            session_id: the session that is continued; empty or none: a new one.
            resuming: whether an earlier generation of the session ends by this one.

        Raises:
            LimitReached: the caller has used up a limit.
        """
        ticket = Ticket(caller, session_id, self._usage if caller.key_id else None)
        self._open.add(ticket)
        try:
            with _counted(self._refused):
                await ticket.enter(resuming=resuming)
                yield ticket
        finally:
            self._open.discard(ticket)
            await ticket.leave()

    async def run(self) -> None:
        """Renew all tickets, three times as often as needed, until cancelled."""
        while True:
            await asyncio.sleep(self._usage.place_ttl_s / 3)
            try:
                for ticket in tuple(self._open):
                    await ticket.renew()
            except StoreError as error:
                log.warning("places of API keys cannot be renewed now: %s", error)


@contextmanager
def _counted(refused: Counter) -> Iterator[None]:
    """Count a refusal in the block under the limit's name."""
    try:
        yield
    except LimitReached as error:
        refused.labels(error.limit).inc()
        raise
