"""A client that is closed in mid-generation: its streams end with an error of ours, and no further call is made."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from outrider.client import Client
from outrider.codec.generation import event_to_proto
from outrider.errors import Cancelled
from outrider.generation import Chunk, GenerationRequest, Started, TokenPrompt
from outrider.ids import Mode, SessionId
from outrider.rpc import RpcServer
from outrider.sync_client import SyncClient
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

ASKED = GenerationRequest(TokenPrompt((1, 2, 3)))


class Endless(generation_pb2_grpc.GenerationServiceServicer):
    """Shows two tokens, and then nothing for ever."""

    def __init__(self) -> None:
        self.num_calls, self.num_left, self.address = 0, 0, ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        self.num_calls += 1
        try:
            for event in (Started(SessionId("s"), 3, Mode.GREEDY), Chunk(3, (7,), "a"), Chunk(4, (8,), "b")):
                yield pb.GenerateResponse(event=event_to_proto(event))
            await asyncio.Event().wait()
        finally:
            self.num_left += 1


@pytest.fixture
async def endless() -> AsyncIterator[tuple[Client, Endless]]:
    servicer, server = Endless(), RpcServer()  # type: ignore[abstract]  # nothing else is asked
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.server)
    servicer.address = await server.start("127.0.0.1:0", [])
    client = Client(servicer.address)
    yield client, servicer
    await client.close()
    await server.stop(0)


async def followed(client: Client, seen: list[object], until: asyncio.Event | None = None) -> None:
    """Read a generation; after two events not before `until`."""
    async with aclosing(client.generate(ASKED)) as events:
        async for event in events:
            seen.append(event)
            if until is not None and len(seen) == 2:
                await until.wait()


async def seen_so_many(seen: list[object], count: int) -> None:
    async with asyncio.timeout(10):
        while len(seen) < count:  # noqa: ASYNC110  (nothing announces it)
            await asyncio.sleep(0.005)


async def test_whoever_waits_for_the_next_token_is_told_that_the_client_is_closed(
    endless: tuple[Client, Endless],
) -> None:
    client, servicer = endless
    seen: list[object] = []
    reading = asyncio.create_task(followed(client, seen))
    await seen_so_many(seen, 3)
    await client.close()
    with pytest.raises(Cancelled, match="the client is closed"):
        await asyncio.wait_for(reading, 10)
    async with asyncio.timeout(10):
        while not servicer.num_left:  # noqa: ASYNC110  (nothing announces it)
            await asyncio.sleep(0.005)
    assert servicer.num_calls == 1


async def test_whoever_goes_on_reading_is_told_that_the_client_is_closed(endless: tuple[Client, Endless]) -> None:
    client, servicer = endless
    seen, closed = list[object](), asyncio.Event()
    reading = asyncio.create_task(followed(client, seen, closed))
    await seen_so_many(seen, 2)
    await client.close()
    closed.set()
    with pytest.raises(Cancelled, match="the client is closed"):
        await asyncio.wait_for(reading, 10)
    assert servicer.num_calls == 1


async def test_a_task_that_is_cancelled_ends_as_tasks_do_though_the_client_is_closed(
    endless: tuple[Client, Endless],
) -> None:
    client, _ = endless
    seen: list[object] = []
    reading = asyncio.create_task(followed(client, seen))
    await seen_so_many(seen, 3)
    reading.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reading, 10)


async def test_nothing_is_asked_of_a_closed_client(endless: tuple[Client, Endless]) -> None:
    client, servicer = endless
    await client.close()
    await client.close()
    asking = (client.ask((1, 2)), client.samples((1, 2), 2), client.session(SessionId("s")), client.models())
    for told in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(told, Cancelled)
        assert told.message == "the client is closed"
    assert not servicer.num_calls


async def test_a_client_that_is_closed_while_nobody_answers_gives_up() -> None:
    client = Client("127.0.0.1:1")
    asking = asyncio.gather(client.ask((1, 2)), client.models(), return_exceptions=True)
    await asyncio.sleep(0.05)
    await client.close()
    assert [type(told) for told in await asyncio.wait_for(asking, 10)] == [Cancelled, Cancelled]


async def test_the_client_without_an_event_loop_tells_the_same(endless: tuple[Client, Endless]) -> None:
    _, servicer = endless

    def close_in_the_middle() -> None:
        client = SyncClient(servicer.address)
        events = client.generate(ASKED)
        assert [type(next(events)) for _ in range(3)] == [Started, Chunk, Chunk]
        client.close()
        client.close()
        for goes_on in (lambda: next(events), lambda: client.ask((1, 2)), client.models):
            with pytest.raises(Cancelled, match="the client is closed"):
                goes_on()

    await asyncio.to_thread(close_in_the_middle)
    assert servicer.num_calls == 1
