"""A generation's stream to a worker that does not read."""

import asyncio
from pathlib import Path

import pytest

import outrider.rpc.streams as streams_module
from orchestrator.wire import Wire
from outrider.errors import OutriderError, Unavailable
from outrider.rpc import Stream
from outrider.v1 import draft_pb2_grpc
from tests.unit.rpc_harness import Servicer, decode_response, encode_request, serving


async def test_a_stream_that_nobody_reads_can_be_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "MAX_QUEUED", 8)
    servicer, begun, ends = Servicer(), asyncio.Event(), list[OutriderError]()

    async def deaf(stream: "Stream[str, str]") -> None:
        begun.set()
        await asyncio.Event().wait()

    servicer.handle = deaf
    async with serving(servicer, tmp_path) as connection:
        wire = Wire("x", encode_request, decode_response)
        stub = draft_pb2_grpc.DraftServiceStub(connection)
        running = asyncio.create_task(wire.run(stub.Draft, lambda _: None, ends.append))
        await begun.wait()
        with pytest.raises(Unavailable, match="does not read"):
            for _ in range(100):
                wire.send("x")
        wire.close("goodbye")
        await asyncio.wait({running}, timeout=10)
        assert running.done()
        assert ends == [], "an end that was asked for is none of the worker's"
