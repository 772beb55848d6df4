"""The outgoing `Propose` streams: one per verifier, shared by all sessions that it decodes.

A stream is kept while a session needs it and a little longer. What is sent before the verifier has answered the hello
waits; what is sent while a broken stream is being opened again is dropped and counted: a reopened stream makes the
verifier reset its chains, so anything of before is stale.

A verifier that stops ends its streams once no session is left on it; an ended stream that no session needs is not
opened again. A verifier that refuses this worker (its vocabulary is another one, or its certificate allows it nothing)
is not tried again until another session needs it. Each stream has a channel of its own, and so the certificate files of
when it was opened.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from draft_service.metrics import DraftMetrics
from outrider.codec.propose import propose_request_to_proto, propose_response_from_proto
from outrider.errors import FailedPrecondition, OutriderError, PermissionDenied, ProtocolError, Unavailable
from outrider.messages import (
    Draining,
    ProposeHello,
    ProposeMessage,
    ProposeRequestMessage,
    ProposeResponseMessage,
    ProposeWelcome,
    RollbackHint,
    TargetFeatures,
)
from outrider.rpc import Broken, ClientTls, Ended, Malformed, Stream, channel, client_stream
from outrider.sparing import Sparing
from outrider.v1 import verify_pb2_grpc

HELLO_TIMEOUT_S = 5.0
"""How long a verifier may take to answer the hello."""
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
REFUSALS = (FailedPrecondition, PermissionDenied)
"""What a verifier answers to a worker that it does not want."""
MAX_WAITING = 1024
"""Messages that wait for the answer to the first hello."""

log = logging.getLogger(__name__)

ProposeStream: TypeAlias = Stream[ProposeRequestMessage, ProposeResponseMessage]


class ProposeStreams:
    """All streams of this worker; used on the event loop only. Enter it, and its tasks end with the block."""

    def __init__(
        self,
        hello: ProposeHello,
        metrics: DraftMetrics,
        on_refused: Callable[[str, OutriderError], None],
        on_heard: Callable[[str, TargetFeatures | RollbackHint], None],
        linger_s: float = 30.0,
        tls: ClientTls | None = None,
    ) -> None:
        """Describe the worker.

        Args:
            hello: how it introduces itself.
            metrics: where to count.
            on_refused: told the address of a verifier that does not want this worker, and why.
            on_heard: takes what a verifier says of a session, with that verifier's address.
            linger_s: how long a stream that no session needs stays open.
            tls: with the verifiers; None: plaintext.
        """
        self.hello = hello
        self.metrics = metrics
        self.on_refused = on_refused
        self.on_heard = on_heard
        self.tls = tls
        self._linger_s = linger_s
        self._links: dict[str, Link] = {}
        self._users: dict[str, int] = {}
        self._closing: dict[str, asyncio.TimerHandle] = {}
        """By verifier that no session needs: what ends its stream."""
        self._tasks: asyncio.TaskGroup = asyncio.TaskGroup()

    async def __aenter__(self) -> "ProposeStreams":
        """Be ready to open streams."""
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close all streams."""
        for closing in self._closing.values():
            closing.cancel()
        for link in self._links.values():
            link.close()
        await self._tasks.__aexit__(None, None, None)

    def acquire(self, address: str) -> None:
        """A session needs the verifier at an address: open a stream if there is none."""
        self._users[address] = self._users.get(address, 0) + 1
        closing = self._closing.pop(address, None)
        if closing is not None:
            closing.cancel()
        if address not in self._links:
            link = self._links[address] = Link(address, self)
            link.task = self._tasks.create_task(self._keep(link), name=f"propose {address}")

    def release(self, address: str) -> None:
        """A session does not need its verifier any more."""
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self._closing[address] = asyncio.get_running_loop().call_later(self._linger_s, self._close_unused, address)

    def send(self, address: str, message: ProposeMessage) -> None:
        """Send a message, or drop and count it where no stream is up; never waits."""
        link = self._links.get(address)
        if link is None or not link.send(message):
            self.metrics.dropped.inc()

    def needs(self, address: str) -> bool:
        """Whether a session needs the verifier at an address now."""
        return address in self._users

    def _close_unused(self, address: str) -> None:
        """End a stream that no session has needed for long; one that comes before its task has ended gets another."""
        del self._closing[address]
        link = self._links.pop(address, None)
        if link is not None:
            link.close()

    async def _keep(self, link: "Link") -> None:
        """Run a link to its end: refused, or not needed any more."""
        try:
            await link.run()
        except REFUSALS as error:
            log.warning("verifier %s refuses this worker: %s", link.address, error)
            self.metrics.connects.labels("refused").inc()
            self.on_refused(link.address, error)
        finally:
            if self._links.get(link.address) is link:
                del self._links[link.address]


