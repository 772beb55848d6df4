"""A draft worker in this process, a verifier's `Propose` end that records, and an orchestrator's end of `Draft`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from draft_service.loading import Loaded, Progress, load_drafter
from outrider.codec.draft import draft_request_to_proto, draft_response_from_proto
from outrider.codec.propose import propose_request_from_proto, propose_response_to_proto
from outrider.errors import FailedPrecondition, OutriderError
from outrider.ids import Epoch, Generation, Mode, SessionId, WorkerId
from outrider.messages import (
    DraftCommit,
    DraftOpen,
    DraftRequestMessage,
    DraftResponseMessage,
    ProposeHello,
    ProposeMessage,
    ProposeRequestMessage,
    ProposeResponseMessage,
    ProposeWelcome,
    SamplingParams,
    Speculation,
)
from outrider.model.toy import ToyLanguage, ToyTokenizer
from outrider.rpc import Broken, Ended, Malformed, RpcServer, Stream, channel, client_stream, server_stream
from outrider.v1 import draft_pb2_grpc, verify_pb2_grpc

VOCAB = len(ToyTokenizer())
LANGUAGE = ToyLanguage(VOCAB)
"""The toy target with the settings' defaults."""
TIMEOUT_S = 60.0
KEY = bytes(range(16))

DraftStream = Stream[DraftRequestMessage, DraftResponseMessage]
ProposeEnd = Stream[ProposeResponseMessage, ProposeRequestMessage]


class RecordingVerifier(verify_pb2_grpc.VerifyServiceServicer):
    """Welcomes draft workers, or refuses them, and keeps what they propose."""

    def __init__(self) -> None:
        self.refusal: OutriderError | None = None
        self.hellos: list[ProposeHello] = []
        self.messages: asyncio.Queue[ProposeMessage] = asyncio.Queue()
        self.streams: list[ProposeEnd] = []
        self.hang_up = asyncio.Event()
        self.ended = 0

    async def Describe(self, request: Any, context: Any) -> Any:
        raise FailedPrecondition("only Propose is recorded")

    async def Decode(self, request_iterator: Any, context: Any) -> Any:  # type: ignore[override]
        raise FailedPrecondition("only Propose is recorded")

    async def Propose(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        try:
            await self._serve(request_iterator, context)
        finally:
            self.ended += 1

    async def _serve(self, request_iterator: Any, context: Any) -> None:
        stream: ProposeEnd
        async with server_stream(
            request_iterator, context, propose_response_to_proto, propose_request_from_proto
        ) as stream:
            hello = await stream.receive(TIMEOUT_S)
            assert isinstance(hello, ProposeHello)
            self.hellos.append(hello)
            if self.refusal is not None:
                raise self.refusal
            self.streams.append(stream)
            stream.send(ProposeWelcome(WorkerId("v")))
            reading = asyncio.ensure_future(self._read(stream))
            hanging_up = asyncio.ensure_future(self.hang_up.wait())
            await asyncio.wait({reading, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            hanging_up.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _read(self, stream: ProposeEnd) -> None:
        while True:
            message = await stream.receive()
            assert not isinstance(message, Malformed | ProposeHello), message
            if isinstance(message, Ended | Broken):
                return
            self.messages.put_nowait(message)

    async def next(self) -> ProposeMessage:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.messages.get()


@asynccontextmanager
async def recording_verifier(listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[RecordingVerifier, str]]:
    verifier = RecordingVerifier()
    server = RpcServer()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(verifier, server.server)
    address = await server.start(listen, ["outrider.v1.VerifyService"])
    try:
        yield verifier, address
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def draft_app(
    load: Callable[[DraftSettings, Progress], Loaded] = load_drafter, ready: bool = True, **settings: Any
) -> AsyncIterator[DraftApp]:
    """Run a worker with the toy drafter; `ready` waits until it serves."""
    app = DraftApp(DraftSettings(**{"drafter": "toy", "toy_agreement": 1.0, "worker_id": "d", **settings}), load)
    await app.start()
    running = asyncio.create_task(app.run())
    try:
        if ready:
            async with asyncio.timeout(TIMEOUT_S):
                await app.ready.wait()
        yield app
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup, OutriderError):
            await running
        await app.server.stop(0.0)


@asynccontextmanager
async def draft_call(address: str) -> AsyncIterator[DraftStream]:
    """Open a `Draft` stream; nothing has been said on it."""
    async with channel(address) as to_worker:
        call = draft_pb2_grpc.DraftServiceStub(to_worker).Draft()
        stream: DraftStream
        async with client_stream(call, draft_request_to_proto, draft_response_from_proto) as stream:
            yield stream


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110  (the condition belongs to other threads and processes)
            await asyncio.sleep(0.01)


async def until_async(condition: Callable[[], Awaitable[object]], timeout_s: float = 60.0) -> None:
    """Wait until something that has to be asked for is so; long enough for a process to start."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def error_of(receive: Callable[[float], Awaitable[object]]) -> OutriderError:
    """Receive until the stream breaks; return why."""
    while True:
        message = await receive(TIMEOUT_S)
        assert not isinstance(message, Ended), "the stream ended in good order"
        if isinstance(message, Broken):
            return message.error


def opening(address: str, name: str = "s", gamma: int = 4, mode: Mode = Mode.GREEDY, attach: int = 1) -> DraftOpen:
    sampling = SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 1.0)
    return DraftOpen(
        SessionId(name), Epoch(Generation(1, attach)), PROMPT, mode, sampling, b"" if mode is Mode.GREEDY else KEY,
        Speculation(gamma, gamma, gamma), WorkerId("v"), address, prompt_len=len(PROMPT),
    )  # fmt: skip


def commit(start: int, token_ids: tuple[int, ...], number: int, gamma: int = 4, attach: int = 1) -> DraftCommit:
    return DraftCommit(Epoch(Generation(1, attach), number), start, token_ids, Speculation(gamma, gamma, gamma))


def greedy(ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    text = list(ids)
    for _ in range(count):
        text.append(int(LANGUAGE.probs(text).argmax()))
    return tuple(text[len(ids) :])


PROMPT = tuple(range(1, 21))
