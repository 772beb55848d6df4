"""Owners that fight for sessions over a wire that loses and delays, and write down what happened to them."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from outrider.errors import StoreError, StoreUnavailable
from outrider.ids import Mode, SessionId, TokenClass
from outrider.store.connect import open_client
from outrider.store.errors import Fenced, LeaseHeld
from outrider.store.records import SessionState
from outrider.store.sessions import SessionStore
from tests.contract.history import Call, History

T = TypeVar("T")

STATE = SessionState(model="toy", mode=Mode.GREEDY, prompt_len=0, max_tokens=100_000)
FATES = ("pass", "lose request", "lose reply", "deliver late")
TIMEOUT_S = 0.15
LATE_S = (0.2, 0.5)
"""So long does a late request wait: its sender has given up by then."""


class Mishaps:
    """Stands between clients and a server; loses requests and replies, and delivers requests when it is too late."""

    def __init__(self, port: int, lot: random.Random, rate: float) -> None:
        self._port, self._lot = port, lot
        self._weights = (1 - rate, rate / 3, rate / 3, rate / 3)
        self.counts = dict.fromkeys(FATES, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Mishaps"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield self
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                await self._pass_on(reader, writer, far_reader, far_writer)
            finally:
                far_writer.close()
        except OSError:
            pass  # either end has gone: so does the other
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        """Carry request and reply in turn until one is lost."""
        while request := await reader.read(65_536):
            (fate,) = self._lot.choices(FATES, self._weights) if b"EVAL" in request else ("pass",)
            self.counts[fate] += 1
            if fate == "lose request":
                return
            if fate == "deliver late":
                await asyncio.sleep(self._lot.uniform(*LATE_S))
            far_writer.write(request)
            reply = await far_reader.read(65_536)
            if fate != "pass" or not reply:
                return
            writer.write(reply)


class Owner:
    """Takes the lease of a session again and again, and appends until it loses it, and sometimes after."""

    def __init__(self, url: str, session_id: SessionId, history: History, fresh: "itertools.count[int]") -> None:
        self._client = open_client(url, timeout_s=TIMEOUT_S)
        self._store = SessionStore(self._client, deadline_s=0.4)
        self._session_id, self._history, self._fresh = session_id, history, fresh
        self._lot = random.Random(next(fresh))

    async def run(self, until: asyncio.Event) -> None:
        """Fight until told to stop."""
        try:
            while not until.is_set():
                await self._reign(f"owner-{next(self._fresh)}")
        finally:
            await self._client.aclose()

    async def _reign(self, name: str) -> None:
        call = self._history.begin("acquire")
        lease = await self._answer(
            call, self._store.acquire_lease(self._session_id, name, 0.2, self._lot.random() < 0.3)
        )
        if lease is None:
            await asyncio.sleep(self._lot.uniform(0.0, 0.05))
            return
        call.fence = lease.fence
        for _ in range(self._lot.randrange(2, 12)):
            length = await self._read()
            # Now and then over what is there already: a wish that must be refused.
            behind = self._lot.choice((0, 0, 0, 0, 2))
            if length is not None and not await self._append(lease.fence, max(0, length - behind)):
                break
            await asyncio.sleep(self._lot.uniform(0.0, 0.01))

    async def _read(self) -> int | None:
        call = self._history.begin("read")
        log = await self._answer(call, self._store.read_log(self._session_id))
        if log is None:
            return None
        call.token_ids = log.token_ids
        return log.length

    async def _append(self, fence: int, start: int) -> bool:
        """Append some tokens, again and again while no answer comes; return whether they are in."""
        token_ids = tuple(next(self._fresh) for _ in range(self._lot.randrange(1, 5)))
        call = self._history.begin("append", fence=fence, start=start, token_ids=token_ids)
        for _ in range(4):
            append = self._store.append(self._session_id, fence, start, token_ids, [TokenClass.DECODE] * len(token_ids))
            length = await self._answer(call, append)
            if length is not None:
                call.length = length
            if call.outcome != "unknown":
                return call.outcome == "done"
        return False

    async def _answer(self, call: Call, operation: Awaitable[T]) -> T | None:
        """Await an answer, and note of what kind it is.

        A call that once was not answered may have been carried out: a later refusal does not make that untrue.
        """
        doubtful = call.outcome == "unknown"
        try:
            answer = await operation
        except StoreUnavailable:
            self._history.end(call, "unknown")
            return None
        except (Fenced, LeaseHeld, StoreError):
            self._history.end(call, "unknown" if doubtful else "refused")
            return None
        self._history.end(call, "done")
        return answer
