"""How calls of scripts leave for the server: those that many sessions make at about one time, in one write.

A call by itself takes several times as long as one of many: a connection is taken and given back, and a task writes
under a time limit. What waits for a pass of a verifier gets its verdicts together, so
that its appends are many at one time.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from copy import copy
from typing import Any, TypeAlias

from hiredis import pack_command
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError  # noqa: A004  (the library's own name; it is not the built-in one)

LOST_TRANSPORT = "the handler is closed"
"""What uvloop says of a transport whose connection is lost."""
NO_WRITER = "'NoneType' object has no attribute 'writelines'"
"""Of redis-py's error where one call has closed the connection that another one is about to write to."""

MAX_UNDER_WAY = 2
"""Writes that wait for their replies; what comes meanwhile goes into the next. One more than one, so that a connection
that has died holds up nobody."""

Argument: TypeAlias = bytes | str | int
_pack: Any = pack_command
"""Its stub knows of commands of one word only."""


class Batches:
    """Sends scripts; each caller gets its own reply or error, as if it had been sent alone."""

    def __init__(self, client: Redis) -> None:
        """Keep the client, whose time-outs bound every write."""
        self._client = client
        self._waiting: list[tuple[tuple[Argument, ...], asyncio.Future[Any]]] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._begins = False
        """Whether a task is about to take what waits."""

    async def evalsha(self, *arguments: Argument) -> Any:
        """Run a script that the server knows, and return its reply.

        One that is cancelled while it is under way may have run or not.

        Args:
            *arguments: its SHA-1, the number of its keys, the keys, and its ARGV.

        Raises:
            RedisError: the server's answer, or there was none.
            OSError: the connection failed.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((arguments, answer))
        self._begin()
        reply = await answer
        if isinstance(reply, Exception):
            raise copy(reply)  # several callers may raise the same one, each with frames of its own
        return reply

    def _begin(self) -> None:
        """Start a task that takes all that waits by the time it runs, if there is room for one."""
        if not self._waiting or self._begins or len(self._under_way) >= MAX_UNDER_WAY:
            return
        self._begins = True
        task = asyncio.get_running_loop().create_task(self._send())
        self._under_way.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._under_way.discard(task)
        self._begin()

    async def _send(self) -> None:
        batch, self._waiting, self._begins = self._waiting, [], False
        batch = [each for each in batch if not each[1].done()]  # a caller that has gone wants nothing
        if not batch:
            return
        try:
            replies = await heeding_cancellation(self._exchange([arguments for arguments, _ in batch]))
        except Exception as error:  # each caller raises it
            replies = [error] * len(batch)
        for (_, answer), reply in zip(batch, replies, strict=True):
            if not answer.done():
                answer.set_result(reply)

    async def _exchange(self, calls: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Write calls at once and return their replies, errors of the server's among them.

        redis-py's pipeline does the same, and takes ten times as long to write a command down.
        """
        pool: Any = self._client.connection_pool
        connection = await pool.get_connection()
        replies = list[Any]()
        try:
            await connection.send_packed_command([_pack(("EVALSHA", *arguments)) for arguments in calls])
            for _ in calls:
                try:
                    replies.append(await connection.read_response())
                except ResponseError as error:
                    replies.append(error)
        finally:
            await pool.release(connection)
        return replies


async def heeding_cancellation(call: Awaitable[Any]) -> Any:
    """Await a call of redis-py, and end with `CancelledError` if the task was cancelled meanwhile.

    redis-py writes through `asyncio.wait_for`, and that of Python 3.11 forgets a cancellation that arrives as the write
    is done: a heartbeat would never end. Source: https://github.com/python/cpython/issues/86296.

    Raises:
        ConnectionError: the connection was lost before anything was written to it. asyncio drops what is written then;
            uvloop raises a RuntimeError, which redis-py passes on. Or another call of a new cluster client, which is
            still finding its nodes, has closed it: redis-py then writes to nothing.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await call
    except (RuntimeError, AttributeError) as error:
        if LOST_TRANSPORT not in str(error) and NO_WRITER not in str(error):
            raise
        raise ConnectionError("the connection was lost as soon as it was made") from error
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
