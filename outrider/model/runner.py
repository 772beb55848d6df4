"""What a service may ask of a model, and the values that go in and out.

A runner turns *feeds* (new tokens of a session, placed right after what its KV already holds) into *rows* (logits of
the positions asked for). It decides how rows are grouped into passes; it may not let the grouping show: a row depends
only on the session's tokens and the class of each of them. A runner is owned by one thread; nothing here is safe to
call from two.

Invariants:
    - After `forward` a slot's length has grown by the tokens fed, or, when it raised, nothing has changed.
    - A feed that is a tree leaves the length as it was: `KvSlot.keep` takes over the tokens of one path.
    - `KvSlot.truncate` moves no data; the next feed overwrites what lies behind the length.
    - A pool block is free, used by slots, or cached: known by its content and used by none.
    - A block that several slots use, or that is known by its content, is never written to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from outrider.ids import TokenClass
from outrider.verification.tree import Tree, tree_problem

BLOCK_LEN = 64
"""Tokens per KV block, and rows of a prompt pass."""


class PoolExhausted(RuntimeError):
    """The feeds of one `forward` need more KV blocks than are free; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"the pass needs {needed} KV blocks, {free} are free")
        self.needed = needed
        self.free = free


class RunnerBroken(RuntimeError):
    """No pass can succeed any more: only a new process helps."""


class InvalidFeed(ValueError):
    """A feed that the runner cannot run: ids, class, block border, context or slot; nothing was changed."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is fixed about a runner."""

    name: str
    vocab_size: int
    """Width of a row of logits; may be larger than the tokenizer's vocabulary (padding)."""
    context_len: int
    """Most tokens of one slot."""
    dtype: str
    """"bfloat16", "float32" or "float64"."""
    hidden_size: int
    row_classes: tuple[int, ...]
    """Row counts of a decode pass, rising: passes are padded up to one of them, and rows do not depend on which."""
    max_rows: int
    """Rows of the largest decode pass; more are split. The last of `row_classes`."""
    exactness: str
    """"bitwise": a row has the same bits in every grouping. "distribution": only nearly."""
    fingerprint: str
    """Names what the bits of a row depend on beside weights: instruction set or GPU, torch, dtype, row classes."""
    kv_bytes_per_token: int
    num_blocks: int
    """Size of the KV pool, in blocks."""
    block_len: int = BLOCK_LEN
    classes_differ: bool = True
    """Whether a token's KV may have other bits when it is computed as PROMPT than as DECODE."""
    trees: bool = False
    """Whether feeds may be trees, with rows of the same bits as those of each path fed as a run."""

    @property
    def kv_block_bytes(self) -> int:
        """Memory of one KV block."""
        return self.kv_bytes_per_token * self.block_len


@dataclass(frozen=True, slots=True)
class KvUsage:
    """How a pool of KV is used at one moment, in blocks."""

    num_blocks: int
    """Of the whole pool."""
    used: int
    """Used by one slot or more; each counted once."""
    shared: int
    """Used by two slots or more."""
    cached: int
    """Used by none, and kept because they are known by their content; any of them can be taken."""
    references: int
    """Blocks of all slots, counted once for every slot."""
    holders: int
    """Slots that have blocks."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What the bytes of one block of a pool are: the values of its tokens, layer by layer."""

    dtype: str
    num_layers: int
    values_per_token: int
    """Of all layers together."""
    num_bytes: int
    """Of one block."""


class BlockAccess(Protocol):
    """Blocks of a runner's pool as bytes, by the key of their content. Owned by the runner's thread."""

    @property
    def layout(self) -> BlockLayout:
        """What one block's bytes are."""
        ...

    def keys(self, token_ids: Sequence[int], classes: Sequence[TokenClass]) -> list[bytes]:
        """Return the keys of all full blocks of a text, by which slots know them.

        Args:
            token_ids: From position 0 on.
            classes: Of each of them.
        """
        ...

    def read(self, key: bytes, into: memoryview) -> bool:
        """Copy a block out if it is still known; say whether it was.

        Args:
            key: Of its content.
            into: Writable, of `layout.num_bytes`.
        """
        ...

    def adopt(self, key: bytes, parent: bytes | None, data: memoryview) -> bool:
        """Take a block in as a cached one, unless it is known; False if there is no room.

        Args:
            key: Of its content.
            parent: Key of the block before it; the two are put side by side where there is room.
            data: What `read` gave for the same key, on a runner of the same engine and weights; a writable buffer.
        """
        ...

    def watch(self, on_known: Callable[[bytes], None]) -> None:
        """Have `on_known` told the key of every block that becomes known by being computed; one watcher at a time."""
        ...


