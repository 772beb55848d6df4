"""The cluster as it is now: GET /cluster once, GET /cluster/events again and again.

Both are behind the same keys as requests, and show no session of another key. However many ask, the registry is read
at most once in `FRESH_S`; a stream is sent a whole snapshot each `PERIOD_S`, and there are at most `MAX_WATCHERS`.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from orchestrator.http.front import Asking, Front, FrontHere
from orchestrator.http.snapshot import ROLES, Running, Seen, snapshot
from orchestrator.sessions import Sessions
from outrider.errors import OutriderError, ResourceExhausted, Unauthenticated
from outrider.messages import WorkerDescription

PERIOD_S = 1.0
"""Pause between two snapshots of a stream."""
FRESH_S = 0.5
"""How long what the registry said is used again."""
MAX_WATCHERS = 64
"""Streams at once."""
MAX_EVENTS = 1800
"""Snapshots of one stream; then it ends, and whoever still watches asks again."""
RETRY_S = 10.0
"""What is told to wait for whoever finds no room."""


@dataclass
class Live:
    """What the routes share."""

    front: Front
    fresh_s: float = FRESH_S
    period_s: float = PERIOD_S
    max_events: int = MAX_EVENTS
    num_watchers: int = 0
    _workers: Sequence[WorkerDescription] = ()
    _problem: str = ""
    _read_s: float = float("-inf")
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def seen(self) -> Seen:
        """Return what the process knows now; while the registry is away, the workers that were known last.

        Raises:
            Unavailable: the orchestrator is starting.
        """
        sessions = self.front.open_desk.sessions
        async with self._reading:
            if time.monotonic() - self._read_s >= self.fresh_s:
                await self._read(sessions)
                self._read_s = time.monotonic()
        placement, lately = sessions.tools.placement, sessions.tools.lately
        failed = {each.worker_id for each in self._workers if not placement.breakers.allows(each.worker_id)}
        running = [Running(each.course, each.verifier.worker_id, each.drafter_id) for each in sessions.running()]
        return Seen(
            sessions.language.model, time.monotonic(), self._workers, failed, running,
            lately.courses, lately.acceptance, self._problem,
        )  # fmt: skip

    async def _read(self, sessions: Sessions) -> None:
        placement = sessions.tools.placement
        try:
            self._workers = [worker for role in ROLES for worker in await placement.workers(role)]
            self._problem = ""
        except OutriderError as error:
            self._problem = f"the workers cannot be listed: {error.message}"

    def require_room(self) -> None:
        """Refuse a stream that would be one too many.

        Raises:
            ResourceExhausted: as many as there may be are open.
        """
        if self.num_watchers >= MAX_WATCHERS:
            raise ResourceExhausted(f"{self.num_watchers} browsers watch the cluster", RETRY_S)

    async def moments(self) -> AsyncGenerator[Seen, None]:
        """Yield what the process knows, each `PERIOD_S`, until the process stops."""
        self.require_room()
        self.num_watchers += 1
        try:
            for _ in range(self.max_events):
                if self.front.open_desk.sessions.draining:
                    return
                yield await self.seen()
                await asyncio.sleep(self.period_s)
        finally:
            self.num_watchers -= 1


def live_of(request: Request) -> Live:
    """Return what the routes share."""
    live: Live = request.app.state.live
    return live


LiveHere = Annotated[Live, Depends(live_of)]
router = APIRouter(tags=["cluster"])


@router.get("/cluster")
async def cluster(live: LiveHere, caller: Asking) -> dict[str, Any]:
    """Describe workers, the caller's sessions, what is accepted, and the last rounds; no prompt, no text."""
    return snapshot(await live.seen(), caller.key_id)


@router.get(
    "/cluster/events", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}}
)
async def cluster_events(live: LiveHere, front: FrontHere, caller: Asking) -> StreamingResponse:
    """Stream what /cluster describes, once a second, as server-sent events."""
    live.require_room()
    await live.seen()  # what fails is told by a status, not by a stream that breaks
    access = front.open_desk.access

    async def told() -> AsyncIterator[str]:
        try:
            async with aclosing(live.moments()) as moments, aclosing(access.watched(caller, moments)) as watched:
                async for seen in watched:
                    shown = json.dumps(snapshot(seen, caller.key_id), separators=(",", ":"))
                    yield f"data: {shown}\n\n"
        except (ResourceExhausted, Unauthenticated) as error:
            yield f"data: {json.dumps({'error': {'message': error.message, 'code': error.reason.lower()}})}\n\n"

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(told(), media_type="text/event-stream", headers=headers)
