"""Attention of decode rows on a CPU, compiled: one row after the other, straight from the block pool.

A decode pass has few rows of many sessions, each with keys of its own. Library kernels want those keys side by side, in
float32 and under a mask; making them so takes longer than the attention itself. Here every row reads the blocks of its
session where they lie: no copy, no mask, no padding (measured: 30 layers of the default model, eight sessions of 200
tokens, 3.3 ms instead of 12.6).

Rows of a *tree* have the session's keys up to where the tree hangs, and behind that those of their own branch, which
lie anywhere in the pool. They are read in the order of their positions, as if the branch were a run.

Invariant: what a row comes to is a function of its query, its position and the keys it sees alone. The order of every
sum is fixed by the row's position; nothing depends on the other rows of a run, on neighbours, on where keys lie, or on
which thread works.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.model.runner import BLOCK_LEN

MAX_RUN = 8
"""Rows of one session that share a reading of its keys; more are cut, so that their scores stay in the cache."""
_WORTH_SHARING = 4096
"""Rows times keys of a layer from which on waking other threads pays."""
_SHIFTS = {torch.bfloat16: 16, torch.float32: 0}
"""Bits by which a number of the pool is shifted to become a float32."""
_WORDS = {torch.bfloat16: torch.uint16, torch.float32: torch.uint32}

_NO_WINDOW = 1 << 62
NO_TREE = 1 << 62
"""In place of the position where a run's rows part ways."""
_FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be vectorised; infinities and NaNs stay what they are."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows of this kind can be computed here."""
    return device.type == "cpu" and dtype in _SHIFTS


@dataclass(frozen=True, slots=True)
class RunShape:
    """Size of the tables of a pass."""

    runs: int
    blocks: int
    """Width of the table of blocks."""
    branch: int = 0
    """Width of the table of branches; 0 where the pass has no trees."""


@dataclass(slots=True)
class Runs:
    """The rows of one pass: runs of at most `MAX_RUN` rows of one session."""

    first: Integers
    """[runs], index in the pass of each run's first row."""
    count: Integers
    """[runs], its rows."""
    blocks: Integers
    """[runs, width], pool blocks of its session, from position 0 on."""
    positions: Integers
    """[rows], those of the pass."""
    bases: Integers
    """[runs], position from which on each of its rows has keys of its own, or `NO_TREE`."""
    branches: Integers
    """[rows, width], pool rows of the keys from there on; of no meaning where there is no tree."""
    scratch: dict[int, "Scratch"] = field(default_factory=dict)

    def attend(self, query: Tensor, pool: Tensor, scale: float, window: int) -> Tensor:
        """Attend with all rows of the pass.

        Args:
            query: [rows, kv_heads, group, head_dim].
            pool: [pool rows, 2 * kv_heads, head_dim] of the layer, bfloat16 or float32, contiguous.
            scale: Of the scores.
            window: Keys a row sees, itself included; 0 is all.

        Returns:
            [rows, kv_heads * group * head_dim] in the query's dtype; rows of padding are zero.
        """
        queries = query.to(torch.float32).contiguous().numpy()
        words = pool.view(_WORDS[pool.dtype]).numpy()
        out = np.zeros(queries.shape, np.float32)
        shift = np.uint32(_SHIFTS[pool.dtype])
        width = window or _NO_WINDOW

        def work(part: int, heads: range) -> None:
            own = self._scratch(part, queries.shape[2], queries.shape[3])
            _attend(
                queries, words, shift, self.first, self.count, self.blocks, self.positions, self.bases, self.branches,
                np.float32(scale), width, heads.start, heads.stop, out, own.scores, own.bits,
                own.bits.view(np.float32), own.powers, own.powers.view(np.float32),
            )  # fmt: skip

        _share(work, queries.shape[1], len(self.positions) * self.blocks.shape[1] * BLOCK_LEN)
        return torch.from_numpy(out).view(len(queries), -1).to(query.dtype)

    def _scratch(self, part: int, group: int, dim: int) -> "Scratch":
        """Return the memory of one thread, the same for all layers of the pass."""
        own = self.scratch.get(part)
        if own is None or own.fits != (group, dim):
            own = self.scratch[part] = Scratch.of(group, dim, self.blocks.shape[1] * BLOCK_LEN)
        return own


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that one thread works in."""

    scores: Floats
    """[MAX_RUN * group, span]"""
    bits: npt.NDArray[np.uint32]
    """[64, head_dim], a block of keys or values made float32."""
    powers: npt.NDArray[np.uint32]
    """[span], powers of two under construction."""
    fits: tuple[int, int]

    @classmethod
    def of(cls, group: int, dim: int, span: int) -> "Scratch":
        """Make memory for so many keys."""
        return cls(
            np.empty((MAX_RUN * group, span), np.float32),
            np.empty((BLOCK_LEN, dim), np.uint32),
            np.empty(span, np.uint32),
            (group, dim),
        )


def _share(work: Callable[[int, range], None], heads: int, size: int) -> None:
    """Do work on key heads, in torch's number of threads where that pays; each head is worked on by one of them."""
    parts = min(torch.get_num_threads(), heads) if size >= _WORTH_SHARING else 1
    if parts == 1:
        work(0, range(heads))
        return
    bounds = [part * heads // parts for part in range(parts + 1)]
    others = [_threads(parts - 1).submit(work, part, range(bounds[part], bounds[part + 1])) for part in range(1, parts)]
    work(0, range(bounds[0], bounds[1]))
    for other in others:
        other.result()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="attention")


