"""TCP proxies between any two processes, which can delay, stall, cut and reset what passes through them.

Every process is announced under the address of a gate, and whoever connects to it is recognised by the process that
owns the other end of the connection: so one address per process is enough to treat every pair of processes apart.

What happens is what TCP would make of it. Bytes behind a cut arrive when it is mended, as a retransmission would bring
them; a lost packet is a stall of everything behind it; nothing is ever left out, changed or reordered.
"""

import asyncio
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

RETRANSMISSION_S = 0.2
"""How long a lost packet stalls its connection, at least: the least retransmission time-out of Linux."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER that makes closing a reset."""
TO_TARGET, TO_SOURCE = 1, 0
"""Directions, as indices."""


class Weather:
    """What one edge is like at present; clear unless told otherwise."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """Of every byte, in each direction."""
        self.loss = 0.0
        """Share of what is read that arrives a retransmission later."""
        self.cut = [False, False]
        """Whether a direction is cut, `TO_SOURCE` first."""
        self.lot = random.Random(0)
        self.num_touched = 0
        """Pieces that were delayed or held, and connections that were reset, so far."""
        self.crossings: set[Crossing] = set()

    def delay(self) -> float:
        """Return how much later than now a piece that has just been read arrives."""
        seconds = self.delay_s
        if self.loss and self.lot.random() < self.loss:
            seconds += RETRANSMISSION_S
        self.num_touched += seconds > 0
        return seconds

    def change(self) -> None:
        """Let the connections look at the weather again, after it was changed."""
        for crossing in tuple(self.crossings):
            crossing.look()

    def reset(self) -> int:
        """Reset every connection; return how many there were."""
        crossings = tuple(self.crossings)
        for crossing in crossings:
            crossing.reset()
        self.num_touched += len(crossings)
        return len(crossings)


class Side(asyncio.Protocol):
    """One end of a connection through a gate: reads what goes in one direction."""

    def __init__(self, crossing: "Crossing", direction: int) -> None:
        self._crossing, self._direction = crossing, direction
        self.transport: asyncio.Transport | None = None
        self.far: Side | None = None
        """The side that what is read here goes to; None until it is connected."""
        self._pieces: deque[tuple[float, bytes | None]] = deque()
        """What has been read and not been passed on, and when it is due: bytes, none of them at the end of what this
        side's process says, None once the process is gone."""
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = self._was_ended = False
        """Whether this side's process has said all it will, and has been told that the other one has."""

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._crossing.made(self)

    def data_received(self, data: bytes) -> None:
        self._take(data)

    def eof_received(self) -> bool:
        """Stay open for what the other process may still say; nobody but us closes what both have ended."""
        self._has_ended = True
        self._take(b"")
        return not self._was_ended

    def connection_lost(self, error: Exception | None) -> None:
        self._take(None)
        self._crossing.lost()

    def pause_writing(self) -> None:
        """The process behind this side does not read: nor is the other one read, then."""
        other = self._crossing.other(self)
        if other.transport is not None and other.is_open:
            other.transport.pause_reading()

    def resume_writing(self) -> None:
        other = self._crossing.other(self)
        if other.transport is not None and other.is_open:
            other.transport.resume_reading()

    def _take(self, piece: bytes | None) -> None:
        weather = self._crossing.weather
        due_s = asyncio.get_running_loop().time() + weather.delay()
        if self._pieces:
            due_s = max(due_s, self._pieces[-1][0])
        self._pieces.append((due_s, piece))
        weather.num_touched += weather.cut[self._direction]
        self.flush()

    def flush(self) -> None:
        """Pass on what is due, unless the direction is cut."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._crossing.weather.cut[self._direction] or self.far is None:
            return
        loop = asyncio.get_running_loop()
        while self._pieces and self._pieces[0][0] <= loop.time():
            self.far.write(self._pieces.popleft()[1])
        if self._pieces:
            self._timer = loop.call_at(self._pieces[0][0], self.flush)

    def write(self, piece: bytes | None) -> None:
        """Let this side's process have what the other one has said."""
        if self.transport is None or not self.is_open:
            return
        if piece is None:
            self.transport.close()
        elif piece:
            self.transport.write(piece)
        else:
            self._was_ended = True
            with suppress(OSError):  # the process has reset the connection, and this loop has not seen it yet
                self.transport.write_eof()
            if self._has_ended:
                self.transport.close()

    def reset(self) -> None:
        """End this side as a lost route does: at once, and with an error."""
        self._pieces.clear()
        if self.transport is None or not self.is_open:
            return
        found = self.transport.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.transport.abort()


class Crossing:
    """One connection through a gate."""

    def __init__(self, gate: "Gate") -> None:
        self._gate = gate
        self.near, self.beyond = Side(self, TO_TARGET), Side(self, TO_SOURCE)
        self.weather = Weather()
        self._connecting: asyncio.Task[None] | None = None

    def other(self, side: Side) -> Side:
        return self.beyond if side is self.near else self.near

    def made(self, side: Side) -> None:
        """A side is connected; the near one comes first, and is read once the far one is there."""
        if side is self.beyond or side.transport is None:
            return
        side.transport.pause_reading()
        port = int(side.transport.get_extra_info("peername")[1])
        self.weather = self._gate.weather_of(port)
        self.weather.crossings.add(self)
        self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while any(self.weather.cut):  # the first packets of a connection are sent again and again
            self.weather.num_touched += 1
            await asyncio.sleep(RETRANSMISSION_S)
        try:
            await loop.create_connection(lambda: self.beyond, "127.0.0.1", self._gate.target_port)
        except OSError:
            self.reset()
            return
        self.near.far, self.beyond.far = self.beyond, self.near
        if self.near.transport is not None and self.near.is_open:
            self.near.transport.resume_reading()
        self.look()

    def look(self) -> None:
        """Pass on what the weather lets pass."""
        self.near.flush()
        self.beyond.flush()

    def lost(self) -> None:
        """A side is gone; the connection is over when both are."""
        if not self.near.is_open and not self.beyond.is_open:
            self.weather.crossings.discard(self)
            self._gate.crossings.discard(self)

    def reset(self) -> None:
        """End both sides at once, and the attempt to connect."""
        self.near.reset()
        self.beyond.reset()
        if self._connecting is not None:
            self._connecting.cancel()

    async def close(self) -> None:
        """End both sides and the attempt to connect, and wait for the end of it."""
        self.reset()
        if self._connecting is not None:
            await asyncio.gather(self._connecting, return_exceptions=True)


class Gate:
    """The announced address of one process."""

    def __init__(self, target: str, target_port: int, who: Callable[[int, int], str]) -> None:
        """Describe it.

        Args:
            target: the process.
            target_port: where it really listens, on the loopback.
            who: names the process that has opened a connection, by the ports of its ends, its own first.
        """
        self.target, self.target_port, self._who = target, target_port, who
        self.port = 0
        self._weathers: dict[str, Weather] = {}
        self.crossings: set[Crossing] = set()
        """Connections that are open."""
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """What is announced."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._cross, "127.0.0.1", self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await asyncio.gather(*(crossing.close() for crossing in tuple(self.crossings)))

    def weather(self, source: str) -> Weather:
        """Return what the edge from a process is like."""
        return self._weathers.setdefault(source, Weather())

    def weather_of(self, port: int) -> Weather:
        """Return what the edge of a new connection from a port is like."""
        return self.weather(self._who(port, self.port))

    def _cross(self) -> Side:
        crossing = Crossing(self)
        self.crossings.add(crossing)
        return crossing.near
