"""How a refused call ends: the client hears the server's own words, and the server keeps nothing of it."""

import asyncio
import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from outrider.errors import FailedPrecondition, InvalidRequest, OutriderError, ProtocolError
from outrider.process import THRESHOLDS, _settle
from outrider.rpc import Broken, Ended, Stream
from outrider.rpc.ending import HIDING, Ending
from outrider.sparing import Sparing
from outrider.v1 import draft_pb2 as pb
from outrider.v1 import draft_pb2_grpc
from tests.unit.rpc_harness import Servicer, describe, serving, streaming

FLOOD = 300
"""Messages that a client has on its way when the server ends the call."""


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


async def third_is_enough(stream: "Stream[str, str]") -> None:
    for _ in range(3):
        await stream.receive(10)


async def flood(servicer: Servicer, tmp_path: Path) -> set[object]:
    """Return how streams end that are written to when the server ends them."""
    ends: set[object] = set()
    async with serving(servicer, tmp_path) as connection:
        for _ in range(20):
            async with streaming(connection) as stream:
                for number in range(FLOOD):
                    stream.send(f"m{number}")
                end = await stream.receive(10)
                ends.add((type(end.error), end.error.message) if isinstance(end, Broken) else end)
    return ends


async def test_a_client_that_still_writes_hears_why_it_was_refused(servicer: Servicer, tmp_path: Path) -> None:
    async def refuse(stream: "Stream[str, str]") -> None:
        await third_is_enough(stream)
        raise FailedPrecondition("taken over")

    servicer.handle = refuse
    assert await flood(servicer, tmp_path) == {(FailedPrecondition, "taken over")}


async def test_a_client_that_still_writes_hears_of_a_good_end(servicer: Servicer, tmp_path: Path) -> None:
    servicer.handle = third_is_enough
    assert await flood(servicer, tmp_path) == {Ended()}


async def test_grpc_itself_hides_such_ends(servicer: Servicer, tmp_path: Path) -> None:
    """The reason for `Ending`; it can go once this fails."""
    hidden = 0
    servicer.handle = third_is_enough
    async with serving(servicer, tmp_path) as connection:
        for _ in range(20):
            call: Any = draft_pb2_grpc.DraftServiceStub(connection).Draft(
                pb.DraftRequest(open=pb.DraftOpen(session_id="a")) for _ in range(FLOOD)
            )
            ending = Ending(call)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                found = await ending.of(error)
                hidden += error.details() == HIDING and found is None
    assert hidden


async def test_an_error_that_hides_nothing_is_told_as_it_is(servicer: Servicer, tmp_path: Path) -> None:
    async with serving(servicer, tmp_path) as connection:
        call = draft_pb2_grpc.DraftServiceStub(connection).Draft()
        ending = Ending(call)
        call.cancel()
        error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "away")
        assert await ending.of(error) is error


# --- nothing is kept ----------------------------------------------------------------------------------------------


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Only what is in no cycle goes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Ballast:
    """What a handler holds of a request."""

    itself: "Ballast"


@pytest.mark.parametrize("error", [InvalidRequest("field", "value", "another"), ProtocolError("no")])
async def test_a_refused_call_is_gone_with_all_that_its_handler_held(
    servicer: Servicer, tmp_path: Path, uncollected: None, error: Exception
) -> None:
    held: list[weakref.ref[Ballast]] = []

    def refuse() -> Any:
        ballast = Ballast()
        held.append(weakref.ref(ballast))
        raise error  # as a variable of a frame that it passes: a cycle

    servicer.describe = refuse
    async with serving(servicer, tmp_path) as connection:
        for _ in range(5):
            with pytest.raises(OutriderError):
                await describe(connection)
        assert len(held) == 5
        async with asyncio.timeout(60):
            while any(each() for each in held):  # noqa: ASYNC110  (nothing announces that they are gone)
                await asyncio.sleep(0.01)


async def test_what_a_service_began_with_is_no_part_of_later_collections() -> None:
    served = asyncio.Event()
    settling = asyncio.create_task(_settle(SimpleNamespace(served=served)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    try:
        served.set()
        await settling
        assert gc.get_freeze_count() > before + 10_000
        later = Ballast()
        later.itself = later
        seen = weakref.ref(later)
        del later
        gc.collect()
        assert seen() is None
        assert gc.get_threshold() == THRESHOLDS
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


# --- lines of logs ------------------------------------------------------------------------------------------------


def test_of_many_lines_of_a_kind_one_in_a_while_is_written_and_the_rest_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 0.0
    sparing = Sparing(10.0, lambda: now_s)
    assert [sparing.allows("a"), sparing.allows("a"), sparing.allows("b"), sparing.allows("a")] == [
        True, False, True, False,
    ]  # fmt: skip
    now_s = 9.9
    assert not sparing.allows("a")
    now_s = 10.0
    assert sparing.allows("a")
    assert sparing.allows("b")
    assert caplog.messages == ["3 lines like the next one were left out"]
    now_s = 20.0
    assert sparing.allows("a")
    assert len(caplog.messages) == 1


async def test_peers_that_break_the_protocol_write_few_lines(
    servicer: Servicer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Any:
        raise ProtocolError("nonsense")

    servicer.describe = refuse
    async with serving(servicer, tmp_path) as connection:
        for _ in range(50):
            with pytest.raises(ProtocolError, match="nonsense"):
                await describe(connection)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.levelname for record in told] == ["WARNING"]
    assert "breaks the protocol: nonsense" in told[0].getMessage()
