"""The error tree, and the one table that maps it to gRPC status codes.

Everything Outrider raises on purpose is an `OutriderError`. The right-hand columns are what a peer or client sees: the
gRPC status code and `google.rpc.ErrorInfo.reason`, by which `outrider.status` rebuilds the class on the other side.

    OutriderError                    (never raised itself)
    ├── InvalidRequest               INVALID_ARGUMENT     INVALID_REQUEST        + BadRequest field violation
    ├── Unauthenticated              UNAUTHENTICATED      UNAUTHENTICATED
    ├── PermissionDenied             PERMISSION_DENIED    PERMISSION_DENIED
    ├── NotFound                     NOT_FOUND            NOT_FOUND
    ├── FailedPrecondition           FAILED_PRECONDITION  FAILED_PRECONDITION
    │   └── VocabularyMismatch       FAILED_PRECONDITION  VOCABULARY_MISMATCH
    ├── ResourceExhausted            RESOURCE_EXHAUSTED   RESOURCE_EXHAUSTED     + RetryInfo
    │   └── LimitReached             RESOURCE_EXHAUSTED   LIMIT_REACHED          + RetryInfo
    ├── Unavailable                  UNAVAILABLE          UNAVAILABLE
    │   ├── HandedOver               UNAVAILABLE          HANDED_OVER            (resume at another orchestrator)
    │   └── HandshakeFailed          UNAVAILABLE          HANDSHAKE_FAILED       (made by the side that called)
    ├── DeadlineExceeded             DEADLINE_EXCEEDED    DEADLINE_EXCEEDED
    ├── Cancelled                    CANCELLED            CANCELLED
    ├── DataLoss                     DATA_LOSS            DATA_LOSS
    ├── ProtocolError                INTERNAL             PROTOCOL_ERROR         (a peer broke the protocol)
    ├── StoreError                   INTERNAL             STORE_ERROR
    │   ├── StoreUnavailable         UNAVAILABLE          STORE_UNAVAILABLE
    │   └── LeaseLost                ABORTED              LEASE_LOST             (a newer owner holds the session)
    └── Internal                     INTERNAL             INTERNAL

The store adds branches below `StoreError` (`outrider.store.errors`). This module is pure: it imports no grpc, so that
the pure core may raise these errors. Status codes are therefore the numbers of `google.rpc.Code`, which are also
gRPC's.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import ClassVar, Self


class Code(IntEnum):
    """The canonical status codes this project uses, with the numbers of `google.rpc.Code`."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class OutriderError(Exception):
    """Root of the tree."""

    reason: ClassVar[str] = "INTERNAL"
    """Stable name of the class on the wire; unique in the tree."""

    def __init__(self, message: str) -> None:
        """Keep the sentence that explains the error.

        Args:
            message: what happened, in words a reader of a log or a client can act on.
        """
        super().__init__(message)
        self.message = message

    def metadata(self) -> dict[str, str]:
        """Return what `rebuild` needs besides the message; it travels as `ErrorInfo.metadata`."""
        return {}

    @classmethod
    def rebuild(cls, message: str, metadata: Mapping[str, str]) -> Self:
        """Make the error again from what crossed the wire; missing metadata is tolerated."""
        del metadata
        return cls(message)


class InvalidRequest(OutriderError):
    """A client's request has a field whose value is not allowed."""

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        """Name the field, what it held and what it may hold.

        Args:
            field: path of the field in the request message, such as `sampling.top_p`.
            value: the offending value; long ones are shortened.
            allowed: the allowed range or form, such as "a number in (0, 1]".
        """
        self.field = field
        self.value = _shortened(value)
        self.allowed = allowed
        super().__init__(f"{field}: {self.value} is not allowed; expected {allowed}")

    def metadata(self) -> dict[str, str]:
        """Return field, value and allowed range."""
        return {"field": self.field, "value": self.value, "allowed": self.allowed}

    @classmethod
    def rebuild(cls, message: str, metadata: Mapping[str, str]) -> Self:
        """Make the error again; the message replaces whatever is missing."""
        error = cls(metadata.get("field", ""), _Verbatim(metadata.get("value", "")), metadata.get("allowed", ""))
        error.message = message
        error.args = (message,)
        return error


