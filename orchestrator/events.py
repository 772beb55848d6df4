"""What happens to a generation, and what must be done: the vocabulary of `orchestrator.rounds`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import OutriderError
from outrider.generation import Chunk
from outrider.ids import Epoch, FinishReason, Generation, TokenClass, TokenKind, WorkerId
from outrider.messages import DecodeAttach, DecodeProgress, DraftCommit, Speculation, TokenLogprobs, Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the committer made of a run: the first `len(chunk.token_ids)` tokens count, the rest never happened."""

    chunk: Chunk
    finish: FinishReason | None = None
    matched: str = ""
    """The stop string, or the stop id as a number, that ended it."""


class Committer(Protocol):
    """The one place where end of sequence, stops, length and text meet. Pure; called once per run, in order."""

    def take(
        self, start: int, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs]
    ) -> Outcome:
        """Take tokens up to the one that ends the generation."""
        ...


# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """Placement is known and the prompt is in the log."""

    verifier_id: WorkerId
    drafter_id: WorkerId | None
    off_reason: str = ""
    """Why there is no drafter."""


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """A verdict of the `Decode` stream opened in generation `opened`."""

    opened: Generation
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Tuned:
    """The policy's latest choice."""

    speculation: Speculation
    patience_s: float
    reason: str = "below_plain"
    """Why nothing is drafted, where the choice is that: see `orchestrator.tuning`."""

    @property
    def off_reason(self) -> str:
        """Why nothing is drafted; empty where something is."""
        return "" if self.speculation.enabled else self.reason


@dataclass(frozen=True, slots=True)
class Logged:
    """The log is so long now."""

    length: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The client has taken everything before this position."""

    length: int


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """The drafter of that generation is gone, or refused the session."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class DrafterChosen:
    """Answer to `ChooseDrafter`; None: there is none to be had."""

    worker_id: WorkerId | None


@dataclass(frozen=True, slots=True)
class DrafterAsked:
    """The drafter of that generation missed a commit and asks for the tokens from `position` on."""

    generation: Generation
    position: int


@dataclass(frozen=True, slots=True)
class VerifierLost:
    """The `Decode` stream opened in that generation ended without being closed."""

    opened: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class VerifierChosen:
    """Answer to `ChooseVerifier`; None: there is none to be had."""

    worker_id: WorkerId | None


@dataclass(frozen=True, slots=True)
class Complete:
    """Everything is told: no token was to be generated."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client is gone."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Something the generation cannot survive: the log refused an append, a deadline passed."""

    error: OutriderError


Event = (
    Started
    | VerdictArrived
    | Tuned
    | Logged
    | Taken
    | DrafterLost
    | DrafterChosen
    | DrafterAsked
    | VerifierLost
    | VerifierChosen
    | Complete
    | Cancelled
    | Failed
)

# --- commands -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenVerifier:
    """Open `Decode` on a verifier with all committed tokens, and with the drafter that is opened beside it."""

    worker_id: WorkerId
    generation: Generation
    drafter_id: WorkerId | None
    token_ids: tuple[int, ...]
    classes: tuple[TokenClass, ...]
    commit_limit: int
    speculation: Speculation
    patience_s: float


@dataclass(frozen=True, slots=True)
class TellVerifier:
    """Send on `Decode`."""

    message: DecodeAttach | DecodeProgress


@dataclass(frozen=True, slots=True)
class CloseVerifier:
    """Close `Decode`."""


@dataclass(frozen=True, slots=True)
class OpenDrafter:
    """Open `Draft` on a draft worker with all committed tokens; its verifier is the one opened last."""

    worker_id: WorkerId
    epoch: Epoch
    token_ids: tuple[int, ...]
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class TellDrafter:
    """Send on `Draft`."""

    commit: DraftCommit


@dataclass(frozen=True, slots=True)
class CloseDrafter:
    """Close `Draft`."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class ChooseDrafter:
    """Ask placement for a draft worker other than these."""

    exclude: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class ChooseVerifier:
    """Ask placement for a verifier other than these, if there is one."""

    exclude: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class AppendLog:
    """Append to the session log; answered by `Logged`, or `Failed`."""

    start: int
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Kept beside the log, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Show to the client."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Finish:
    """The generation is over."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The generation cannot go on; the session is resumable if the error says so."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a counter: `late_verdict`, `drafter_lost`, `drafter_moved`, `verifier_lost`, `late_event`."""

    name: str


Command = (
    OpenVerifier
    | TellVerifier
    | CloseVerifier
    | OpenDrafter
    | TellDrafter
    | CloseDrafter
    | ChooseDrafter
    | ChooseVerifier
    | AppendLog
    | Emit
    | Finish
    | Fail
    | Count
)
