"""Lays out one pass: its shape, and the numbers that fill it.

A pass is a shape (`PassShape`) and one list of integers: token ids, positions, where to write, which rows share an
attention call and which pool blocks they read. The list goes to the device in one copy and is read there through views,
so the same code serves a list that is new in every pass and a buffer that a recorded pass reads again and again.

Three ways of planning decode passes, of which a runner uses one:

* *runs*, for a CPU: `outrider.model.row_attention` takes every row as it is;
* *tight*, where it cannot: rows of similar length share a call, and calls are no larger than their rows need;
* *fixed*, for recorded passes: one call, whose size is one of few classes.

Prompt passes are one call each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from outrider.model.attention import Group, GroupShape, PassPlan, Workspace
from outrider.model.kv import BlockSlot, KvCache, pool_row
from outrider.model.row_attention import MAX_RUN, NO_TREE, Runs, RunShape
from outrider.model.runner import BLOCK_LEN

MAX_KEYS = 1024
"""Most keys of a tight call of several items: what they are copied to should stay in a core's cache."""
MAX_QUERIES = 4
"""Rows of a fixed call, padding included, as a multiple of its items' rows without it: more are cut into more items."""


class Layout(Enum):
    """How decode passes are planned; see the module's head."""

    RUNS = auto()
    TIGHT = auto()
    FIXED = auto()


@dataclass(frozen=True, slots=True)
class RowClasses:
    """Shapes that passes may have; rising numbers each."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Rows of a decode pass and of its head product."""
    tiles: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Rows of one session in one attention call of a decode pass."""
    items_mix: bool = True
    """Whether rows of several sessions may share an attention call."""
    spans_mix: bool = True
    """Whether a row may attend in a call with more keys than it needs."""
    exactness: str = "bitwise"
    classes_differ: bool = True


@dataclass(frozen=True, slots=True)
class PassShape:
    """Everything about a pass that is not in its numbers."""

    rows: int
    kept: int
    """Rows of the head product; 0 for a pass without one."""
    groups: tuple[GroupShape, ...]
    runs: RunShape | None = None
    """Of a pass that is laid out in runs and has no groups."""
    head: bool = True
    """Whether logits of the kept rows are wanted, not their hidden states alone."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a row of a tree has its keys behind the text that the tree hangs from; only runs can be laid out so."""

    base: int
    """Length of that text."""
    places: tuple[int, ...]
    """Places in the slot of the row's ancestors and, last, of the row itself: whose position would be that in a run."""


@dataclass(slots=True)
class Row:
    """One token on its way through a pass."""

    feed: int
    slot: BlockSlot
    position: int
    token_id: int
    wanted: bool
    branch: Branch | None = None
    """None in a run of consecutive positions."""

    @property
    def place(self) -> int:
        """Where in the slot its KV is written."""
        return self.branch.places[-1] if self.branch is not None else self.position

    @property
    def span(self) -> int:
        """Keys up to the end of the row's block."""
        return _span(self.position)


@dataclass(slots=True)
class PassInput:
    """The numbers of a pass, on the device."""

    token_ids: Tensor
    """[rows] int64"""
    positions: Tensor
    """[rows] int64"""
    kept: Tensor
    """[kept] int64, rows that the head is applied to."""
    plan: PassPlan
    head: bool = True
    """Whether it is, or only its input is wanted."""


@dataclass(slots=True)
class _Item:
    """Rows of one session that attend together: [first, first + len(positions)) of the pass."""

    first: int
    positions: list[int]
    slot: BlockSlot
    span: int


