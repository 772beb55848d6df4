"""Servers: errors reach clients as themselves; health, reflection and stopping."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.errors import (
    Internal,
    InvalidRequest,
    NotFound,
    OutriderError,
    ResourceExhausted,
    Unavailable,
)
from outrider.rpc import (
    Broken,
    Ended,
    RpcServer,
    Stream,
    channel,
    error_of_call,
    rpc_errors,
    serve_until_terminated,
)
from outrider.v1 import draft_pb2 as pb
from outrider.v1 import draft_pb2_grpc
from tests.unit.rpc_harness import (
    SERVICE,
    Servicer,
    describe,
    serving,
    streaming,
)


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


# --- errors -------------------------------------------------------------------------------------------------------


async def test_bytes_that_are_no_request_are_refused_without_a_traceback(
    servicer: Servicer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(servicer, tmp_path) as connection:
        call: Any = connection.unary_unary(f"/{SERVICE}/Describe")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"\xff\xff\xff\xff", timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(error_of_call(refused.value), InvalidRequest)
        await describe(connection)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


async def test_a_call_that_is_closed_without_its_request_is_refused_at_once(servicer: Servicer, tmp_path: Path) -> None:
    async with serving(servicer, tmp_path) as connection:
        call: Any = connection.stream_unary(f"/{SERVICE}/Describe")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(iter([]), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await describe(connection)


async def test_a_call_that_never_sends_its_request_is_ended(
    servicer: Servicer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.rpc.server.REQUEST_S", 0.05)
    async with serving(servicer, tmp_path) as connection:
        before = len(asyncio.all_tasks())
        methods: Any = [connection.stream_unary, connection.stream_stream]
        calls = [method(f"/{SERVICE}/Describe")(timeout=60) for method in methods]
        assert [await call.code() for call in calls] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
        assert {await call.details() for call in calls} == {"no request within 0.05 s"}
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110  (nothing announces their end)
                await asyncio.sleep(0)
        await describe(connection)


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


async def test_what_was_sent_just_before_an_error_arrives_and_so_does_the_error(
    servicer: Servicer, tmp_path: Path
) -> None:
    async def handle(stream: "Stream[str, str]") -> None:
        stream.send("last words")
        await asyncio.sleep(0)  # the writer is in the middle of it
        raise NotFound("gone")

    servicer.handle = handle
    async with serving(servicer, tmp_path) as connection:
        for _ in range(20):
            async with streaming(connection) as stream:
                assert await stream.receive(10) == "last words"
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
            async for item in method(b"", timeout=60):
                received.append(item)  # noqa: PERF401
    await server.stop(0)
    assert received == [b"1"]


# --- health, reflection, stopping ---------------------------------------------------------------------------------


async def health(connection: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(connection)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
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
        call = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo(timeout=60)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        assert await call.read() == grpc.aio.EOF
    assert SERVICE in {service.name for service in answer.list_services_response.service}


async def test_a_port_in_use_is_an_error_and_not_shared(tmp_path: Path) -> None:
    first, second = RpcServer(), RpcServer()
    address = await first.start("127.0.0.1:0", [])
    with pytest.raises(Unavailable, match="cannot listen"):
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
        life = asyncio.create_task(serve_until_terminated(server, on_drain, grace_s=30))
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await stream.receive(60) == "goodbye"
        assert await stream.receive(60) == Ended()
        await asyncio.wait_for(life, 60)


@asynccontextmanager
async def unseen_calls(servicer: Servicer, tmp_path: Path, grace_s: float) -> AsyncIterator[list[Any]]:
    """Yield calls that had arrived at a server, which had not looked at them, when it was stopped."""
    server = RpcServer()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.server)
    address = await server.start(f"unix:{tmp_path}/s", [SERVICE])
    async with channel(address) as connection:
        await describe(connection)
        stub = draft_pb2_grpc.DraftServiceStub(connection)
        calls = [stub.Describe(pb.DraftServiceDescribeRequest(), timeout=60) for _ in range(16)]
        await asyncio.sleep(0)  # they set out,
        time.sleep(0.5)  # noqa: ASYNC251  # and arrive while the server's loop is busy
        await server.stop(grace_s)
        yield calls


async def test_calls_that_a_stopping_server_has_not_looked_at_are_refused_with_a_reason(
    servicer: Servicer, tmp_path: Path
) -> None:
    async with unseen_calls(servicer, tmp_path, 1.0) as calls:
        ends = {(await call.code(), await call.details()) for call in calls}
    assert ends - {(grpc.StatusCode.OK, "")} == {(grpc.StatusCode.UNAVAILABLE, "the server stops")}


async def test_calls_that_a_server_without_time_has_not_looked_at_are_unavailable_to_their_client(
    servicer: Servicer, tmp_path: Path
) -> None:
    async def end_of(call: Any) -> type:
        with rpc_errors():
            return type(await call)

    async with unseen_calls(servicer, tmp_path, 0.0) as calls:
        ends = await asyncio.gather(*map(end_of, calls), return_exceptions=True)
    assert any("dropped the call" in str(end) for end in ends)
    assert {type(end) for end in ends if isinstance(end, BaseException)} == {Unavailable}


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
    await asyncio.wait_for(life, 60)
    assert "cut off" in caplog.text


async def test_a_foreign_error_keeps_its_message() -> None:
    assert isinstance(error_of_call(grpc.RpcError("odd")), Internal)


async def test_a_drain_that_fails_is_logged_and_the_server_stops_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise KeyError("defect")

    server = RpcServer()
    await server.start(f"unix:{tmp_path}/s", [])
    life = asyncio.create_task(serve_until_terminated(server, fail, grace_s=30))
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(life, 60)
    assert "the drain failed" in caplog.text


async def test_a_mixed_group_of_errors_is_a_defect_and_a_pure_one_is_not(servicer: Servicer, tmp_path: Path) -> None:
    def mixed() -> None:
        raise ExceptionGroup("both", [NotFound("known"), KeyError("defect")])

    def pure() -> None:
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [NotFound("known")])])

    async with serving(servicer, tmp_path) as connection:
        for behaviour, cls in ((mixed, Internal), (pure, NotFound)):
            servicer.describe = behaviour
            with pytest.raises(cls):
                await describe(connection)
