"""What the session store refuses, as part of the one error tree.

    StoreError
    ├── SessionExists      (also FailedPrecondition)
    ├── SessionNotFound    (also NotFound)
    ├── LeaseHeld          (also FailedPrecondition)   somebody else's lease is still running
    ├── LogConflict        the log holds other tokens in that range
    ├── LogGap             the append or read starts past the log's end; `length` says where it ends
    ├── StateUnreadable    a stored record lacks what every version writes, or holds another type
    ├── LeaseLost
    │   └── Fenced         the fencing number is not the session's current one
    └── StoreUnavailable   not reached or no answer in time; the write may or may not have happened
        ├── ServerNotFound     no server program is installed for the embedded store
        └── ServerFailed       the embedded server ended or did not become ready

`outrider.errors` has the root, the codes, and how an error crosses the wire.
"""

from typing import Self

from outrider.errors import FailedPrecondition, LeaseLost, NotFound, StoreError, StoreUnavailable


class SessionExists(FailedPrecondition, StoreError):
    """A session with this id is in the store already."""

    reason = "SESSION_EXISTS"


class SessionNotFound(NotFound, StoreError):
    """No session with this id: never made, deleted, expired, or somebody else's."""

    reason = "SESSION_NOT_FOUND"

    @classmethod
    def of(cls, session_id: str) -> Self:
        """Return the error for a session; always the same words: they tell nothing of others' sessions."""
        return cls(f"session {session_id} is not in the store")


class LeaseHeld(FailedPrecondition, StoreError):
    """Another owner's lease has not expired and the caller did not force its way."""

    reason = "LEASE_HELD"

    def __init__(self, message: str, owner: str = "") -> None:
        """Keep the message and the name of the present owner."""
        super().__init__(message)
        self.owner = owner


class Fenced(LeaseLost):
    """The caller's fencing number is not the current one: another owner took the session, or the lease was released."""

    reason = "FENCED"

    def __init__(self, message: str, current: int = 0) -> None:
        """Keep the message and the session's current fencing number."""
        super().__init__(message)
        self.current = current


class LogConflict(StoreError):
    """An append overlaps tokens in the log that are not the same ids and classes; nothing was written."""

    reason = "LOG_CONFLICT"

    def __init__(self, message: str, length: int = 0) -> None:
        """Keep the message and the log's length in tokens."""
        super().__init__(message)
        self.length = length


class LogGap(StoreError):
    """An append starts past the log's end (a failover lost the tail): append from `length` on; nothing was written."""

    reason = "LOG_GAP"

    def __init__(self, message: str, length: int = 0) -> None:
        """Keep the message and the log's length in tokens."""
        super().__init__(message)
        self.length = length


class StateUnreadable(StoreError):
    """A stored record cannot be decoded."""

    reason = "STATE_UNREADABLE"


class ServerNotFound(StoreUnavailable):
    """No server program for the embedded store: neither the wheel's nor one on PATH."""

    reason = "STORE_SERVER_NOT_FOUND"


class ServerFailed(StoreUnavailable):
    """The embedded server ended at once, or was not ready in time; the message ends with its log."""

    reason = "STORE_SERVER_FAILED"
