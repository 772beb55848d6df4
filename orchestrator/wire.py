"""One stream to a worker, seen from a generation: what is said, what comes back, and how it ended, once.

A wire runs as one task. What it hears goes to callbacks that never block; an end that nobody asked for is reported
with its cause.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from outrider.errors import OutriderError, Unavailable
from outrider.rpc import Broken, Ended, Malformed, client_stream
from outrider.sparing import Sparing

log = logging.getLogger(__name__)

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")

CLOSE_TIMEOUT_S = 1.0
"""How long a worker may take to end a stream that was closed, before the call is cancelled."""


class Wire(Generic[SendT, ReceiveT]):
    """A stream that is opened with its first message and ends once."""

    def __init__(self, first: SendT, encode: Callable[[SendT], Any], decode: Callable[[Any], ReceiveT]) -> None:
        """Make a wire that does not run yet.

        Args:
            first: what opens the session on the worker.
            encode: to protobuf.
            decode: from protobuf; raises `ProtocolError` for nonsense.
        """
        self._encode = encode
        self._decode = decode
        self._outbox: list[SendT] = [first]
        self._send: Callable[[SendT], None] = self._outbox.append
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.num_malformed = 0
        self._sparing = Sparing()

    def send(self, message: SendT) -> None:
        """Say something; never blocks, and is dropped after the end.

        Raises:
            Unavailable: the worker has not read for thousands of messages.
        """
        if not self._closed:
            self._send(message)

    def close(self, last: SendT) -> None:
        """Say goodbye, unless nobody reads, and hear nothing more; the worker has a moment to end the stream itself."""
        if self._closed:
            return
        self._closed = True
        try:
            self._send(last)
        except Unavailable as error:
            log.debug("a stream is closed without a goodbye: %s", error)
        if self._task is not None:
            task = self._task
            asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, task.cancel)

    async def run(
        self,
        open_call: Callable[[], Any],
        on_message: Callable[[ReceiveT], None],
        on_end: Callable[[OutriderError], None],
    ) -> None:
        """Run the stream to its end; a cancellation cancels the call.

        Args:
            open_call: makes the gRPC call.
            on_message: takes what arrives, in order.
            on_end: takes the cause of an end that `close` did not ask for; the last thing that is called.
        """
        self._task = asyncio.current_task()
        if self._closed:
            return
        async with client_stream(open_call(), self._encode, self._decode) as stream:
            for message in self._outbox:
                stream.send(message)
            self._send = stream.send
            cause: OutriderError = Unavailable("the worker ended the stream")
            while True:
                heard = await stream.receive()
                if isinstance(heard, Malformed):
                    self.num_malformed += 1
                    if self._sparing.allows():
                        log.warning("a worker's message is dropped: %s", heard.error)
                elif isinstance(heard, Broken):
                    cause = heard.error
                    break
                elif isinstance(heard, Ended):
                    break
                elif not self._closed:
                    on_message(heard)
        if not self._closed:
            self._closed = True
            on_end(cause)
