"""What the client of one generation is told, and how far it has got.

A generation never waits for its client: what is told waits here, and the machine hears of what was taken where that may
move the verifier's limit, which it does not for every chunk.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

from prometheus_client import Histogram

from orchestrator.commit import visible
from orchestrator.events import Taken
from orchestrator.job import Job
from orchestrator.rounds import PROGRESS_STRIDE
from outrider.errors import OutriderError
from outrider.generation import Chunk, Finished, GenerationEvent


class Showing:
    """The way from one generation to its client; `events` for the client, the rest for the driver."""

    def __init__(
        self, job: Job, feed: Callable[[Taken], None], arrivals: deque[tuple[int, float]], overhead_s: Histogram
    ) -> None:
        """Begin with the job's greeting.

        Args:
            job: the generation.
            feed: takes events; never waits.
            arrivals: of verdicts not shown yet, as `orchestrator.peers` notes them: taken out here.
            overhead_s: what a round takes from its verdict's arrival until its tokens were written.
        """
        self._job, self._feed, self._arrivals, self._overhead_s = job, feed, arrivals, overhead_s
        # Bounded by the commit limit: the verifier stops a fixed number of tokens ahead of what was taken.
        self._queue: asyncio.Queue[GenerationEvent | OutriderError] = asyncio.Queue()
        for event in job.greeting:
            self._queue.put_nowait(event)
        self.length = max(job.next_position, len(job.token_ids))
        """Position that was shown, or is about to be."""
        self._taken_told = len(job.token_ids)
        self._told_s: float | None = None
        """When the client was told what it has not taken yet."""

    def unread_s(self, now_s: float) -> float:
        """Return for how long the client has not taken what it is being told; 0 if it has."""
        return 0.0 if self._told_s is None else now_s - self._told_s

    def put(self, event: GenerationEvent | OutriderError) -> None:
        """Tell something, or an error at the end; never waits."""
        self._queue.put_nowait(event)

    def emit(self, chunk: Chunk) -> None:
        """Show what the client does not have of a chunk."""
        end = chunk.start + len(chunk.token_ids)
        self.length = max(self.length, end)
        seen = visible(chunk, self._job.next_position, with_kinds=self._job.state.return_origin)
        if seen is None:
            self._note_taken(end)
        else:
            self.put(seen)

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Yield what the client is told, to the end.

        Raises:
            OutriderError: the generation failed.
        """
        while True:
            item = await self._queue.get()
            if isinstance(item, OutriderError):
                raise item
            self._told_s = time.monotonic()
            yield item
            self._told_s = None
            if isinstance(item, Chunk):
                self._note_written(item.start + len(item.token_ids))
            elif isinstance(item, Finished):
                return

    def _note_written(self, end: int) -> None:
        """The client's connection has taken everything before `end`."""
        now_s = time.monotonic()
        while self._arrivals and self._arrivals[0][0] <= end:
            self._overhead_s.observe(now_s - self._arrivals.popleft()[1])
        self._note_taken(end)

    def _note_taken(self, end: int) -> None:
        if end - self._taken_told >= PROGRESS_STRIDE:
            self._taken_told = end
            self._feed(Taken(end))
