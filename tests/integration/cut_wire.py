"""A wire between a client and an orchestrator that can be cut as a network is: both ends see a broken connection."""

import asyncio
from contextlib import suppress


class CutWire:
    """Forwards connections to an address until they are cut; new ones are taken again at once. Enter it to listen."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def __aenter__(self) -> "CutWire":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        while self._ends:  # noqa: ASYNC110  (their tasks end by themselves)
            await asyncio.sleep(0.01)

    def cut(self) -> None:
        """Break every connection."""
        for end in self._ends:
            end.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._ends |= ends
        try:
            with suppress(OSError):
                there, to_there = await asyncio.open_connection(self._host, self._port)
                ends.add(to_there)
                self._ends.add(to_there)
                await asyncio.gather(_forward(reader, to_there), _forward(there, writer))
        finally:
            for end in ends:
                end.transport.abort()
            self._ends -= ends


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until either end is gone, and take the other with it."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
