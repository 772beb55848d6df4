"""Sends calls as raw bytes over real connections, and notes how each ended."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from outrider.errors import ProtocolError
from outrider.rpc import channel
from outrider.rpc.ending import Ending
from outrider.v1 import generation_pb2
from tests.fuzz.inputs import Call

LIMIT_S = 30.0
"""Deadline of every call: one that reaches it hangs."""
ENOUGH = 4
"""Answers after which a caller leaves: it was taken, and would only be served."""
ENOUGH_S = 0.5
"""The same in time, from the first answer on."""
NUM_AT_ONCE = 24
LEFT = "left by its caller"
CLAIMED = "is lost, and would be drawn differently"
"""Of an answer to a caller who says to have seen more than the log has. These say so at random; who does not is an
honest client, whose text is compared."""
DEFECTS = ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "DATA_LOSS", "UNAVAILABLE")
"""Statuses that no input may cause; a broken protocol between services is told apart from INTERNAL."""


@dataclass
class Book:
    """What a run finds."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls by method and end."""
    num_inputs: int = 0
    violations: list[str] = field(default_factory=list)
    num_honest: int = 0
    """Generations of honest clients, each with the text of its twin."""
    deleted: set[str] = field(default_factory=set)
    """Sessions that a call asked to delete, perhaps while another one was about to go on with them."""
    num_refused: int = 0
    """Times that an honest client was told to come back later."""


class Shooter:
    """Connections to one service of each role."""

    def __init__(self, addresses: Mapping[str, str], book: Book) -> None:
        """Make one that is connected inside `async with`."""
        self._addresses, self._book = addresses, book
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> "Shooter":
        for role, address in self._addresses.items():
            self._channels[role] = await self._exits.enter_async_context(channel(address))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def shoot(self, calls: Iterable[Call]) -> None:
        """Send calls, many at once, and note the end of each."""
        rest = iter(calls)  # shared: whoever is free takes the next
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_AT_ONCE):
                tasks.create_task(self._shoot_on(rest))

    async def _shoot_on(self, rest: Iterable[Call]) -> None:
        for call in rest:
            status = await self._send(call)
            self._book.statuses[call.method.name, status] += 1
            self._book.num_inputs += len(call.inputs)

    async def _send(self, call: Call) -> str:
        """Send one call; return how it ended."""
        self._book.deleted.update(deleted_by(call))
        # Of this kind whatever the method is: what a server sees of the kind is only how many messages come.
        method: Callable[..., Any] = self._channels[call.method.role].stream_stream(call.method.path)
        stream = method(_messages(call), timeout=LIMIT_S)
        ending = Ending(stream)
        leaving: asyncio.TimerHandle | None = None
        num_answers, left = 0, False

        def leave() -> None:
            nonlocal left
            left = True
            stream.cancel()

        try:
            async for _ in stream:
                num_answers += 1
                leaving = leaving or asyncio.get_running_loop().call_later(ENOUGH_S, leave)
                if num_answers == ENOUGH:
                    leave()
        except asyncio.CancelledError:
            if not left:
                raise
            return LEFT
        except grpc.aio.AioRpcError as error:
            status = await ending.of(error)
            return LEFT if left else self._judge(call, status) if status is not None else "OK"
        finally:
            if leaving is not None:
                leaving.cancel()
        return "OK"

    def _judge(self, call: Call, error: grpc.RpcError) -> str:
        """Name the status of a call that the server ended; note one that no input may cause."""
        assert isinstance(error, grpc.aio.AioRpcError)
        name, words = error.code().name, str(error.details())
        if name == "INTERNAL" and _reason(error) == ProtocolError.reason:
            return "INTERNAL (protocol error)"
        if name == "DATA_LOSS" and any(f"session {gone} is gone" in words for gone in self._book.deleted):
            return "DATA_LOSS (deleted)"
        if name == "DATA_LOSS" and call.method.name.endswith("/Resume") and CLAIMED in words:
            return "DATA_LOSS (claimed)"
        if name in DEFECTS:
            self._book.violations.append(f"call {call.number}, {call.method.name}: {name}: {words}")
        return name


def deleted_by(call: Call) -> list[str]:
    """Return the sessions that a call asks to delete."""
    if not call.method.name.endswith("/DeleteSession"):
        return []
    found = []
    for data in call.inputs:
        request = generation_pb2.DeleteSessionRequest()
        with suppress(DecodeError):
            request.ParseFromString(data)
            found.append(request.session_id)
    return [session_id for session_id in found if session_id]


async def _messages(call: Call) -> AsyncIterator[bytes]:
    for data in call.inputs:
        yield data
    await asyncio.sleep(call.wait_s)


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Return the name that a service gave its error; empty if the error is none of its own."""
    info = ErrorInfo()
    status = rpc_status.from_call(error)
    return info.reason if status is not None and any(each.Unpack(info) for each in status.details) else ""
