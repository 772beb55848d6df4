"""A draft worker's streams to verifiers, over real gRPC: how long one that nobody needs stays, and what comes next."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from draft_service.metrics import DraftMetrics
from draft_service.proposals import ProposeStreams
from outrider.ids import Epoch, SessionId, WorkerId
from outrider.messages import Pass, ProposeHello, Vocabulary
from tests.integration.draft_bench import VOCAB, recording_verifier, until

LINGER_S = 0.4
NOTHING = Pass(SessionId("s"), Epoch(), 1, 2)


@asynccontextmanager
async def streams(linger_s: float) -> AsyncIterator[ProposeStreams]:
    hello = ProposeHello(WorkerId("d"), Vocabulary("toy", VOCAB))
    refused = list[object]()
    made = ProposeStreams(hello, DraftMetrics(), lambda *said: refused.append(said), lambda *_: None, linger_s)
    async with made as entered:
        yield entered
    assert not refused


async def test_a_session_that_comes_while_an_unneeded_stream_is_being_closed_has_one_of_its_own() -> None:
    async with recording_verifier() as (verifier, address), streams(0.0) as kept:
        kept.acquire(address)
        await until(lambda: len(verifier.streams) == 1)
        kept.release(address)
        for _ in range(2):
            await asyncio.sleep(0)  # the timer is over, and the stream's task is not
        kept.acquire(address)
        kept.send(address, NOTHING)
        assert await verifier.next() == NOTHING
        assert len(verifier.streams) == 2


async def test_a_stream_stays_for_a_while_after_its_last_session_however_many_went_before() -> None:
    async with recording_verifier() as (verifier, address), streams(LINGER_S) as kept:
        kept.acquire(address)
        await until(lambda: len(verifier.streams) == 1)
        kept.release(address)
        await asyncio.sleep(0.75 * LINGER_S)
        kept.acquire(address)
        kept.release(address)
        released_s = asyncio.get_running_loop().time()
        await until(lambda: verifier.ended == 1)
        assert asyncio.get_running_loop().time() - released_s >= LINGER_S
        assert len(verifier.streams) == 1
