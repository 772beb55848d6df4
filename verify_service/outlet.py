"""The way from the engine's thread to the streams, and how a handler waits for its stream's end."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from outrider.errors import Internal, OutriderError, Unavailable
from outrider.rpc import Stream
from outrider.threads import tell

log = logging.getLogger(__name__)

SendT = TypeVar("SendT")


class Handover:
    """What the engine's thread says, kept until it has said all that it has to say for now.

    Then the event loop is woken once. Woken by the first of a pass's verdicts, it would fight with the engine's thread
    for the interpreter over the others.
    """

    def __init__(self) -> None:
        """Have nothing; on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._kept: list[Callable[[], None]] = []

    def keep(self, delivery: Callable[[], None]) -> None:
        """Have something done on the event loop with the next `flush`; on the engine's thread, like that."""
        self._kept.append(delivery)

    def flush(self) -> None:
        """Hand everything over."""
        if self._kept:
            kept, self._kept = self._kept, []
            tell(self._loop, _do_all, kept)


def _do_all(deliveries: list[Callable[[], None]]) -> None:
    for deliver in deliveries:
        deliver()


class Outlet(Generic[SendT]):
    """The way from the engine's thread to one stream."""

    def __init__(self, stream: Stream[SendT, Any], handover: Handover) -> None:
        """Make one; on the event loop."""
        self._handover, self._stream = handover, stream
        self.ended: asyncio.Future[OutriderError | None] = asyncio.get_running_loop().create_future()
        """Set when the stream is to end, to the status it ends with; None is an end in good order."""

    def send(self, item: SendT | OutriderError | None) -> None:
        """Hand over a message or an end, behind what was said before; on the engine's thread."""
        self._handover.keep(partial(self._deliver, item))

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
        except Exception as error:  # what others are told with it must not suffer from a defect in this
            log.exception("a message could not be sent")
            self.end(Internal(f"{type(error).__name__}: {error}"))


async def until_end(outlet: Outlet[Any], reading: Coroutine[Any, Any, None]) -> OutriderError | None:
    """Read until the outlet ends; return what it ended with. An error of the reader's ends it too."""
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(reading)
        error = await outlet.ended
        reader.cancel()
    return error
