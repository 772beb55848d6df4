"""One session's journal at work, as it is in a running generation."""

import asyncio
import secrets
from types import TracebackType
from typing import Self

from orchestrator.job import Job, Settings
from orchestrator.journal import Journal
from outrider.ids import Mode, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.store.records import KvLocation, Lease, LogSlice, SessionState
from outrider.store.sessions import SessionStore

PROMPT = (7, 0, 4_294_967_295)
PROMPT_CLASSES = (TokenClass.PROMPT, TokenClass.PROMPT, TokenClass.DECODE)
STATE = SessionState(model="toy", mode=Mode.GREEDY, prompt_len=3, max_tokens=10_000)
VERIFIER = WorkerDescription(WorkerId("v1"), "verify", "unix:/v1", "toy", Vocabulary("ab" * 32, 100), 64)
LONG_LEASE = Settings(lease_ttl_s=60.0)
"""No renewal while a test runs, unless it asks for one: it would open connections, and find faults, of its own."""
SHOWN = LogSlice(0, PROMPT, PROMPT_CLASSES, 3)
"""A log that holds the prompt alone."""


async def open_session(store: SessionStore, owner: str = "one") -> tuple[SessionId, Lease]:
    """Make a session; return its id and its lease."""
    session_id = SessionId(secrets.token_hex(12))
    return session_id, await store.create(session_id, STATE, PROMPT, PROMPT_CLASSES, owner, 60.0)


class Writer:
    """Appends tokens through a journal; inside its context it writes and renews its lease."""

    def __init__(
        self,
        store: SessionStore,
        session_id: SessionId,
        lease: Lease,
        *,
        logged: LogSlice = SHOWN,
        state: SessionState = STATE,
        settings: Settings | None = None,
    ) -> None:
        job = Job(
            session_id, lease.fence, lease.owner, state, logged.token_ids, logged.classes, logged.kinds, VERIFIER, None
        )
        self.journal = Journal(store, job, settings or LONG_LEASE)
        self.token_ids = list(logged.token_ids)
        self.logged = len(logged.token_ids)
        self.session_id = session_id
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self.journal.write(self._on_logged)),
            asyncio.create_task(self.journal.keep_lease(lambda: KvLocation(WorkerId("v1"), self.logged - 1))),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_logged(self, length: int, seconds: float) -> None:
        assert length >= self.logged, "what was confirmed is taken back"
        self.logged = length

    def add(self, count: int) -> None:
        """Generate tokens."""
        fresh = [secrets.randbelow(50_000) for _ in range(count)]
        self.token_ids += fresh
        self.journal.append(fresh, [TokenKind.ACCEPTED] * count)

    async def confirmed(self, within_s: float = 60.0) -> None:
        """Wait until all tokens are in the log.

        Raises:
            OutriderError: what ended the writing or the renewal.
        """
        async with asyncio.timeout(within_s):
            while self.logged < len(self.token_ids):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.005)

    async def write(self, count: int, within_s: float = 60.0) -> None:
        """Generate tokens and wait until they are in the log."""
        self.add(count)
        await self.confirmed(within_s)
