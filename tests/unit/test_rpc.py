"""Servers, channels and streams, over real sockets."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.errors import (
    Cancelled,
    Internal,
    InvalidRequest,
    NotFound,
    OutriderError,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
)
from outrider.rpc import (
    Broken,
    Ended,
    Malformed,
    RpcServer,
    Stream,
    channel,
    client_stream,
    error_of_call,
    rpc_errors,
    serve_until_terminated,
    server_stream,
)
from outrider.rpc import streams as streams_module
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


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


async def describe(connection: grpc.aio.Channel) -> Any:
    with rpc_errors():
        return await draft_pb2_grpc.DraftServiceStub(connection).Describe(pb.DraftServiceDescribeRequest(), timeout=10)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [InvalidRequest("field", -1, "0 .. 1"), NotFound("session s"), ResourceExhausted("full", 0.5)]
)
async def test_an_error_raised_in_a_handler_reaches_the_client_as_itself(
    servicer: Servicer, tmp_path: Path, error: OutriderError
) -> None:
    def fail() -> None:
        raise error

    servicer.describe = fail
    async with serving(servicer, tmp_path) as connection:
        with pytest.raises(type(error)) as caught:
            await describe(connection)
    assert caught.value.message == error.message
    assert caught.value.metadata() == error.metadata()


async def test_a_defect_is_internal_logged_once_and_kept_from_the_client(
    servicer: Servicer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("secret detail")

    servicer.describe = fail
    async with serving(servicer, tmp_path) as connection:
        with caplog.at_level(logging.ERROR), pytest.raises(Internal) as caught:
            await describe(connection)
    assert "secret" not in caught.value.message
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_an_error_out_of_a_task_group_is_found_in_its_group(servicer: Servicer, tmp_path: Path) -> None:
    async def handle(stream: "Stream[str, str]") -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_raise(NotFound("inside")))

    servicer.handle = handle
    async with serving(servicer, tmp_path) as connection, streaming(connection) as stream:
        end = await stream.receive(10)
    assert isinstance(end, Broken)
    assert isinstance(end.error, NotFound)


async def _raise(error: Exception) -> None:
    raise error


async def test_a_generator_handler_keeps_streaming_and_its_error_arrives(tmp_path: Path) -> None:
    async def counting(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        raise NotFound("two")

    server = RpcServer()
    handlers: dict[str, Any] = {"Count": grpc.unary_stream_rpc_method_handler(counting)}
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    address = await server.start(f"unix:{tmp_path}/s", [])
    received: list[bytes] = []
    async with channel(address) as connection:
        with pytest.raises(NotFound), rpc_errors():
            method: Any = connection.unary_stream("/t.T/Count")
            async for item in method(b"", timeout=10):
                received.append(item)  # noqa: PERF401
    await server.stop(0)
    assert received == [b"1"]


# --- streams ------------------------------------------------------------------------------------------------------


async def echo(stream: "Stream[str, str]") -> None:
    while isinstance(message := await stream.receive(10), str):
        stream.send(message.upper())


async def test_messages_go_both_ways_in_order_and_a_close_ends_the_call(servicer: Servicer, tmp_path: Path) -> None:
    servicer.handle = echo
    async with serving(servicer, tmp_path) as connection:
        async with streaming(connection) as stream:
            for number in range(300):
                stream.send(f"m{number}")
            answers = [await stream.receive(10) for _ in range(300)]
        assert answers == [f"M{number}" for number in range(300)]
        assert stream.end == Ended()
        assert await stream.receive() == Ended()
        assert await stream.receive() == Ended()


async def test_a_time_out_loses_nothing_and_leaves_the_stream_alive(servicer: Servicer, tmp_path: Path) -> None:
    servicer.handle = echo
    async with serving(servicer, tmp_path) as connection, streaming(connection) as stream:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await stream.receive(0.02)
        stream.send("still here")
        assert await stream.receive(10) == "STILL HERE"


async def test_what_the_client_sent_last_arrives_although_it_leaves_at_once(servicer: Servicer, tmp_path: Path) -> None:
    seen: list[object] = []

    async def collect(stream: "Stream[str, str]") -> None:
        await asyncio.sleep(0.1)
        while isinstance(message := await stream.receive(10), str):
            seen.append(message)
        seen.append(message)

    servicer.handle = collect
    async with serving(servicer, tmp_path) as connection:
        async with streaming(connection) as stream:
            stream.send("a")
            stream.send("close")
    assert seen == ["a", "close", Ended()]


async def test_what_the_server_sent_last_arrives_although_its_handler_returns(
    servicer: Servicer, tmp_path: Path
) -> None:
    async def burst(stream: "Stream[str, str]") -> None:
        for number in range(50):
            stream.send(str(number))

    servicer.handle = burst
    async with serving(servicer, tmp_path) as connection, streaming(connection) as stream:
        answers = [await stream.receive(10) for _ in range(51)]
    assert answers == [*map(str, range(50)), Ended()]


async def test_a_malformed_message_is_reported_and_the_stream_goes_on(servicer: Servicer, tmp_path: Path) -> None:
    async def judge(stream: "Stream[str, str]") -> None:
        while not isinstance(message := await stream.receive(10), Ended | Broken):
            stream.send("bad" if isinstance(message, Malformed) else "good")

    servicer.handle = judge
    async with serving(servicer, tmp_path) as connection, streaming(connection) as stream:
        for text in ("x", "", "y"):
            stream.send(text)
        assert [await stream.receive(10) for _ in range(3)] == ["good", "bad", "good"]


async def test_a_server_error_is_a_final_value_of_the_stream(servicer: Servicer, tmp_path: Path) -> None:
    async def refuse(stream: "Stream[str, str]") -> None:
        raise InvalidRequest("epoch", 1, "a higher one")

    servicer.handle = refuse
    async with serving(servicer, tmp_path) as connection, streaming(connection) as stream:
        for _ in range(2):
            end = await stream.receive(10)
            assert isinstance(end, Broken)
            assert isinstance(end.error, InvalidRequest)
        stream.send("dropped without an error")


async def test_a_client_that_fails_cancels_the_call_and_the_server_hears_of_it(
    servicer: Servicer, tmp_path: Path
) -> None:
    async def wait_for_more(stream: "Stream[str, str]") -> None:
        while not isinstance(await stream.receive(10), Ended | Broken):
            pass
        await asyncio.sleep(10)

    servicer.handle = wait_for_more
    async with serving(servicer, tmp_path) as connection:
        with pytest.raises(KeyError):
            async with streaming(connection) as stream:
                stream.send("x")
                await asyncio.sleep(0.05)
                raise KeyError
        await asyncio.wait_for(servicer.finished.wait(), 5)


async def test_a_call_cancelled_from_elsewhere_breaks_its_stream_without_cancelling_its_user(
    servicer: Servicer, tmp_path: Path
) -> None:
    servicer.handle = echo
    async with serving(servicer, tmp_path) as connection:
        call = draft_pb2_grpc.DraftServiceStub(connection).Draft()
        async with client_stream(call, encode_request, decode_response) as stream:
            stream.send("x")
            assert await stream.receive(10) == "X"
            call.cancel()
            end = await stream.receive(10)
        assert isinstance(end, Broken)
        assert isinstance(end.error, Cancelled)


async def test_a_server_that_dies_is_unavailable_to_its_streams(servicer: Servicer, tmp_path: Path) -> None:
    servicer.handle = echo
    server = RpcServer()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.server)
    address = await server.start("127.0.0.1:0", [SERVICE])
    assert not address.endswith(":0")
    async with channel(address) as connection, streaming(connection) as stream:
        stream.send("x")
        assert await stream.receive(10) == "X"
        await server.stop(0)
        end = await stream.receive(10)
    assert isinstance(end, Broken)
    assert isinstance(end.error, Unavailable | Cancelled)


async def test_a_peer_that_does_not_read_costs_the_stream_and_not_the_process(
    servicer: Servicer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "MAX_QUEUED", 8)
    servicer.handle = echo
    async with serving(servicer, tmp_path) as connection:
        with pytest.raises(Unavailable, match="does not read"):
            async with streaming(connection) as stream:
                for _ in range(100):
                    stream.send("x")


async def test_an_oversize_message_ends_its_stream_and_no_other(servicer: Servicer, tmp_path: Path) -> None:
    servicer.handle = echo
    async with serving(servicer, tmp_path, max_bytes=1000) as connection:
        async with channel(f"unix:{tmp_path}/s") as careless, streaming(connection) as other:
            async with streaming(careless) as stream:
                stream.send("x" * 5000)
                end = await stream.receive(10)
            assert isinstance(end, Broken)
            assert isinstance(end.error, ResourceExhausted)
            other.send("fine")
            assert await other.receive(10) == "FINE"


# --- health, reflection, stopping ---------------------------------------------------------------------------------


async def health(connection: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(connection)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return int(response.status)


async def test_health_follows_what_is_set_and_stays_down_after_a_drain(tmp_path: Path) -> None:
    server = RpcServer()
    address = await server.start(f"unix:{tmp_path}/s", [SERVICE])
    async with channel(address) as connection:
        seen = [await health(connection)]
        await server.set_serving(True)
        seen += [await health(connection), await health(connection, SERVICE)]
        await server.drain()
        await server.set_serving(True)
        seen += [await health(connection, SERVICE)]
    await server.stop(0)
    serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert seen == [not_serving, serving_, serving_, not_serving]


async def test_reflection_lists_the_services(servicer: Servicer, tmp_path: Path) -> None:
    async with serving(servicer, tmp_path) as connection:
        call = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo(timeout=10)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        assert await call.read() == grpc.aio.EOF
    assert SERVICE in {service.name for service in answer.list_services_response.service}


async def test_a_port_in_use_is_an_error_and_not_shared(tmp_path: Path) -> None:
    first, second = RpcServer(), RpcServer()
    address = await first.start("127.0.0.1:0", [])
    with pytest.raises(RuntimeError):
        await second.start(address, [])
    await second.stop(0)
    await first.stop(0)


async def test_sigterm_drains_then_stops_and_lets_running_calls_finish(servicer: Servicer, tmp_path: Path) -> None:
    drained = asyncio.Event()

    async def until_drained(stream: "Stream[str, str]") -> None:
        await drained.wait()
        stream.send("goodbye")

    async def on_drain() -> None:
        drained.set()

    servicer.handle = until_drained
    server = RpcServer()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.server)
    address = await server.start(f"unix:{tmp_path}/s", [SERVICE])
    async with channel(address) as connection, streaming(connection) as stream:
        await connection.channel_ready()
        life = asyncio.create_task(serve_until_terminated(server, on_drain, grace_s=5))
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await stream.receive(5) == "goodbye"
        assert await stream.receive(5) == Ended()
        await asyncio.wait_for(life, 5)


async def test_a_drain_that_hangs_is_cut_off_by_a_second_signal(
    servicer: Servicer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def forever() -> None:
        await asyncio.sleep(100)

    server = RpcServer()
    await server.start(f"unix:{tmp_path}/s", [])
    life = asyncio.create_task(serve_until_terminated(server, forever, grace_s=50))
    for _ in range(2):
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(life, 5)
    assert "cut off" in caplog.text


async def test_a_foreign_error_keeps_its_message() -> None:
    assert isinstance(error_of_call(grpc.RpcError("odd")), Internal)