class Link:
    """The stream to one verifier, opened again whenever it breaks."""

    def __init__(self, address: str, owner: ProposeStreams) -> None:
        """Make a link that does not run yet."""
        self.address = address
        self.task: asyncio.Task[None] | None = None
        self._owner = owner
        self._stream: ProposeStream | None = None
        self._sparing = Sparing()
        self._waiting: list[ProposeMessage] | None = []
        """What the first stream will begin with; None once there has been one."""

    def close(self) -> None:
        """End the link's task."""
        if self.task is not None:
            self.task.cancel()

    def send(self, message: ProposeMessage) -> bool:
        """Send a message, or let it wait for the first stream; False if it was dropped."""
        if self._stream is not None and self._stream.end is None:
            with suppress(Unavailable):  # the verifier does not read; the gap makes it reset the chain
                self._stream.send(message)
                return True
            return False
        if self._waiting is None or len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(message)
        return True

    async def run(self) -> None:
        """Keep a stream open; one that has ended is opened again only while a session needs it.

        Raises:
            FailedPrecondition, PermissionDenied: the verifier does not want this worker.
        """
        backoff_s = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while self._owner.needs(self.address):
            started_s = loop.time()
            try:
                await self._connect_once()
                if loop.time() - started_s > MAX_BACKOFF_S:
                    backoff_s = FIRST_BACKOFF_S
            except REFUSALS:
                raise
            except OutriderError as error:
                log.info("no Propose stream to %s: %s", self.address, error)
                self._owner.metrics.connects.labels("failed").inc()
            if not self._owner.needs(self.address):
                return
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _connect_once(self) -> None:
        """Open a stream and read it to its end.

        Raises:
            OutriderError: it did not come up.
        """
        async with channel(self.address, tls=self._owner.tls) as to_verifier:
            call = verify_pb2_grpc.VerifyServiceStub(to_verifier).Propose()
            stream: ProposeStream
            async with client_stream(call, propose_request_to_proto, propose_response_from_proto) as stream:
                stream.send(self._owner.hello)
                welcome = await self._welcome(stream)
                log.info("proposing to verifier %s at %s", welcome.worker_id, self.address)
                self._owner.metrics.connects.labels("opened").inc()
                self._begin(stream)
                try:
                    await self._read(stream)
                finally:
                    self._stream = None

    async def _welcome(self, stream: ProposeStream) -> ProposeWelcome:
        try:
            answer = await stream.receive(HELLO_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"no answer to the hello within {HELLO_TIMEOUT_S:g} s") from None
        match answer:
            case ProposeWelcome():
                return answer
            case Broken() | Malformed():
                raise answer.error
            case Ended():
                raise Unavailable("the stream ended before the hello was answered")
            case _:
                raise ProtocolError(f"{type(answer).__name__} came before the answer to the hello")

    def _begin(self, stream: ProposeStream) -> None:
        """Let messages through, those that waited first."""
        self._stream = stream
        waiting, self._waiting = self._waiting or [], None
        for message in waiting:
            if not self.send(message):
                self._owner.metrics.dropped.inc()

    async def _read(self, stream: ProposeStream) -> None:
        """Hand on what the verifier says, until the stream ends."""
        while True:
            match await stream.receive():
                case (TargetFeatures() | RollbackHint()) as heard:
                    self._owner.on_heard(self.address, heard)
                case Draining(reason):
                    log.info("verifier %s is draining: %s", self.address, reason)
                case Malformed(error):
                    if self._sparing.allows():
                        log.warning("verifier %s: %s", self.address, error)
                    self._owner.metrics.malformed.inc()
                case ProposeWelcome():
                    self._owner.metrics.malformed.inc()
                case Ended():
                    return
                case Broken(error):
                    log.info("the Propose stream to %s broke: %s", self.address, error)
                    return
