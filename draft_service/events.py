"""What happens to a window, and what must be done: the vocabulary of `draft_service.window`."""

from dataclasses import dataclass

from outrider.messages import DraftCommit, ProposeMessage, RollbackHint, SparseRow

# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The worker has time for this session."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Answer to `Begin`: the drafter will offer `count` tokens; with 0, none before `until_len`."""

    ticket: int
    count: int
    until_len: int = 0
    parents: tuple[int, ...] = ()
    """Of a tree of `count` tokens, no deeper than was asked for: index of each token's parent, or -1. Empty: a run."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Answer to `Draw`: the next tokens of the proposal and, in modes that need them, the rows they were drawn from.

    Of a tree it has all tokens, and a row for each family.
    """

    ticket: int
    token_ids: tuple[int, ...]
    rows: tuple[SparseRow, ...] = ()


Event = DraftCommit | RollbackHint | Scheduled | Planned | Drawn

# --- commands -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Ask the drafter for up to `count` tokens from `base_len` on."""

    ticket: int
    base_len: int
    count: int


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw `count` more tokens at the end of `ids`, or a tree of them."""

    ticket: int
    count: int
    parents: tuple[int, ...] = ()
    """Of a tree, all of which is drawn at once; else empty."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on the `Propose` stream of the session's verifier."""

    message: ProposeMessage


@dataclass(frozen=True, slots=True)
class Rewind:
    """The ids past `length` are not what they were: the drafter keeps what it computed up to there."""

    length: int


@dataclass(frozen=True, slots=True)
class Followed:
    """How far a tree was followed: what the shapes of later ones may learn from."""

    families: tuple[tuple[int, int], ...]
    """From the root on: children of the node that was reached, and which of them was accepted; -1: none."""


@dataclass(frozen=True, slots=True)
class AskFrom:
    """A commit was missed: ask the orchestrator for the tokens from this position on."""

    position: int


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a counter.

    `discarded` (drawn, then forgotten), `late_commit`; of hints `taken_hint`, `late_hint` (its epoch is known),
    `odd_hint` (one before it is missing, or it does not fit the chain), `overruled_hint` (a commit contradicts it).
    """

    name: str
    amount: int = 1


Command = Begin | Draw | Send | Rewind | Followed | AskFrom | Count
