"""A TCP proxy that delays what passes through it, as a longer wire would."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

CHUNK_BYTES = 1 << 16
SPIN_S = 0.0012
"""Event loops wake up to a millisecond late: the end of a delay is waited for awake."""


class SlowWire:
    """Forwards connections to one address, each direction with its own delay; an async context manager."""

    def __init__(self, listen_port: int, target_port: int, one_way_s: float) -> None:
        """Describe it; both ports are on the loopback.

        Args:
            listen_port: where it is reached.
            target_port: where it leads.
            one_way_s: delay of every byte in each direction, >= 0.
        """
        self._listen_port, self._target_port, self._one_way_s = listen_port, target_port, one_way_s
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._listen_port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, other_writer))
                group.create_task(self._forward(other_reader, writer))
        except* OSError:
            # Either end is gone; so is the connection.
            pass
        finally:
            writer.close()
            other_writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read on while earlier bytes are on their way: a delay, not a bottleneck."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deliver(on_the_way, writer))
            clock: Callable[[], float] = asyncio.get_running_loop().time
            while data := await reader.read(CHUNK_BYTES):
                on_the_way.put_nowait((clock() + self._one_way_s, data))
            on_the_way.put_nowait((clock() + self._one_way_s, b""))

    async def _deliver(self, on_the_way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s, data = await on_the_way.get()
            while (left_s := due_s - clock()) > 0.0:  # noqa: ASYNC110  (a moment is waited for, no event)
                await asyncio.sleep(max(0.0, left_s - SPIN_S))
            if not data:
                with suppress(OSError):
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
