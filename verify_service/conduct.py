"""How draft workers behaved towards one session: who is held to what, and who is cut off from it.

Counts last as long as the session, so that attaching a worker again gives it nothing back.
"""

from outrider.ids import WorkerId

MAX_GARBAGE = 8
"""Garbage messages and gaps of one worker in a session before it is quarantined for it."""
MAX_BROKEN = 3
"""Streams of one worker that ended on tokens it had announced, in a session, before it is quarantined for it."""


class Conduct:
    """Faults of each worker, and which of them are quarantined."""

    def __init__(self) -> None:
        """Hold nothing against anybody."""
        self._faults: list[WorkerId] = []
        self._broken: list[WorkerId] = []
        self._quarantined: set[WorkerId] = set()

    def is_quarantined(self, worker_id: WorkerId) -> bool:
        """Whether the worker is cut off from the session."""
        return worker_id in self._quarantined

    def quarantine(self, worker_id: WorkerId) -> None:
        """Cut a worker off for the rest of the session."""
        self._quarantined.add(worker_id)

    def fault(self, worker_id: WorkerId) -> bool:
        """Count what no honest worker sends; return whether it was once too often."""
        self._faults.append(worker_id)
        return self._faults.count(worker_id) >= MAX_GARBAGE

    def broken(self, worker_id: WorkerId) -> bool:
        """Count what seldom befalls an honest worker; return whether it was once too often."""
        self._broken.append(worker_id)
        return self._broken.count(worker_id) >= MAX_BROKEN
