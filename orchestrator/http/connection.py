"""One HTTP connection: uvicorn's, with bounds on how many there are, and on how long a client may send or not read."""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.http.limits import HttpLimits

log = logging.getLogger(__name__)


class Connection(H11Protocol):
    """Closes itself when a head does not arrive in time: a client that sends a byte now and then holds nothing.

    One that does not read is cut off, for what still waits to be sent would keep a closed connection open for ever.
    """

    def __init__(self, limits: HttpLimits, **uvicorns: Any) -> None:
        """Keep the limits.

        Args:
            limits: of the server.
            **uvicorns: what uvicorn gives its protocols.
        """
        super().__init__(**uvicorns)
        self._limits = limits
        self._waiting: asyncio.TimerHandle | None = None
        self._stalling: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: Any) -> None:
        """Take a connection, unless there are too many."""
        if len(self.connections) >= self._limits.max_connections:
            log.warning("%d connections are open; another one is closed", len(self.connections))
            self._refused = True
            transport.abort()
            return
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes: the first of a head starts the clock, the last one stops it."""
        if self._refused:
            return
        if self._between_requests and self._waiting is None:
            self._expect_head()
        super().data_received(data)
        if not self._between_requests:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        self._stop_stalling()
        if not self._refused:
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Too much waits to be sent: the client has to read, and the clock runs."""
        super().pause_writing()
        self._stop_stalling()
        self._stalling = self.loop.call_later(self._limits.stall_timeout_s, self._cut_off)

    def resume_writing(self) -> None:
        """The client has read."""
        self._stop_stalling()
        super().resume_writing()

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._waiting = self.loop.call_later(self._limits.read_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _stop_stalling(self) -> None:
        if self._stalling is not None:
            self._stalling.cancel()
            self._stalling = None

    def _give_up(self) -> None:
        self._waiting = None
        if self._between_requests and not self.transport.is_closing():
            self.transport.close()

    def _cut_off(self) -> None:
        self._stalling = None
        log.info("a client has not read for %g s; its connection is closed", self._limits.stall_timeout_s)
        self.transport.abort()
