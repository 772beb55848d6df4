"""Runs the generations of one HTTP request, for as long as its client is there.

A response here is told in the task that takes the events: a client that reads slowly holds up the task, and with it the
session, as over gRPC. When the client leaves, everything that runs for it is called off at once.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.access import Caller
from orchestrator.http import errors
from orchestrator.http.asking import Asked
from orchestrator.http.invalid import renamed
from orchestrator.http.telling import Telling, server_sent
from orchestrator.servicer import Desk
from outrider.errors import Cancelled, Internal, InvalidRequest, OutriderError
from outrider.generation import Chunk, Finished, GenerationEvent, GenerationRequest, Started
from outrider.ids import FinishReason

MAX_AT_ONCE = 16
"""Generations of one request that run at once, at most; the others follow."""

Take = Callable[[int, GenerationEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Work:
    """What one request makes the orchestrator do."""

    desk: Desk
    caller: Caller
    asked: Asked
    telling: Telling

    async def run(self, take: Take) -> None:
        """Run all generations to their ends; the first that fails ends the others.

        Args:
            take: is given what happens, with the index of the answer; a generation waits for it.

        Raises:
            OutriderError: one was refused, failed, or was called off.
        """
        try:
            await self._all(take)
        except InvalidRequest as error:
            raise renamed(error, self.asked.names) from error

    async def _all(self, take: Take) -> None:
        requests = self.asked.requests
        if len(requests) == 1:
            await self._one(0, requests[0], take)
            return
        limit = self.caller.limits.concurrent or MAX_AT_ONCE
        places = asyncio.Semaphore(min(limit, MAX_AT_ONCE))
        warm = [asyncio.Event() for _ in requests[:: self.asked.num_samples]]
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, request in enumerate(requests):
                    tasks.create_task(self._in_turn(index, request, take, places, warm))
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def _in_turn(
        self, index: int, request: GenerationRequest, take: Take, places: asyncio.Semaphore, warm: list[asyncio.Event]
    ) -> None:
        """Run one of several generations; further samples wait until the KV of their prompt is there to be reused."""
        prompt, sample = divmod(index, self.asked.num_samples)
        if sample:
            await warm[prompt].wait()

        async def take_and_note(index: int, event: GenerationEvent) -> None:
            if isinstance(event, Chunk | Finished):
                warm[prompt].set()
            await take(index, event)

        async with places:
            await self._one(index, request, take_and_note)

    async def _one(self, index: int, request: GenerationRequest, take: Take) -> None:
        async with aclosing(self._events(index, request)) as events:
            async for event in events:
                await take(index, event)
                if isinstance(event, Finished) and event.reason is FinishReason.CANCELLED:
                    raise Cancelled("the generation was called off")

    async def _events(self, index: int, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield what happens to a generation, as over gRPC."""
        desk = self.desk
        async with (
            desk.quotas.ticket(self.caller, request.session_id) as ticket,
            aclosing(desk.told(ticket, desk.sessions.generate(request, ticket))) as events,
        ):
            async for event in events:
                if isinstance(event, Started):
                    self.telling.waited(index, ticket.waited_s)
                yield event


class Generating(Response):
    """Runs work and tells it; errors that come before anything was told are the application's to answer."""

    def __init__(self, work: Work, headers: dict[str, str]) -> None:
        """Keep the work; it begins when the response is sent.

        Args:
            work: what is to be done.
            headers: of the response, beside what it is.
        """
        kind = "text/event-stream; charset=utf-8" if work.asked.streams else "application/json"
        super().__init__(headers=headers | ({"cache-control": "no-store"} if work.asked.streams else {}))
        del self.headers["content-length"]
        self.headers["content-type"] = kind
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work, and stop when the client has gone."""
        if self._work.asked.streams:
            await until_gone(receive, self._stream(send))
            return
        whole = await until_gone(receive, self._collect())
        if whole is not None:
            headers = {name: value for name, value in self.headers.items() if name != "content-type"}
            await JSONResponse(whole, headers=headers)(scope, receive, send)

    async def _collect(self) -> dict[str, object]:
        telling = self._work.telling

        async def take(index: int, event: GenerationEvent) -> None:
            telling.take(index, event)

        await self._work.run(take)
        return telling.whole()

    async def _stream(self, send: Send) -> None:
        telling, begun = self._work.telling, False

        async def put(frame: bytes) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": frame, "more_body": True})

        async def take(index: int, event: GenerationEvent) -> None:
            frame = telling.frame(index, event)
            if frame:
                await put(frame)

        try:
            await self._work.run(take)
            for frame in telling.last_frames():
                await put(frame)
        except OutriderError as error:
            if not begun:
                raise
            await put(server_sent(errors.told(error)[1]))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive, work: "Awaitable[dict[str, object] | None]") -> "dict[str, object] | None":
    """Await work for as long as the client is there; None if it has gone before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone; what else it sends belongs to nothing."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that ended several tasks: one of ours before any other."""
    found = [_first(error) if isinstance(error, BaseExceptionGroup) else error for error in group.exceptions]
    known = [error for error in found if isinstance(error, OutriderError)]
    return next(iter(known), found[0] if found else Internal("no error"))