class KvSlot(Protocol):
    """One session's KV on one runner. Made by `ModelRunner.new_slot`, of use to that runner only."""

    @property
    def length(self) -> int:
        """Tokens whose KV is valid."""
        ...

    def truncate(self, length: int) -> None:
        """Forget everything at or behind `length`; moves no data, idempotent.

        Raises:
            ValueError: `length` is negative or larger than the present length.
        """
        ...

    def keep(self, path: Sequence[int]) -> None:
        """Take over the tokens of one path of the tree that was fed last, and forget the others; once for each tree.

        Their KV is moved to where a run would have put it, with the same bits. What is fed or cut off without it takes
        over none.

        Args:
            path: Numbers of the tree's tokens, each the parent of the next, the first below the text; may be empty.

        Raises:
            ValueError: The last feed was no tree, or the path is none of it.
        """
        ...

    def match(self, token_ids: Sequence[int], classes: Sequence[TokenClass]) -> int:
        """Take over KV that is known for the tokens behind the length: whole blocks, as many as are there.

        Commits the tokens before. Does nothing unless the length is at a block border.

        Args:
            token_ids: What follows at the length; what is computed in any case is left out.
            classes: Of each of them.

        Returns:
            By how many tokens the length has grown.
        """
        ...

    def commit(self, length: int) -> None:
        """Let others use the full blocks of the first `length` tokens, now and after this slot is freed; idempotent.

        A later `truncate` below `length` is allowed, but costs a copy of a block where another slot uses it.
        """
        ...

    def growth(self, num_tokens: int) -> int:
        """Return how many of the runner's free blocks a feed of so many tokens takes."""
        ...


@dataclass(frozen=True, slots=True)
class Feed:
    """New tokens of one session at positions [slot.length, slot.length + len(token_ids)), or a tree of them."""

    slot: KvSlot
    token_ids: tuple[int, ...]
    """At least one. With class PROMPT all positions lie inside one block (`prefill_plan`)."""
    token_class: TokenClass
    num_rows: int
    """How many of the last positions need logits: 0 for prefill, `len(token_ids)` for a run to be tested."""
    want_hidden: bool = False
    """Whether `Rows.hidden` is wanted too."""
    best_below: int = 0
    """If positive, only `Rows.best` is wanted, the likeliest of the ids below this, and `Rows.logits` may be empty."""
    hidden_only: bool = False
    """With class PROMPT and `want_hidden`: only `Rows.hidden` is wanted, and `Rows.logits` may have no columns."""
    parents: tuple[int, ...] = ()
    """Of a tree, where `ModelInfo.trees` allows it: number of each token's parent, which comes before it, or -1 for the
    slot's last token. A token sees the slot's text and its own ancestors, and its position is the length plus their
    number. Empty: each token follows the one before it."""


@dataclass(slots=True)
class Rows:
    """Output of one feed; row i belongs to the i-th of the last `num_rows` positions."""

    logits: Tensor
    """[num_rows, vocab_size], float32 (the toy model: float64), on the CPU or the model's device."""
    hidden: Tensor | None = None
    """[num_rows, hidden_size], the last hidden state before the head, in the model's dtype; None unless asked for."""
    best: Tensor | None = None
    """[num_rows] int64, as `outrider.sampling.greedy_ids` returns; None unless asked for."""