@dataclass(slots=True)
class _Numbers:
    """Integers of a pass under construction."""

    items: list[_Item] = field(default_factory=list)
    shapes: list[GroupShape] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    """Of all groups: rows, positions, blocks."""
    order: dict[int, int] = field(default_factory=dict)
    queries: int = 0


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans passes in the shapes of some classes."""

    classes: RowClasses
    spare_block: int
    """A pool block that nobody owns: padding is written there and reads from there."""
    layout: Layout = Layout.TIGHT

    def decode(self, rows: Sequence[Row]) -> tuple[PassShape, list[int]]:
        """Plan a decode pass.

        Args:
            rows: At most the largest class; those of a session side by side, each behind those that it sees.

        Returns:
            The shape, and the numbers that `read` takes apart.
        """
        size = class_for(len(rows), self.classes.rows)
        wanted = [index for index, row in enumerate(rows) if row.wanted]
        kept = class_for(len(wanted), self.classes.rows) if wanted else 0
        if self.layout is Layout.FIXED and kept:
            kept = size
        numbers = _Numbers()
        if self.layout is Layout.RUNS:
            return self._finish(rows, 0, PassShape(size, kept, (), self._add_runs(numbers, rows, size)), numbers)
        one_call = self.layout is Layout.FIXED and self.classes.items_mix and self.classes.spans_mix
        for shape, items in self._fixed_groups(rows) if one_call else self._tight_groups(rows, size):
            self._add_group(numbers, shape, items)
        return self._finish(rows, 0, PassShape(size, kept, tuple(numbers.shapes)), numbers)

    def prompt(self, rows: Sequence[Row], *, head: bool = True) -> tuple[PassShape, list[int]]:
        """Plan a prompt pass: 64 rows, row i for position i of the block, whichever of them are fed.

        Args:
            rows: Consecutive positions of one block of one session.
            head: Whether logits are wanted of the rows that are.

        Returns:
            As `decode`.
        """
        first = rows[0].position % BLOCK_LEN
        start = rows[0].position - first
        widen = self.layout is Layout.FIXED and self.classes.spans_mix
        span = span_class(rows[0].span) if widen else rows[0].span
        shape = GroupShape(1, BLOCK_LEN, span, direct=True)
        kept = BLOCK_LEN if any(row.wanted for row in rows) else 0
        numbers = _Numbers()
        item = _Item(0, list(range(start, start + BLOCK_LEN)), rows[0].slot, rows[0].span)
        self._add_group(numbers, shape, [item])
        return self._finish(rows, first, PassShape(BLOCK_LEN, kept, (shape,), head=head), numbers)

    def _finish(
        self, rows: Sequence[Row], first: int, shape: PassShape, numbers: _Numbers
    ) -> tuple[PassShape, list[int]]:
        """Put the numbers of rows before those of groups; rows outside of [first, first + len(rows)) are padding."""
        padding = shape.rows - first - len(rows)
        spare = self.spare_block * BLOCK_LEN
        write = [pool_row(row.slot, row.place) for row in rows]
        wanted = [index for index, row in enumerate(rows, first) if row.wanted]
        kept = (wanted + wanted[-1:] * (shape.kept - len(wanted))) if shape.kept else []
        head = [0] * first + [row.token_id for row in rows] + [0] * padding
        head += [0] * first + [row.position for row in rows] + [0] * padding
        head += [spare] * first + write + [spare] * padding
        head += [numbers.order.get(index, 0) for index in range(shape.rows)]
        return shape, head + kept + numbers.tail

    def _tight_groups(self, rows: Sequence[Row], size: int) -> Iterator[tuple[GroupShape, list[_Item]]]:
        """Group items of one tile class and of similar spans, in calls of a bounded size."""
        alike: dict[tuple[int, int], list[_Item]] = {}
        for item in self._items(rows, self.classes.tiles[-1]):
            tile = class_for(len(item.positions), self.classes.tiles)
            span = span_class(item.span) if self.classes.spans_mix else item.span
            alike.setdefault((tile, span), []).append(item)
        parts = [part for (tile, _), items in alike.items() for part in self._calls(tile, items)]
        for tile, part in parts:
            # Items that begin at multiples of the tile can only be short at the end of the pass, where padding is.
            direct = len(parts) == 1 and size == len(part) * tile
            direct = direct and all(item.first == at * tile for at, item in enumerate(part))
            yield GroupShape(len(part), tile, max(item.span for item in part), direct), part

    def _calls(self, tile: int, items: list[_Item]) -> Iterator[tuple[int, list[_Item]]]:
        """Cut items of one kind into calls."""
        most = max(1, MAX_KEYS // max(item.span for item in items)) if self.classes.items_mix else 1
        for start in range(0, len(items), most):
            yield tile, items[start : start + most]

    def _fixed_groups(self, rows: Sequence[Row]) -> Iterator[tuple[GroupShape, list[_Item]]]:
        """Put all rows into one call of classes of items, rows and keys."""
        items = list(self._items(rows, self.classes.tiles[-1]))
        tile = class_for(max(len(item.positions) for item in items), self.classes.tiles)
        smaller = [size for size in self.classes.tiles if size < tile]
        while smaller and len(items) * tile > MAX_QUERIES * max(len(rows), tile):
            tile = smaller.pop()
            items = list(self._items(rows, tile))
        span = span_class(max(item.span for item in items))
        yield GroupShape(_power_of_two(len(items)), tile, span), items

    def _items(self, rows: Sequence[Row], most: int) -> Iterator[_Item]:
        """Cut rows into runs of one session, of at most `most` rows, and of one span if spans do not mix."""
        start = 0
        while start < len(rows):
            head, end = rows[start], start + 1
            while end < len(rows) and end - start < most and self._share_a_call(head, rows[end]):
                end += 1
            positions = [row.position for row in rows[start:end]]
            yield _Item(start, positions, head.slot, _span(max(positions)))
            start = end

    def _add_runs(self, numbers: _Numbers, rows: Sequence[Row], size: int) -> RunShape:
        """Append the tables of runs: first rows, counts, bases, branches of all rows, blocks."""
        items = list(self._items(rows, MAX_RUN))
        heads = [rows[item.first].branch for item in items]
        width = max((len(row.branch.places) for row in rows if row.branch is not None), default=0)
        shape = RunShape(len(items), max(item.span for item in items) // BLOCK_LEN, width)
        numbers.tail += [item.first for item in items] + [len(item.positions) for item in items]
        numbers.tail += [head.base if head is not None else NO_TREE for head in heads]
        if width:
            numbers.tail += self._branches(rows, size, width)
        for item in items:
            blocks = item.slot.blocks[: item.span // BLOCK_LEN]
            numbers.tail += blocks + [self.spare_block] * (shape.blocks - len(blocks))
        return shape

    def _branches(self, rows: Sequence[Row], size: int, width: int) -> list[int]:
        """Return the pool rows of each row's branch, padded to one width, as are rows that have none."""
        spare, table = self.spare_block * BLOCK_LEN, list[int]()
        for row in rows:
            own = [pool_row(row.slot, place) for place in row.branch.places] if row.branch is not None else []
            table += own + [spare] * (width - len(own))
        return table + [spare] * (width * (size - len(rows)))

    def _share_a_call(self, row: Row, other: Row) -> bool:
        return row.slot is other.slot and (self.classes.spans_mix or row.span == other.span)

    def _add_group(self, numbers: _Numbers, shape: GroupShape, items: Sequence[_Item]) -> None:
        """Append a group's rows, positions and blocks; short items repeat their last row, missing ones the spare."""
        rows: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        num_blocks = shape.span // BLOCK_LEN
        for at, item in enumerate(items):
            count = len(item.positions)
            queries = numbers.queries + at * shape.tile
            numbers.order.update((item.first + index, queries + index) for index in range(count))
            rows += [item.first + min(index, count - 1) for index in range(shape.tile)]
            positions += item.positions + item.positions[-1:] * (shape.tile - count)
            # What pads the keys is the session's own: whatever a neighbour's keys hold cannot come in.
            own = item.slot.blocks[: item.span // BLOCK_LEN]
            blocks += own + own[-1:] * (num_blocks - len(own))
        missing = shape.items - len(items)
        numbers.tail += rows + [0] * (missing * shape.tile) + positions + [0] * (missing * shape.tile)
        numbers.tail += blocks + [self.spare_block] * (missing * num_blocks)
        numbers.queries += shape.items * shape.tile
        numbers.shapes.append(shape)


def read(shape: PassShape, numbers: Tensor, kv: KvCache, workspace: Workspace) -> PassInput:
    """Take a pass's numbers apart; copies nothing.

    Args:
        shape: Of the pass.
        numbers: [n] int64 on the device, as `Planner` laid them out.
        kv: The pool.
        workspace: For attention.
    """
    sizes = [shape.rows] * 4 + [shape.kept]
    for group in shape.groups:
        queries = group.items * group.tile
        sizes += [queries, queries, group.items * (group.span // BLOCK_LEN)]
    runs = shape.runs
    if runs is not None:
        sizes += [runs.runs, runs.runs, runs.runs, shape.rows * runs.branch, runs.runs * runs.blocks]
    token_ids, positions, write, order, kept, *tail = torch.split(numbers, sizes)
    if runs is not None:
        first, count, bases, branches, blocks = (part.numpy() for part in tail)
        table = Runs(
            first,
            count,
            blocks.reshape(runs.runs, runs.blocks),
            positions.numpy(),
            bases,
            branches.reshape(shape.rows, runs.branch),
        )
        return PassInput(token_ids, positions, kept, PassPlan(kv, write, [], order, workspace, table))
    own = zip(shape.groups, tail[0::3], tail[1::3], tail[2::3], strict=True)
    groups = [Group(group, rows, at, blocks) for group, rows, at, blocks in own]
    return PassInput(token_ids, positions, kept, PassPlan(kv, write, groups, order, workspace), shape.head)


def _span(position: int) -> int:
    return (position // BLOCK_LEN + 1) * BLOCK_LEN


def class_for(count: int, classes: tuple[int, ...]) -> int:
    """Return the smallest class with room for `count`."""
    return next(size for size in classes if size >= count)


def span_class(span: int) -> int:
    """Return the smallest of 64, 128, 192, 256, 384, 512, 768, 1024 … keys that is not less than `span`."""
    size = _power_of_two(span)
    return size * 3 // 4 if size * 3 // 4 >= max(span, 3 * BLOCK_LEN) else size


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
