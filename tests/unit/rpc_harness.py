"""A draft service that behaves as a test says, served over a Unix socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from outrider.errors import (
    ProtocolError,
)
from outrider.rpc import (
    RpcServer,
    Stream,
    channel,
    client_stream,
    rpc_errors,
    server_stream,
)
from outrider.v1 import draft_pb2 as pb
from outrider.v1 import draft_pb2_grpc, types_pb2

SERVICE = "outrider.v1.DraftService"
Handler = Callable[["Stream[str, str]"], Any]


def encode_response(text: str) -> pb.DraftResponse:
    return pb.DraftResponse(draining=types_pb2.Draining(reason=text))


def decode_request(message: pb.DraftRequest) -> str:
    if message.WhichOneof("message") != "open":
        raise ProtocolError("not an open")
    return message.open.session_id


def encode_request(text: str) -> pb.DraftRequest:
    return pb.DraftRequest(open=pb.DraftOpen(session_id=text)) if text else pb.DraftRequest()


def decode_response(message: pb.DraftResponse) -> str:
    return message.draining.reason


class Servicer(draft_pb2_grpc.DraftServiceServicer):
    """Behaves as the test says."""

    def __init__(self) -> None:
        self.describe: Callable[[], Any] = pb.DraftServiceDescribeResponse
        self.handle: Handler | None = None
        self.cancelled = asyncio.Event()
        self.finished = asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> pb.DraftServiceDescribeResponse:
        return self.describe()  # type: ignore[no-any-return]

    async def Draft(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        assert self.handle is not None
        try:
            async with server_stream(request_iterator, context, encode_response, decode_request) as stream:
                await self.handle(stream)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.finished.set()


@asynccontextmanager
async def serving(servicer: Servicer, tmp_path: Path, max_bytes: int = 1 << 20) -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer(max_bytes)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.server)
    address = await server.start(f"unix:{tmp_path}/s", [SERVICE])
    await server.set_serving(True)
    try:
        async with channel(address, max_bytes) as connection:
            yield connection
    finally:
        await server.stop(0)


@asynccontextmanager
async def streaming(connection: grpc.aio.Channel) -> AsyncIterator["Stream[str, str]"]:
    call = draft_pb2_grpc.DraftServiceStub(connection).Draft()
    async with client_stream(call, encode_request, decode_response) as stream:
        yield stream


async def describe(connection: grpc.aio.Channel) -> Any:
    with rpc_errors():
        return await draft_pb2_grpc.DraftServiceStub(connection).Describe(pb.DraftServiceDescribeRequest(), timeout=60)
