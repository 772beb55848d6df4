"""Bidirectional streams without their traps.

Cancelling a task inside gRPC's `read()` or `write()` cancels the whole call, and a time-out is such a cancellation. So
one task per stream reads into a queue and one writes from a queue; whoever uses the stream only ever waits for a queue.

* What arrives is a decoded message, or one of three distinct values: `Malformed` (drop it and count it; the stream goes
  on), `Ended` (the other side closed in good order, or, on a server, the client went away: gRPC does not tell these
  apart) or `Broken` (with the error). The last two are final: every further `receive` returns them again.
* What is sent leaves in the order of `send`, which never waits. After the end it is dropped: the reader tells of the
  end.

Flow control is not back-pressure here; the protocol's window bounds what is under way. The queues are bounded all the
same, so that a peer out of control costs a stream and not the process.
"""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import Cancelled, Internal, OutriderError, ProtocolError, Unavailable
from outrider.rpc.ending import Ending
from outrider.status import error_of_call

logger = logging.getLogger(__name__)

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")

MAX_QUEUED = 4096
"""Messages waiting on either side of a stream."""
CLOSE_TIMEOUT_S = 2.0
"""How long a closing client waits for the server to have read everything and ended the call."""

_last_reads: "set[asyncio.Task[None]]" = set()
"""Readers of server streams that are over: each ends with its call. Here because asyncio itself does not hold tasks."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The other side has nothing more to say."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The stream failed."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that the protocol forbids arrived; the stream goes on."""

    error: OutriderError


class _Context(Protocol):
    """What is needed of a server's call context."""

    async def write(self, message: Any) -> None:
        """Send one message; blocks while flow control holds it back."""


class Stream(Generic[SendT, ReceiveT]):
    """One bidirectional stream, seen from one side. Made by `client_stream` and `server_stream`; for one consumer."""

    def __init__(self, encode: Callable[[SendT], Any], decode: Callable[[Any], ReceiveT]) -> None:
        """Make a stream whose reader and writer do not run yet.

        Args:
            encode: turns a value into the protobuf message to send.
            decode: turns a received protobuf message into a value, or raises `OutriderError`.
        """
        self._encode = encode
        self._decode = decode
        self._inbox: asyncio.Queue[ReceiveT | Malformed | Ended | Broken] = asyncio.Queue(MAX_QUEUED)
        self._outbox: asyncio.Queue[Any] = asyncio.Queue(MAX_QUEUED)
        self._final: Ended | Broken | None = None
        self._writable = True
        self._left = False
        """Whether nobody will receive any more."""

    async def receive(self, timeout_s: float | None = None) -> ReceiveT | Malformed | Ended | Broken:
        """Return the next thing that arrived, in order; once it has ended, the end, again and again.

        Args:
            timeout_s: longest wait; None waits for ever. Nothing is lost when it runs out.

        Raises:
            TimeoutError: nothing arrived in time.
        """
        if self._final is not None and self._inbox.empty():
            return self._final
        if timeout_s is None:
            return await self._inbox.get()
        async with asyncio.timeout(timeout_s):
            return await self._inbox.get()

    def send(self, message: SendT) -> None:
        """Queue a message for sending; never waits. Dropped if the stream has ended, as `receive` tells.

        Raises:
            Unavailable: the other side has not read for so long that the queue is full.
        """
        if not self._writable:
            return
        try:
            self._outbox.put_nowait(self._encode(message))
        except asyncio.QueueFull:
            raise Unavailable(f"the peer does not read: {MAX_QUEUED} messages are waiting for it") from None

    @property
    def end(self) -> Ended | Broken | None:
        """How reading ended, as soon as that is known, even while messages are still queued; None while it goes on."""
        return self._final

    async def _read(self, source: AsyncIterable[Any], ending: Ending | None = None) -> None:
        """Move messages from the wire to the inbox until the end; of a client's call, `ending` knows how it ended."""
        final: Ended | Broken = Broken(Cancelled("reading was given up"))
        try:
            async for message in source:
                if not self._left:
                    await self._inbox.put(self._decoded(message))
            final = Ended()
        except grpc.RpcError as error:
            status = error if ending is None else await ending.of(error)
            final = Ended() if status is None else Broken(error_of_call(status))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            final = Broken(Cancelled("the call was cancelled"))  # by call.cancel(), not this task
        except DecodeError as error:
            final = Broken(ProtocolError(f"the peer sent bytes that are no message: {error}"))
        except Exception as error:
            if not self._left:  # then it is how gRPC says that the call has ended
                logger.exception("reading a stream failed")
            final = Broken(Internal(f"reading a stream failed: {error!r}"))
        finally:
            self._final = final
            if self._inbox.empty():  # wake a consumer that waits; one that does not will look at `_final`
                self._inbox.put_nowait(final)

    def _decoded(self, message: Any) -> ReceiveT | Malformed:
        try:
            return self._decode(message)
        except OutriderError as error:
            return Malformed(error)

    async def _write(self, write: Callable[[Any], Awaitable[None]]) -> None:
        """Move messages from the outbox to the wire until `_flush`, or until the stream breaks."""
        try:
            while (message := await self._outbox.get()) is not None:
                await write(message)
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.InternalError) as error:
            logger.debug("a stream ended while writing: %r", error)  # the reader learns why and reports it
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        finally:
            self._writable = False

    async def _flush(self, writing: "asyncio.Task[None]") -> None:
        """Take no more messages and wait until those that were taken are written."""
        self._writable = False
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if not writing.done():
                    await self._outbox.put(None)
                    await asyncio.wait({writing})
        except TimeoutError:
            logger.warning("a stream was closed with %d messages unsent: the peer does not read", self._outbox.qsize())

    def _leave(self, reading: "asyncio.Task[None]") -> None:
        """Receive nothing more of a call that is about to end, which ends the reader.

        A read under way is not given up: what arrives for it, and behind it, would never be freed by gRPC.
        """
        self._left = True
        self._discard_inbox()
        _last_reads.add(reading)
        reading.add_done_callback(_last_reads.discard)

    def _discard_inbox(self) -> None:
        """Forget what was not received, so that a reader blocked on a full inbox goes on."""
        while not self._inbox.empty():
            self._inbox.get_nowait()


