"""What the asyncio side tells the engine's thread: frozen values put into its inbox, in order.

A *ticket* names one stream. What a stream says or leaves behind is matched by its ticket, never by its session or
worker alone, so that the end of an old stream cannot touch what a newer one opened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

from outrider.errors import OutriderError
from outrider.history import GrammarState
from outrider.ids import SessionId
from outrider.messages import (
    DecodeAttach,
    DecodeOpen,
    DecodeProgress,
    DecodeResponseMessage,
    ProposeHello,
    ProposeMessage,
    ProposeResponseMessage,
)

Ticket = NewType("Ticket", int)
"""Number of a stream, rising; unique within a process."""

DecodeSend = Callable[[DecodeResponseMessage | OutriderError | None], None]
"""Hands a message to a `Decode` stream; an error ends it with that status, None ends it in good order. Never blocks."""
ProposeSend = Callable[[ProposeResponseMessage | OutriderError | None], None]
"""The same for a `Propose` stream."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A `Decode` stream opens; its message is well formed and fits the model."""

    ticket: Ticket
    opened: DecodeOpen
    send: DecodeSend
    grammar: GrammarState | None = None
    """Where its output stands in its grammar, if it has one; the session's own."""


@dataclass(frozen=True, slots=True)
class TellSession:
    """A later message of a `Decode` stream."""

    ticket: Ticket
    message: DecodeAttach | DecodeProgress


@dataclass(frozen=True, slots=True)
class CloseSession:
    """A `Decode` stream ended: closed by its client, or broken off."""

    ticket: Ticket
    keep_kv: bool


@dataclass(frozen=True, slots=True)
class JoinWorker:
    """A `Propose` stream opens; its vocabulary fits."""

    ticket: Ticket
    hello: ProposeHello
    send: ProposeSend


@dataclass(frozen=True, slots=True)
class LeaveWorker:
    """A `Propose` stream ended."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Proposed:
    """A message of a draft worker."""

    ticket: Ticket
    message: ProposeMessage


@dataclass(frozen=True, slots=True)
class Malformed:
    """A draft worker's message that could not be read, but for the session it names."""

    ticket: Ticket
    session_id: SessionId


@dataclass(frozen=True, slots=True)
class BlocksArrived:
    """Stored KV has been loaded for a session, or no more of it comes."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class BlocksMissing:
    """Blocks of KV that were to be kept are not stored."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """The process is stopping: tell every stream."""

    reason: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """The process is stopping and no session is left: end the draft workers' streams in good order."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; whoever is left gets `Unavailable`."""


InboxEvent = (
    OpenSession
    | TellSession
    | CloseSession
    | JoinWorker
    | LeaveWorker
    | Proposed
    | Malformed
    | BlocksArrived
    | BlocksMissing
    | Drain
    | Dismiss
    | Stop
)
