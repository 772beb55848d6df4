"""The way from the engine's thread to one stream, and how a handler waits for the stream's end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from outrider.errors import OutriderError, Unavailable
from outrider.rpc import Stream
from outrider.threads import tell

SendT = TypeVar("SendT")


class Outlet(Generic[SendT]):
    """The way from the engine's thread to one stream."""

    def __init__(self, stream: Stream[SendT, Any]) -> None:
        """Make one; on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self.ended: asyncio.Future[OutriderError | None] = self._loop.create_future()
        """Set when the stream is to end, to the status it ends with; None is an end in good order."""

    def send(self, item: SendT | OutriderError | None) -> None:
        """Hand over a message or an end; from any thread."""
        tell(self._loop, self._deliver, item)

    def end(self, error: OutriderError | None) -> None:
        """End the stream; the first end counts. On the event loop."""
        if not self.ended.done():
            self.ended.set_result(error)

    def _deliver(self, item: SendT | OutriderError | None) -> None:
        if item is None or isinstance(item, OutriderError):
            self.end(item)
            return
        try:
            self._stream.send(item)
        except Unavailable as error:
            self.end(error)


async def until_end(outlet: Outlet[Any], reading: Coroutine[Any, Any, None]) -> OutriderError | None:
    """Read until the outlet ends; return what it ended with. An error of the reader's ends it too."""
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(reading)
        error = await outlet.ended
        reader.cancel()
    return error