class Unauthenticated(OutriderError):
    """The caller did not show an API key, or one that is not, or no longer, valid."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(OutriderError):
    """The caller is known, and may not do this."""

    reason = "PERMISSION_DENIED"


class NotFound(OutriderError):
    """A session, model or worker that does not exist."""

    reason = "NOT_FOUND"


class FailedPrecondition(OutriderError):
    """A legal request that the present state forbids; repeating it unchanged will not help."""

    reason = "FAILED_PRECONDITION"


class VocabularyMismatch(FailedPrecondition):
    """A draft worker and a verifier do not share the token -> id map; the message names the first id that differs."""

    reason = "VOCABULARY_MISMATCH"


class ResourceExhausted(OutriderError):
    """No room for now; try again after `retry_delay_s`."""

    reason = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_delay_s: float = 1.0) -> None:
        """Keep the message and the advised delay.

        Args:
            message: which resource is used up.
            retry_delay_s: seconds the caller should wait before it tries again, >= 0.
        """
        super().__init__(message)
        self.retry_delay_s = retry_delay_s

    def metadata(self) -> dict[str, str]:
        """Return the retry delay, in seconds."""
        return {"retry_delay_s": repr(self.retry_delay_s)}

    @classmethod
    def rebuild(cls, message: str, metadata: Mapping[str, str]) -> Self:
        """Make the error again, with the delay when it is a number."""
        try:
            return cls(message, float(metadata.get("retry_delay_s", "1.0")))
        except ValueError:
            return cls(message)


class LimitReached(ResourceExhausted):
    """The caller's API key has used up one of its limits for now."""

    reason = "LIMIT_REACHED"

    def __init__(self, message: str, retry_delay_s: float = 1.0, limit: str = "") -> None:
        """Keep which limit it is.

        Args:
            message: what the key may use.
            retry_delay_s: seconds until there may be room again, >= 0.
            limit: name of the limit, a field of `outrider.keys.KeyLimits`.
        """
        super().__init__(message, retry_delay_s)
        self.limit = limit

    def metadata(self) -> dict[str, str]:
        """Return retry delay and limit."""
        return {**super().metadata(), "limit": self.limit}

    @classmethod
    def rebuild(cls, message: str, metadata: Mapping[str, str]) -> Self:
        """Make the error again, with the name of the limit where there is one."""
        error = super().rebuild(message, metadata)
        error.limit = metadata.get("limit", "")
        return error


class Unavailable(OutriderError):
    """A service that is needed cannot be reached, or is stopping; another one, or a later try, may do."""

    reason = "UNAVAILABLE"


class HandedOver(Unavailable):
    """The orchestrator stops, or its client does not read: the generation goes on where it is resumed, at once."""

    reason = "HANDED_OVER"

    def __init__(self, message: str, session_id: str = "", next_position: int = 0) -> None:
        """Name what to resume.

        Args:
            message: why.
            session_id: the session.
            next_position: absolute position after the last token that was sent.
        """
        super().__init__(message)
        self.session_id, self.next_position = session_id, next_position

    def metadata(self) -> dict[str, str]:
        """Return session and position."""
        return {"session_id": self.session_id, "next_position": str(self.next_position)}

    @classmethod
    def rebuild(cls, message: str, metadata: Mapping[str, str]) -> Self:
        """Make the error again; a position that is no number is 0, and never right."""
        position = metadata.get("next_position", "")
        return cls(message, metadata.get("session_id", ""), int(position) if position.isdecimal() else 0)


