"""The records of a process: those of generations that run, of some that ended, and the files they are written to."""

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote
from weakref import WeakSet

from prometheus_client import Counter

from orchestrator.events import Committer
from orchestrator.flight.encoding import segment_to_json
from orchestrator.flight.recorder import Recorder, Segment
from orchestrator.flight.replay import FORMAT
from outrider.errors import Cancelled, HandedOver, LeaseLost, OutriderError, PermissionDenied, Unauthenticated
from outrider.ids import SessionId

log = logging.getLogger(__name__)

MAX_ENDED = 16
"""Generations that are kept after their end."""
NO_FAULT = (Cancelled, HandedOver, LeaseLost, PermissionDenied, Unauthenticated)
"""Errors that end a generation in good order, and leave no record."""


@dataclass(frozen=True, slots=True)
class FlightSettings:
    """What is recorded, and where it goes."""

    num_events: int = 256
    """Last events of each generation that are kept in memory, about; 0 records nothing."""
    folder: str = ""
    """Where records are written; empty: nowhere."""
    tokens: bool = False
    """Whether they hold token ids, text and log-probabilities."""
    max_files: int = 200
    """Records in the folder; the oldest go."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Flight:
    """The record of one generation."""

    session_id: SessionId
    fence: int
    recorder: Recorder
    outcome: str = "running"


class Flights:
    """Begins, ends and writes records."""

    def __init__(self, settings: FlightSettings | None = None, written: Counter | None = None) -> None:
        """Hold no record yet.

        Args:
            settings: what is recorded.
            written: counts files, by `cause`.
        """
        self.settings = settings or FlightSettings()
        self._written = written
        self._running: WeakSet[Flight] = WeakSet()
        self._ended: deque[Flight] = deque(maxlen=MAX_ENDED)

    def begin(self, session_id: SessionId, fence: int, committer: Committer) -> Flight:
        """Start the record of a generation; an empty one where none could be written.

        What is kept for nothing costs pauses: the collector of garbage looks at hundreds of objects per round.
        """
        num_events = self.settings.num_events if self.settings.folder else 0
        flight = Flight(session_id, fence, Recorder(committer, num_events, time.monotonic))
        self._running.add(flight)
        return flight

    async def end(self, flight: Flight, outcome: str, error: OutriderError | None) -> None:
        """A generation is over; write its record if it failed. Idempotent."""
        if flight not in self._running:
            return
        self._running.discard(flight)
        flight.outcome = outcome
        if len(self._ended) == MAX_ENDED:
            self._ended.popleft().recorder.forget()
        self._ended.append(flight)
        if error is not None and not isinstance(error, NO_FAULT):
            await self._write([flight], "error")

    async def write_all(self) -> int:
        """Write the records of what runs and of what ended last; return how many."""
        return await self._write([*self._ended, *self._running], "demand")

    async def write_when_told(self) -> None:
        """Write all records whenever the process gets SIGUSR1, until cancelled.

        The signal is taken without a folder too: left alone it would end the process.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # signals are the main thread's
        told, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, told.set)
        try:
            while True:
                await told.wait()
                told.clear()
                if self.settings.folder:
                    log.info("flight records written to %s: %d", self.settings.folder, await self.write_all())
                else:
                    log.warning("no flight record is written: FLIGHT_FOLDER is not set")
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)

    async def _write(self, flights: list[Flight], cause: str) -> int:
        if not self.settings.folder or not self.settings.num_events:
            return 0
        frozen = [(flight, flight.recorder.segments) for flight in flights]
        try:
            await asyncio.to_thread(self._save, frozen)
        except OSError as error:
            log.warning("a flight record cannot be written: %s", error)
            return 0
        if self._written is not None:
            self._written.labels(cause).inc(len(frozen))
        return len(frozen)

    def _save(self, flights: list[tuple[Flight, list[Segment]]]) -> None:
        """Write records, for nobody else to read; a file that is there is whole."""
        folder = Path(self.settings.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for flight, segments in flights:
            path = folder / _file_name(flight)
            part = path.with_suffix(".part")
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(self._text(flight, segments))
            part.replace(path)
        for old in sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime)[: -self.settings.max_files]:
            old.unlink()

    def _text(self, flight: Flight, segments: list[Segment]) -> str:
        tokens = self.settings.tokens
        record = {
            "format": FORMAT,
            "session": flight.session_id,
            "fence": flight.fence,
            "outcome": flight.outcome,
            "written": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "tokens": tokens,
            "from_the_beginning": not flight.recorder.dropped,
            "segments": [segment_to_json(segment, tokens=tokens) for segment in segments],
        }
        return json.dumps(record)


def _file_name(flight: Flight) -> str:
    return f"{quote(flight.session_id, safe='')[:150]}-{flight.fence}.json"
