"""Streams, over real sockets: nothing is lost, nothing hangs, every end is told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import (
    Cancelled,
    Internal,
    InvalidRequest,
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
)
from outrider.rpc import streams as streams_module
from outrider.v1 import draft_pb2_grpc
from tests.unit.rpc_harness import (
    SERVICE,
    Servicer,
    decode_response,
    encode_request,
    serving,
    streaming,
)


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


# --- streams ------------------------------------------------------------------------------------------------------


async def echo(stream: "Stream[str, str]") -> None:
    while isinstance(message := await stream.receive(60), str):
        stream.send(message.upper())


async def test_messages_go_both_ways_in_order_and_a_close_ends_the_call(servicer: Servicer, tmp_path: Path) -> None:
    servicer.handle = echo
    async with serving(servicer, tmp_path) as connection:
        async with streaming(connection) as stream:
            for number in range(300):
                stream.send(f"m{number}")
            answers = [await stream.receive(60) for _ in range(300)]
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
        assert await stream.receive(60) == "STILL HERE"


async def test_what_the_client_sent_last_arrives_although_it_leaves_at_once(servicer: Servicer, tmp_path: Path) -> None:
    seen: list[object] = []

    async def collect(stream: "Stream[str, str]") -> None:
        await asyncio.sleep(0.1)
        while isinstance(message := await stream.receive(60), str):
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
        answers = [await stream.receive(60) for _ in range(51)]
    assert answers == [*map(str, range(50)), Ended()]


async def test_a_malformed_message_is_reported_and_the_stream_goes_on(servicer: Servicer, tmp_path: Path) -> None:
    async def judge(stream: "Stream[str, str]") -> None:
        while not isinstance(message := await stream.receive(60), Ended | Broken):
            stream.send("bad" if isinstance(message, Malformed) else "good")

    servicer.handle = judge
    async with serving(servicer, tmp_path) as connection, streaming(connection) as stream:
        for text in ("x", "", "y"):
            stream.send(text)
        assert [await stream.receive(60) for _ in range(3)] == ["good", "bad", "good"]


async def test_bytes_that_are_no_message_break_the_stream_as_a_broken_protocol_and_are_no_defect(
    servicer: Servicer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[object] = []

    async def listen(stream: "Stream[str, str]") -> None:
        ends.append(await stream.receive(60))

    servicer.handle = listen
    async with serving(servicer, tmp_path) as connection:
        draft: Any = connection.stream_stream(f"/{SERVICE}/Draft")
        _ = [answer async for answer in draft(iter([b"\xff\xff\xff"]), timeout=10)]
    assert isinstance(ends[0], Broken)
    assert isinstance(ends[0].error, ProtocolError)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_server_error_is_a_final_value_of_the_stream(servicer: Servicer, tmp_path: Path) -> None:
    async def refuse(stream: "Stream[str, str]") -> None:
        raise InvalidRequest("epoch", 1, "a higher one")

    servicer.handle = refuse
    async with serving(servicer, tmp_path) as connection, streaming(connection) as stream:
        for _ in range(2):
            end = await stream.receive(60)
            assert isinstance(end, Broken)
            assert isinstance(end.error, InvalidRequest)
        stream.send("dropped without an error")


async def test_a_client_that_fails_cancels_the_call_and_the_server_hears_of_it(
    servicer: Servicer, tmp_path: Path
) -> None:
    async def wait_for_more(stream: "Stream[str, str]") -> None:
        while not isinstance(await stream.receive(60), Ended | Broken):
            pass
        await asyncio.sleep(10)

    servicer.handle = wait_for_more
    async with serving(servicer, tmp_path) as connection:
        with pytest.raises(KeyError):
            async with streaming(connection) as stream:
                stream.send("x")
                await asyncio.sleep(0.05)
                raise KeyError
        await asyncio.wait_for(servicer.finished.wait(), 60)


async def test_a_call_cancelled_from_elsewhere_breaks_its_stream_without_cancelling_its_user(
    servicer: Servicer, tmp_path: Path
) -> None:
    servicer.handle = echo
    async with serving(servicer, tmp_path) as connection:
        call = draft_pb2_grpc.DraftServiceStub(connection).Draft()
        async with client_stream(call, encode_request, decode_response) as stream:
            stream.send("x")
            assert await stream.receive(60) == "X"
            call.cancel()
            end = await stream.receive(60)
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
        assert await stream.receive(60) == "X"
        await server.stop(0)
        end = await stream.receive(60)
    assert isinstance(end, Broken)
    assert isinstance(end.error, Unavailable)


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
                end = await stream.receive(60)
            assert isinstance(end, Broken)
            assert isinstance(end.error, ResourceExhausted)
            other.send("fine")
            assert await other.receive(60) == "FINE"


async def test_a_defect_in_decoding_breaks_the_stream_and_is_logged(
    servicer: Servicer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def defective(message: object) -> str:
        raise KeyError("defect")

    servicer.handle = echo
    async with serving(servicer, tmp_path) as connection:
        call = draft_pb2_grpc.DraftServiceStub(connection).Draft()
        async with client_stream(call, encode_request, defective) as stream:
            stream.send("x")
            end = await stream.receive(60)
    assert isinstance(end, Broken)
    assert isinstance(end.error, Internal)
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_a_user_cancelled_while_it_waits_leaves_nothing_running(servicer: Servicer, tmp_path: Path) -> None:
    servicer.handle = echo
    before = asyncio.all_tasks()
    async with serving(servicer, tmp_path) as connection:

        async def wait_for_ever() -> None:
            async with streaming(connection) as stream:
                stream.send("x")
                while await stream.receive() == "X":
                    pass

        user = asyncio.create_task(wait_for_ever())
        await asyncio.sleep(0.1)
        user.cancel()
        with pytest.raises(asyncio.CancelledError):
            await user
        await asyncio.wait_for(servicer.finished.wait(), 60)
    async with asyncio.timeout(60):
        while not asyncio.all_tasks() <= before:  # noqa: ASYNC110  (nothing announces their end)
            await asyncio.sleep(0.01)
