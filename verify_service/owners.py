"""Which certificate speaks for which draft worker.

Without certificates a `Propose` stream speaks for whichever worker its hello names, and the newest stream of a worker
replaces the one before. With them, one draft worker must not be able to end another's stream and propose in its place.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import PermissionDenied
from outrider.ids import WorkerId
from outrider.sparing import Sparing

log = logging.getLogger(__name__)


class Owners:
    """Holds, for each worker id with an open stream, the names of the certificate that came with it."""

    def __init__(self, certified: bool = False) -> None:
        """Know nobody yet.

        Args:
            certified: whether a worker's id has to be a name in its certificate.
        """
        self._certified = certified
        self._sparing = Sparing()
        self._held: dict[WorkerId, tuple[frozenset[str], int]] = {}

    @contextmanager
    def claim(self, worker_id: WorkerId, names: tuple[str, ...]) -> Iterator[None]:
        """Let a stream speak for a worker for the time of the block.

        Args:
            worker_id: from its hello.
            names: in the peer's certificate; empty without TLS, where nothing is known of anybody.

        Raises:
            PermissionDenied: another certificate speaks for this worker, or this one does not name it.
        """
        if not names:
            yield
            return
        shown = frozenset(names)
        holder, count = self._held.get(worker_id, (shown, 0))
        if holder != shown or (self._certified and worker_id not in shown):
            why = "that worker has an open stream under another" if holder != shown else "that id is no name of it"
            text = f"a certificate that names {', '.join(names)} may not speak for worker {worker_id}: {why}"
            if self._sparing.allows():
                log.warning("refused a Propose stream: %s", text)
            raise PermissionDenied(text)
        self._held[worker_id] = (shown, count + 1)
        try:
            yield
        finally:
            self._release(worker_id)

    def _release(self, worker_id: WorkerId) -> None:
        shown, count = self._held[worker_id]
        if count == 1:
            del self._held[worker_id]
        else:
            self._held[worker_id] = (shown, count - 1)