# -- compiled ----------------------------------------------------------------------------------------------------------


def _compiled(function: FunctionT) -> FunctionT:
    """Compile a function at its first call, and keep the result for other processes where there is a place for it."""
    try:
        return cast(FunctionT, numba.njit(fastmath=_FAST, nogil=True, cache=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(FunctionT, numba.njit(fastmath=_FAST, nogil=True)(function))


@_compiled
def _softmax(scores: Any, powers: Any, scale: Any, first: int, end: int) -> None:
    """Turn scores [first, end) into weights; `scale` is `powers` seen as float32. Source: Cephes' expf."""
    top = scores[first]
    for key in range(first, end):
        top = max(top, scores[key])
    for key in range(first, end):
        # Written so that a NaN stays one.
        power = scores[key] - top
        power = np.float32(-87.0) if power < np.float32(-87.0) else power
        whole = np.int32(power * np.float32(1.4426950408889634) - np.float32(0.5))
        rest = power - np.float32(whole) * np.float32(0.693359375)
        rest = rest + np.float32(whole) * np.float32(2.12194440e-4)
        value = np.float32(1.9875691500e-4)
        value = value * rest + np.float32(1.3981999507e-3)
        value = value * rest + np.float32(8.3334519073e-3)
        value = value * rest + np.float32(4.1665795894e-2)
        value = value * rest + np.float32(1.6666665459e-1)
        value = value * rest + np.float32(5.0000001201e-1)
        scores[key] = value * rest * rest + rest + np.float32(1.0)
        powers[key] = np.uint32(whole + np.int32(127)) << np.uint32(23)
    total = np.float32(0.0)
    for key in range(first, end):
        scores[key] *= scale[key]
        total += scores[key]
    inverse = np.float32(1.0) / total
    for key in range(first, end):
        scores[key] *= inverse


@_compiled
def _widen(  # noqa: PLR0913, PLR0917
    pool: Any, row: int, shared: int, branch: Any, head: int, count: int, shift: Any, bits: Any
) -> None:
    """Copy one head of a block's first `count` keys, as the bits of float32.

    The first `shared` of them lie side by side from `row` on; what `branch` names takes the place of the others, the
    first of it that of key `shared`, which may be negative.
    """
    for key in range(count):
        source, target = pool[row + key if key < shared else branch[key - shared], head], bits[key]
        for dim in range(len(target)):
            target[dim] = np.uint32(source[dim]) << shift


@_compiled
def _extent(positions: Any, start: int, end: int, window: int) -> Any:
    """Return the first and the last position that rows [start, end) see."""
    lowest, highest = positions[start], positions[start]
    for row in range(start, end):
        lowest, highest = min(lowest, positions[row]), max(highest, positions[row])
    return max(0, lowest + 1 - window), highest


@_compiled
def _attend(  # noqa: PLR0913, PLR0917  (compiled code takes arrays, not objects)
    query: Any, pool: Any, shift: Any, first: Any, count: Any, blocks: Any, positions: Any, bases: Any, branches: Any,
    scale: Any, window: int, head_start: int, head_end: int, out: Any, scores: Any, bits: Any, wide: Any, powers: Any,
    power_values: Any,
) -> None:  # fmt: skip
    """Attend with the runs of a pass; names as in `Runs`. `wide` and `power_values` are float32 views."""
    group = query.shape[2]
    for run in range(len(first)):
        start, end, base = first[run], first[run] + count[run], bases[run]
        for head in range(head_start, head_end):
            _score(
                query, pool, shift, blocks[run], positions, base, branches, start, end, scale, window, head, scores,
                bits, wide,
            )  # fmt: skip
            for row in range(start, end):
                for way in range(group):
                    own = scores[(row - start) * group + way]
                    _softmax(own, powers, power_values, max(0, positions[row] + 1 - window), positions[row] + 1)
            _weigh(
                out, pool, shift, blocks[run], positions, base, branches, start, end, window, head, scores, bits, wide
            )


@_compiled
def _score(  # noqa: PLR0913, PLR0917
    query: Any, pool: Any, shift: Any, blocks: Any, positions: Any, base: int, branches: Any, start: int, end: int,
    scale: Any, window: int, head: int, scores: Any, bits: Any, wide: Any,
) -> None:  # fmt: skip
    """Score the queries of rows [start, end) for one head, block by block."""
    group, dims = query.shape[2], query.shape[3]
    lowest, highest = _extent(positions, start, end, window)
    for block in range(lowest // BLOCK_LEN, highest // BLOCK_LEN + 1):
        at = block * BLOCK_LEN
        # Where rows part ways each has a reading of its own: one sum for both kinds, so that both have the same bits.
        together = end - start if at + BLOCK_LEN <= base else 1
        for share in range(start, end, together):
            seen = (highest if together > 1 else positions[share]) + 1 - at
            _widen(pool, blocks[block] * BLOCK_LEN, base - at, branches[share], head, min(BLOCK_LEN, seen), shift, bits)
            for row in range(share, share + together):
                low, high = max(0, positions[row] + 1 - window - at), min(BLOCK_LEN, positions[row] + 1 - at)
                for way in range(group):
                    own, target = query[row, head, way], scores[(row - start) * group + way]
                    for key in range(low, high):
                        keys, product = wide[key], np.float32(0.0)
                        for dim in range(dims):
                            product += own[dim] * keys[dim]
                        target[at + key] = product * scale


@_compiled
def _weigh(  # noqa: PLR0913, PLR0917
    out: Any, pool: Any, shift: Any, blocks: Any, positions: Any, base: int, branches: Any, start: int, end: int,
    window: int, head: int, weights: Any, bits: Any, wide: Any,
) -> None:  # fmt: skip
    """Sum up the weighted values of rows [start, end) for one head, block by block, four keys at a time."""
    heads, group, dims = out.shape[1], out.shape[2], out.shape[3]
    lowest, highest = _extent(positions, start, end, window)
    for block in range(lowest // BLOCK_LEN, highest // BLOCK_LEN + 1):
        at = block * BLOCK_LEN
        together = end - start if at + BLOCK_LEN <= base else 1
        for share in range(start, end, together):
            count = min(BLOCK_LEN, (highest if together > 1 else positions[share]) + 1 - at)
            _widen(pool, blocks[block] * BLOCK_LEN, base - at, branches[share], heads + head, count, shift, bits)
            for row in range(share, share + together):
                low, high = max(0, positions[row] + 1 - window - at), min(BLOCK_LEN, positions[row] + 1 - at)
                fours = low + max(0, high - low) // 4 * 4
                for way in range(group):
                    own, total = weights[(row - start) * group + way], out[row, head, way]
                    for key in range(low, fours, 4):
                        w0, w1, w2, w3 = own[at + key], own[at + key + 1], own[at + key + 2], own[at + key + 3]
                        v0, v1, v2, v3 = wide[key], wide[key + 1], wide[key + 2], wide[key + 3]
                        for dim in range(dims):
                            total[dim] += (w0 * v0[dim] + w1 * v1[dim]) + (w2 * v2[dim] + w3 * v3[dim])
                    for key in range(fours, high):
                        weight, value = own[at + key], wide[key]
                        for dim in range(dims):
                            total[dim] += weight * value[dim]
