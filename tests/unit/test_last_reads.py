"""What a peer has sent behind the end of its call is read all the same: nobody else would free it."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

import outrider.rpc.streams as streams_module
from outrider.errors import ProtocolError
from outrider.rpc import server_stream


def _same(message: Any) -> Any:
    return message


async def test_a_server_stream_that_ends_early_leaves_nothing_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "MAX_QUEUED", 2)
    read, ended = list[int](), asyncio.Event()

    async def requests() -> AsyncIterator[int]:
        for number in range(9):
            if number == 5:
                await ended.wait()
            read.append(number)
            yield number

    with pytest.raises(ProtocolError, match="enough"):
        async with server_stream(requests(), SimpleNamespace(write=None), _same, _same) as stream:
            assert await stream.receive() == 0
            raise ProtocolError("enough")
    ended.set()
    await asyncio.gather(*streams_module._last_reads)
    assert read == list(range(9))


async def test_how_a_call_ends_behind_its_stream_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def requests() -> AsyncIterator[int]:
        yield 0
        await ended.wait()
        raise RuntimeError("locally aborted")

    async with server_stream(requests(), SimpleNamespace(write=None), _same, _same) as stream:
        assert await stream.receive() == 0
    ended.set()
    await asyncio.gather(*streams_module._last_reads)
    assert not caplog.records