@asynccontextmanager
async def client_stream(
    call: "grpc.aio.StreamStreamCall[Any, Any]", encode: Callable[[SendT], Any], decode: Callable[[Any], ReceiveT]
) -> AsyncIterator[Stream[SendT, ReceiveT]]:
    """Run the client's side of a call for the time of the block.

    A block that ends normally first sends what is queued, half-closes, and gives the server a moment to end the call,
    so that an explicit close arrives. One that ends with an exception or a cancellation cancels the call.
    """
    stream: Stream[SendT, ReceiveT] = Stream(encode, decode)
    reading = asyncio.create_task(stream._read(call, Ending(call)))
    writing = asyncio.create_task(stream._write(call.write))
    try:
        yield stream
        await stream._flush(writing)
        if not call.done():
            await _half_close(call)
            stream._discard_inbox()
            await asyncio.wait({reading}, timeout=CLOSE_TIMEOUT_S)
    finally:
        call.cancel()
        await _settle(reading, writing)


@asynccontextmanager
async def server_stream(
    requests: AsyncIterable[Any], context: _Context, encode: Callable[[SendT], Any], decode: Callable[[Any], ReceiveT]
) -> AsyncIterator[Stream[SendT, ReceiveT]]:
    """Run the server's side of a call for the time of the block; the handler must be a coroutine, not a generator.

    A block that ends, normally or with an error, first sends what is queued. The call itself ends when the handler
    returns or raises.
    """
    stream: Stream[SendT, ReceiveT] = Stream(encode, decode)
    reading = asyncio.create_task(stream._read(requests))
    writing = asyncio.create_task(stream._write(context.write))
    try:
        try:
            yield stream
        except Exception:
            # gRPC cannot send a status while a message is being written: the client would never hear of the error.
            await stream._flush(writing)
            raise
        await stream._flush(writing)
    finally:
        stream._leave(reading)
        await _settle(writing)


async def _half_close(call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
    """Say that nothing more will be sent; the call may just have ended."""
    try:
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError) as error:
        logger.debug("a stream ended before it was half-closed: %r", error)


async def _settle(*tasks: "asyncio.Task[None]") -> None:
    """Cancel tasks that still run and wait for all; a defect in one is raised."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
