"""What a drafter is: the one small interface that every way of guessing is behind.

A drafter serves many sessions at once and is owned by one thread; every method may block. It guesses for whatever ids
it is given, and decides nothing about epochs, windows or timing: those belong to `draft_service.window`.

Invariants that every drafter keeps:

* `plan` looks at the ids of the prefix alone. Whether and how many tokens are offered never depends on a token that is
  offered, so the count can be announced before the first draw (non-anticipation).
* In modes that need rows, a token is drawn from exactly the row that is returned with it.
* A session's tokens depend on its own ids, parameters, key, epoch and features (`TakesFeatures`) only, never on the
  sessions beside it in a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from outrider.history import GrammarState
from outrider.ids import Epoch, Mode, SessionId
from outrider.messages import SamplingParams, SparseRow, TargetFeatures


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What is fixed about a drafter."""

    kind: str
    """Name of the kind: `causal_lm`, `prompt_lookup`, `feature`, `medusa`, `toy`."""
    model: str
    """Name of the model; empty where there is none."""
    vocab_len: int
    """Length of the tokenizer's id range: ids at or past it are never offered."""
    context_len: int
    """Most tokens of a session that it can draft for."""
    dtype: str = ""
    exactness: str = "bitwise"
    """"bitwise": a session's drafts have the same bits in every batch. "distribution": only nearly."""
    fingerprint: str = ""
    feature_layers: tuple[int, ...] = ()
    """Target layers whose hidden states it wants (see `TakesFeatures`); -1 is the last, after its final norm."""
    feature_size: int = 0
    """Width of those; 0: it wants none."""
    drafters: tuple[str, ...] = ()
    """Kinds that it is composed of, in the order in which they are asked; empty: it is one of its own."""


@dataclass(frozen=True, slots=True)
class DraftSession:
    """What a drafter may know of a session; fixed while it is open."""

    session_id: SessionId
    mode: Mode
    sampling: SamplingParams
    draft_key: bytes
    """16 bytes: the draft stream's key in modes that need rows, the noise field's key in coupled mode. Else empty."""
    prompt_len: int
    sample_index: int = 0
    prediction: tuple[int, ...] = ()
    """What the client expects behind the prompt."""
    drafter: str = ""
    """Kind that alone may draft, of several; empty: all."""
    grammar: GrammarState | None = None
    """Where the request's grammar begins, to be copied and never moved on; None: it has none, or it is not known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a drafter will offer at one place."""

    count: int
    """Tokens, at most as many as asked for, or those of a tree."""
    until_len: int = 0
    """With a count of 0: position before which nothing will come."""
    reason: str = ""
    """With a count of 0: why, as a label of metrics; one of a few constants."""
    drafter: str = ""
    """Kind that will draw, of several; empty: there is one only."""
    parents: tuple[int, ...] = ()
    """Of a tree of `count` tokens, level by level and no deeper than was asked for: index of each token's parent, or -1
    for the text; siblings side by side, in the order in which they are drawn. Empty: a run."""


@dataclass(frozen=True, slots=True)
class Work:
    """One session's share of a token step."""

    session_id: SessionId
    epoch: Epoch
    ids: Sequence[int]
    """Committed ids, then the chain; only valid during the call. Tokens are drawn at its end."""
    count: int
    """Tokens still to be drawn of a proposal, >= 1; 0: only catch up with `ids`."""
    parents: tuple[int, ...] = ()
    """Of a tree, as planned; else empty."""


@dataclass(frozen=True, slots=True)
class Guessed:
    """What a session got out of a token step."""

    token_ids: tuple[int, ...] = ()
    """1 .. count tokens; none as long as the drafter is catching up. Of a tree all, when the last of them is drawn."""
    rows: tuple[SparseRow, ...] = ()
    """One per token in modes that need rows; of a tree one per family, by their first children."""
    caught_up: bool = True
    """Whether `plan` would answer for these ids now."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A session whose share of a token step could not be done; the others' was."""

    error: Exception


Outcome: TypeAlias = Guessed | Failed


class Drafter(Protocol):
    """Guesses for many sessions; see the module's head. None of the methods is idempotent unless it says so."""

    info: DrafterInfo

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Begin a session, with what is still known of it: its longest common prefix with `ids`, by ids.

        Args:
            session: not open at present.
            ids: its committed tokens, at least one.
        """
        ...

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        """Say how many tokens will be drawn at the end of `ids`; changes nothing that can be seen, draws nothing.

        Args:
            session_id: an open session.
            ids: committed ids, then the chain.
            count: most tokens wanted, >= 1.

        Returns:
            The plan, or None while the drafter has to catch up first (`draw` with a count of 0).
        """
        ...

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Do one token step for sessions that are all different; long catching up is spread over several calls.

        Returns:
            One outcome per entry, in order.

        Raises:
            Exception: none of the batch could be done.
        """
        ...

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Forget whatever was computed for positions at and past `length`; idempotent."""
        ...

    def close(self, session_id: SessionId, keep: bool) -> None:
        """End a session; `keep` what was computed for its next opening if there is room. Idempotent."""
        ...


@runtime_checkable
class TakesFeatures(Protocol):
    """A drafter that guesses from the target's hidden states; its `info.feature_layers` is not empty.

    They come when they come, or never: which ones it has makes a guess better or worse, and is no reason to wait.
    """

    def take_features(self, features: TargetFeatures) -> None:
        """Take hidden states of committed positions of an open session, those of the opening at hand.

        Raises:
            Exception: they cannot be used, and have changed nothing.
        """
        ...


@runtime_checkable
class GrowsTrees(Protocol):
    """A drafter whose proposals may be trees."""

    def learn(self, session_id: SessionId, families: Sequence[tuple[int, int]]) -> None:
        """Hear how far a tree was followed; must not fail.

        Args:
            session_id: may be closed by now.
            families: from the root on, children of each node reached and the accepted one's rank, or -1.
        """
        ...