class HandshakeFailed(Unavailable):
    """TLS cannot be agreed on with this address, whenever it is tried: files or settings have to be changed first."""

    reason = "HANDSHAKE_FAILED"


class DeadlineExceeded(OutriderError):
    """A call did not end before its deadline."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(OutriderError):
    """The other side of a stream called it off; cancellation of our own tasks stays `asyncio.CancelledError`."""

    reason = "CANCELLED"


class DataLoss(OutriderError):
    """Something that was shown can be neither found nor drawn again."""

    reason = "DATA_LOSS"


class ProtocolError(OutriderError):
    """A peer service sent what the protocol forbids: drop it and count it; it says nothing about our own state."""

    reason = "PROTOCOL_ERROR"


class StoreError(OutriderError):
    """The session store refused or failed."""

    reason = "STORE_ERROR"


class StoreUnavailable(StoreError):
    """The session store cannot be reached, or did not answer in time; the write may or may not have happened."""

    reason = "STORE_UNAVAILABLE"


class LeaseLost(StoreError):
    """A newer fencing number owns the session: this owner must stop writing at once."""

    reason = "LEASE_LOST"


class Internal(OutriderError):
    """A defect: an error nobody planned for, ours or a peer's."""

    reason = "INTERNAL"


STATUS_CODES: Mapping[type[OutriderError], Code] = {
    InvalidRequest: Code.INVALID_ARGUMENT,
    Unauthenticated: Code.UNAUTHENTICATED,
    PermissionDenied: Code.PERMISSION_DENIED,
    NotFound: Code.NOT_FOUND,
    FailedPrecondition: Code.FAILED_PRECONDITION,
    ResourceExhausted: Code.RESOURCE_EXHAUSTED,
    Unavailable: Code.UNAVAILABLE,
    DeadlineExceeded: Code.DEADLINE_EXCEEDED,
    Cancelled: Code.CANCELLED,
    DataLoss: Code.DATA_LOSS,
    ProtocolError: Code.INTERNAL,
    StoreError: Code.INTERNAL,
    StoreUnavailable: Code.UNAVAILABLE,
    LeaseLost: Code.ABORTED,
    Internal: Code.INTERNAL,
}
"""The table: a class that is not listed has its nearest listed ancestor's code."""

DEFAULT_CLASSES: Mapping[Code, type[OutriderError]] = {
    Code.CANCELLED: Cancelled,
    Code.INVALID_ARGUMENT: Internal,  # ours names the field; a bare one means that this side built a bad message
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.PERMISSION_DENIED: PermissionDenied,
    Code.NOT_FOUND: NotFound,
    Code.RESOURCE_EXHAUSTED: ResourceExhausted,
    Code.FAILED_PRECONDITION: FailedPrecondition,
    Code.ABORTED: Unavailable,
    Code.INTERNAL: Internal,
    Code.UNAVAILABLE: Unavailable,
    Code.DATA_LOSS: DataLoss,
    Code.UNAUTHENTICATED: Unauthenticated,
}
"""The same table read backwards for a status without `ErrorInfo`: what gRPC itself or a foreign server sends."""


def code_of(error: OutriderError) -> Code:
    """Return the status code of an error, by its nearest listed class."""
    for cls in type(error).__mro__:
        if cls in STATUS_CODES:
            return STATUS_CODES[cls]
    return Code.INTERNAL


def class_of(reason: str) -> type[OutriderError] | None:
    """Return the class with this wire name, or None if this version does not know it."""
    pending: list[type[OutriderError]] = list(OutriderError.__subclasses__())
    while pending:
        cls = pending.pop()
        if cls.reason == reason:
            return cls
        pending.extend(cls.__subclasses__())
    return None


class _Verbatim:
    """A value already turned into text on the other side; shown as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _shortened(value: object, limit: int = 200) -> str:
    """Return `repr(value)` cut to `limit` characters, so that an error about a long list stays readable."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
