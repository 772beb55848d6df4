"""How a call ended, where gRPC would hide it.

A server may end a call while its client still writes. The write then fails, and grpc.aio puts "Internal error from
Core" in the place of the status that has arrived, or is about to: who was told to go away, and why, would read of a
defect. But a call tells its callbacks of each status that it is given, so the server's own can be kept.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

HIDING = "Internal error from Core"
"""What grpc.aio says in the place of a status."""
LATE_S = 1.0
"""How long the server's own status may take behind the failure of a write."""

ResultT = TypeVar("ResultT")
AnyCall = Any
"""A call of any type; only what all of them have is used."""


class Ending:
    """The status that the server gave to one call."""

    def __init__(self, call: AnyCall) -> None:
        """Watch a call from its beginning on."""
        self._found: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._note)

    async def of(self, error: grpc.RpcError) -> grpc.RpcError | None:
        """Return how the call ended that was found to have ended by an error.

        Args:
            error: what a read or the end of a call raised.

        Returns:
            The server's status; None if that is OK; the error as it is if nothing else arrives.
        """
        if not isinstance(error, grpc.aio.AioRpcError) or not _hides(error.code(), error.details()):
            return error
        done, _ = await asyncio.wait({self._found}, timeout=LATE_S)
        if not done:
            return error
        found = self._found.result()
        return None if found.code() is grpc.StatusCode.OK else found

    def _note(self, call: AnyCall) -> None:
        """Keep the call's status of now, unless it hides another one; called for each that the call is given."""
        code, details = _now(call.code()), _now(call.details())
        if self._found.done() or _hides(code, details):
            return
        trailing = _now(call.trailing_metadata()) or grpc.aio.Metadata()
        self._found.set_result(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))


def _hides(code: grpc.StatusCode, details: str | None) -> bool:
    return code is grpc.StatusCode.INTERNAL and details == HIDING


def _now(answer: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return what a coroutine gives that has nothing to wait for: that of a call which has its status."""
    try:
        answer.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    answer.close()
    raise asyncio.InvalidStateError("a call that is done has no status")
