"""What happens to a chain, and what must be done: the vocabulary of `verify_service.chain`."""

from dataclasses import dataclass, field
from enum import StrEnum

from outrider.ids import Epoch, TokenKind, WorkerId
from outrider.messages import DecodeAttach, DecodeProgress, ProposeMessage, SparseRow
from outrider.verification.tree import Tree

# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message of a draft worker's `Propose` stream."""

    worker_id: WorkerId
    message: ProposeMessage


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """A draft worker's `Propose` stream ended or was opened again: what it carried may be lost."""

    worker_id: WorkerId


class TimerKind(StrEnum):
    """What a timer guards."""

    PATIENCE = "patience"
    BODY = "body"


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """The timer of that number ran out; any but the running one is late and changes nothing."""

    number: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The engine asks for work; at most `max_rows` rows may be fed to the model (0: only held rows)."""

    max_rows: int
    ahead: bool = False
    """Whether the last token may be fed although its drafter is awaited, so that there is a row when it answers."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Answer to a `Test`: so many tokens accepted, and the token drawn by the verifier, if one was."""

    num_accepted: int
    num_tested: int
    drawn: int | None
    path: tuple[int, ...] = ()
    """Of a tree: the nodes that were accepted, from below its root."""


Event = DecodeAttach | DecodeProgress | Arrived | StreamBroken | TimerExpired | Scheduled | Judged

# --- commands -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Test:
    """Feed `feed` to the model, then test `token_ids` in order, or, with none, draw one token.

    The rows to test on are the held row first, if `from_held`, then the rows of the fed tokens. Without `feed` the
    model is not needed at all. A tree is always fed, and tested along one path; behind it a token is drawn.
    """

    __test__ = False

    epoch: Epoch
    base_len: int
    """Position of the first tested or drawn token: the committed length."""
    feed: tuple[int, ...]
    from_held: bool
    token_ids: tuple[int, ...]
    rows: tuple[SparseRow, ...]
    draw: TokenKind | None
    """Kind of the token to draw when nothing is tested."""
    parents: tuple[int, ...] = ()
    """Of a tree: index of each token's parent, or -1."""
    drawn_as: tuple[int, ...] = field(default=(), compare=False)
    """Of a tree that was cut: `Tree.drawn_as`."""

    @property
    def num_rows(self) -> int:
        """Rows the model computes for it."""
        return len(self.feed)

    @property
    def is_ahead(self) -> bool:
        """Whether it tests and draws nothing: its row is held for what the drafter is about to send."""
        return self.draw is None and not self.token_ids

    @property
    def tree(self) -> Tree | None:
        """The tree that is tested."""
        return Tree(self.token_ids, self.parents, self.rows, self.drawn_as) if self.parents else None

    @property
    def num_fed_before(self) -> int:
        """Tokens that are fed before the tested ones."""
        return len(self.feed) - len(self.token_ids)

    @property
    def feed_parents(self) -> tuple[int, ...]:
        """Parents of all that is fed; none where it is a run, be it that of a tree with one branch."""
        tree = self.tree
        if tree is None or tree.is_chain:
            return ()
        before = self.num_fed_before
        return (*range(-1, before - 1), *(parent + before for parent in self.parents))

    def accepted(self, judged: Judged) -> tuple[int, ...]:
        """Return the tokens that are committed as they were proposed."""
        if self.parents:
            return tuple(self.token_ids[node] for node in judged.path)
        return self.token_ids[: judged.num_accepted]

    def kept(self, judged: Judged, kv_len: int) -> "Keep | Rewind | None":
        """Return what becomes of the KV that was fed for it, once a token was drawn; None where nothing was fed.

        Args:
            judged: the answer.
            kv_len: length of the session's KV from now on.
        """
        if not self.feed_parents:
            return Rewind(kv_len) if self.feed else None
        before = self.num_fed_before
        return Keep((*range(before), *(before + node for node in judged.path)))

    def num_untested(self, judged: Judged) -> int:
        """Return how many tokens were thrown away without a test."""
        if not self.parents:
            return len(self.token_ids) - judged.num_tested
        seen = (-1, *judged.path)
        return sum(parent not in seen for parent in self.parents)


@dataclass(frozen=True, slots=True)
class Rewind:
    """KV past `length` is not the session's any more."""

    length: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Of the tree that was fed, these tokens are the session's, each the parent of the next; no others are."""

    path: tuple[int, ...]
    """Indexes into the feed."""


@dataclass(frozen=True, slots=True)
class Report:
    """Send a verdict; the engine adds timings and log-probabilities."""

    epoch: Epoch
    start: int
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    num_accepted: int
    num_tested: int
    next_epoch: Epoch
    cause: str


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Start a timer under a new number; it replaces the running one."""

    kind: TimerKind
    number: int


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a counter.

    One of `stale`, `garbage`, `duplicate`, `parked_overflow`, `gap`, `wasted`, `guarantee_void`, `broken_after_header`.
    """

    name: str
    amount: int = 1


Command = Test | Rewind | Keep | Report | StartTimer | Count