class ModelRunner(Protocol):
    """A model with a pool of KV. All methods block; one thread owns the runner."""

    @property
    def info(self) -> ModelInfo:
        """What is fixed about this runner."""
        ...

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be taken: those used by no slot, cached ones included."""
        ...

    @property
    def kv_usage(self) -> KvUsage:
        """How the pool is used; may be read from another thread, where it is a moment old."""
        ...

    @property
    def block_access(self) -> BlockAccess:
        """The pool's blocks as bytes."""
        ...

    def new_slot(self, *, by_class: bool = True) -> KvSlot:
        """Return an empty slot; it takes blocks only when it is fed or matched.

        Args:
            by_class: Whether it takes over a token's KV only where the token had the same class. False is for those
                who do not mind a difference in the last bits.
        """
        ...

    def free_slot(self, slot: KvSlot, *, forget: bool = False) -> None:
        """Give all blocks of a slot back and make it unusable; idempotent.

        Args:
            slot: Of this runner.
            forget: Whether what only this slot used is not to be found by its content any more.
        """
        ...

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        """Run feeds of different slots and advance each slot by its tokens, those of trees excepted.

        DECODE feeds share passes of the row classes; each PROMPT feed is a pass of its own fixed shape.

        Args:
            feeds: In any order, each slot at most once; may be empty.

        Returns:
            One `Rows` per feed, in the order of the feeds.

        Raises:
            InvalidFeed: An id outside the vocabulary, no tokens, a PROMPT feed across a block border, a context
                overflow, a slot that is freed, foreign or named twice, a tree that is none or cannot be run.
            PoolExhausted: Not enough free blocks for all feeds together.
        """
        ...


def prefill_plan(start: int, end: int) -> list[tuple[int, int]]:
    """Cut positions [start, end) at block borders, as PROMPT feeds need it.

    Args:
        start: First position, >= 0.
        end: Position after the last one; an `end` not above `start` gives no chunks.

    Returns:
        Ranges (first, after last), in order, each inside one block.
    """
    cuts = [start, *range((start // BLOCK_LEN + 1) * BLOCK_LEN, end, BLOCK_LEN), end]
    return [(first, last) for first, last in pairwise(cuts) if first < last]


def check_feeds(feeds: Sequence[Feed], info: ModelInfo) -> None:
    """Check what every runner demands of feeds, slots' ownership excepted.

    Raises:
        InvalidFeed: Naming the feed's number, the offending value and the allowed range.
    """
    if len({id(feed.slot) for feed in feeds}) != len(feeds):
        raise InvalidFeed("a slot is named by two feeds of one call")
    for number, feed in enumerate(feeds):
        _check_feed(number, feed, info)


def _check_feed(number: int, feed: Feed, info: ModelInfo) -> None:
    """Check one feed; see `check_feeds`."""
    count, start = len(feed.token_ids), feed.slot.length
    if not count:
        raise InvalidFeed(f"feed {number} has no tokens")
    if not 0 <= feed.num_rows <= count:
        raise InvalidFeed(f"feed {number}: num_rows {feed.num_rows} is outside [0, {count}]")
    if min(feed.token_ids) < 0 or max(feed.token_ids) >= info.vocab_size:
        bad = next(token for token in feed.token_ids if not 0 <= token < info.vocab_size)
        raise InvalidFeed(f"feed {number}: token id {bad} is outside [0, {info.vocab_size})")
    if feed.parents:
        _check_tree(number, feed, info)
    depth = Tree(feed.token_ids, feed.parents).depth if feed.parents else count
    if start + depth > info.context_len:
        raise InvalidFeed(f"feed {number}: {start} + {depth} tokens exceed the context of {info.context_len}")
    if feed.token_class is TokenClass.PROMPT and start // info.block_len != (start + count - 1) // info.block_len:
        raise InvalidFeed(f"feed {number}: prompt positions [{start}, {start + count}) cross a block border")


def _check_tree(number: int, feed: Feed, info: ModelInfo) -> None:
    """Check a feed with parents; see `check_feeds`."""
    if not info.trees:
        raise InvalidFeed(f"feed {number}: {info.name} cannot run trees here")
    if len(feed.parents) != len(feed.token_ids) or feed.token_class is not TokenClass.DECODE:
        raise InvalidFeed(f"feed {number}: a tree needs a parent for each token, and the class DECODE")
    problem = tree_problem(feed.parents)
    if problem:
        raise InvalidFeed(f"feed {number}: {problem}")
