"""What the model thread is told, and what it tells: the vocabulary of `draft_service.worker`."""

from dataclasses import dataclass
from typing import TypeAlias

from draft_service.session import SessionKey
from outrider.errors import OutriderError
from outrider.history import GrammarState
from outrider.messages import DraftCommit, DraftOpen, DraftStatus, ProposeMessage, RollbackHint, TargetFeatures

# --- orders -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Begin a session, in place of an opening of a lower generation if there is one."""

    opened: DraftOpen
    grammar: GrammarState | None = None
    """Where the request's grammar begins; the session's own."""

    @property
    def key(self) -> SessionKey:
        """Name of the opening."""
        return SessionKey(self.opened.session_id, self.opened.epoch.generation)


@dataclass(frozen=True, slots=True)
class TakeCommit:
    """Tell a session what was committed."""

    key: SessionKey
    commit: DraftCommit


@dataclass(frozen=True, slots=True)
class TakeHint:
    """Tell a session what its verifier says will be committed."""

    key: SessionKey
    hint: RollbackHint


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End a session; answered by a last `Reported` and `Closed`."""

    key: SessionKey
    keep_kv: bool


@dataclass(frozen=True, slots=True)
class GiveFeatures:
    """Hand a target's hidden states to a drafter that takes them, if their session's own verifier sent them."""

    verifier_address: str
    features: TargetFeatures


Order: TypeAlias = OpenSession | TakeCommit | TakeHint | CloseSession | GiveFeatures

# --- reports ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for the verifier at an address."""

    verifier_address: str
    message: ProposeMessage


@dataclass(frozen=True, slots=True)
class Reported:
    """A status for a session's orchestrator."""

    key: SessionKey
    status: DraftStatus


@dataclass(frozen=True, slots=True)
class Closed:
    """A session was closed as ordered."""

    key: SessionKey


@dataclass(frozen=True, slots=True)
class Died:
    """A session ended by an error; it is closed here already."""

    key: SessionKey
    error: OutriderError
    status: DraftStatus


Report: TypeAlias = Outgoing | Reported | Closed | Died
