"""The draft workers' streams as the engine's thread knows them, and messages that came before their session."""

from collections import Counter, deque

from outrider.errors import FailedPrecondition
from outrider.ids import SessionId, WorkerId
from outrider.messages import Draining, ProposeMessage, ProposeResponseMessage
from verify_service.events import Arrived
from verify_service.inbox import JoinWorker, Ticket

MAX_PARKED = 1024
"""Messages kept for sessions that have not been opened yet, all workers together."""
MAX_PARKED_PER_SESSION = 16
PARKED_S = 1.0
"""How long a message waits for its session."""

LAST_HIDDEN = -1
"""The one feature layer that a pass can return."""
FEATURE_REACH = 32
"""Positions at the end of a text that is computed at once whose features are sent; those before help no drafter."""


class Workers:
    """Who is connected, under which stream; at most one stream per worker id."""

    def __init__(self, counters: Counter[str]) -> None:
        self._streams: dict[Ticket, JoinWorker] = {}
        self._tickets: dict[WorkerId, Ticket] = {}
        self._parked: deque[tuple[float, Arrived]] = deque()
        self._counters = counters

    def __len__(self) -> int:
        return len(self._streams)

    def join(self, event: JoinWorker) -> bool:
        """Take a new stream; return whether it replaces an older one of the same worker, which is ended."""
        worker_id = event.hello.worker_id
        old = self._streams.pop(self._tickets.get(worker_id, Ticket(-1)), None)
        if old is not None:
            old.send(FailedPrecondition(f"worker {worker_id} opened a newer Propose stream"))
        self._streams[event.ticket] = event
        self._tickets[worker_id] = event.ticket
        return old is not None

    def leave(self, ticket: Ticket) -> WorkerId | None:
        """Forget a stream and what it left parked; return whose it was, None if a newer one has replaced it."""
        stream = self._streams.pop(ticket, None)
        if stream is None:
            return None
        worker_id = stream.hello.worker_id
        del self._tickets[worker_id]
        self._parked = deque(entry for entry in self._parked if entry[1].worker_id != worker_id)
        return worker_id

    def sender_of(self, ticket: Ticket) -> WorkerId | None:
        """Return the worker of a stream; None if the stream has been replaced."""
        stream = self._streams.get(ticket)
        return stream.hello.worker_id if stream else None

    def wants_features(self, worker_id: WorkerId | None) -> bool:
        """Whether this worker is connected and asked for hidden states."""
        stream = self._stream(worker_id)
        return stream is not None and bool(stream.hello.feature_layers)

    def takes_hints(self, worker_id: WorkerId | None) -> bool:
        """Whether this worker is connected and wants to hear early that an epoch ended."""
        stream = self._stream(worker_id)
        return stream is not None and stream.hello.takes_hints

    def tell(self, worker_id: WorkerId | None, message: ProposeResponseMessage) -> None:
        """Send something to a worker; what cannot be delivered is only a lost optimisation."""
        stream = self._stream(worker_id)
        if stream is not None:
            stream.send(message)

    def tell_all(self, message: Draining) -> None:
        """Send something to every worker."""
        for stream in self._streams.values():
            stream.send(message)

    def dismiss_all(self) -> None:
        """End every stream in good order, behind what was sent on it."""
        for stream in self._streams.values():
            stream.send(None)

    def park(self, worker_id: WorkerId, message: ProposeMessage, now_s: float) -> None:
        """Keep a message whose session is not open yet; too many are dropped and counted."""
        self.expire(now_s)
        of_session = sum(entry.message.session_id == message.session_id for _, entry in self._parked)
        if len(self._parked) >= MAX_PARKED or of_session >= MAX_PARKED_PER_SESSION:
            self._counters["parked_overflow"] += 1
        else:
            self._parked.append((now_s + PARKED_S, Arrived(worker_id, message)))

    def unpark(self, session_id: SessionId, now_s: float) -> list[Arrived]:
        """Return, and forget, what has been waiting for a session, in the order it came."""
        self.expire(now_s)
        found = [entry for _, entry in self._parked if entry.message.session_id == session_id]
        if found:
            self._parked = deque(entry for entry in self._parked if entry[1].message.session_id != session_id)
        return found

    def expire(self, now_s: float) -> None:
        """Drop and count what has waited too long."""
        while self._parked and self._parked[0][0] <= now_s:
            self._parked.popleft()
            self._counters["parked_expired"] += 1

    def _stream(self, worker_id: WorkerId | None) -> JoinWorker | None:
        ticket = self._tickets.get(worker_id) if worker_id else None
        return None if ticket is None else self._streams[ticket]
