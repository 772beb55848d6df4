"""Children of one node: drawn without replacement on the draft side, tested in the order drawn on the verifier's.

A *family* is the children of one node, in the order drawn, with the one draft row that all of them come from. Child j
is drawn from that row without the children before it. All of it is integers: what is left of the row's counts, and
their sum. Where nothing is left, a child is not drawn: it is named by a rule that knows the text before it and the
children before it alone, and its own row is one-hot. So the row of a family that is only named is the one-hot row of
its first child, and one mathematics serves both.

With p the target's row and q_j what child j was drawn from, normalised, child j is accepted with probability
min(1, p_j(x_j) / q_j(x_j)), where p_1 = p and p_(j+1) = (p_j - q_j)+ normalised; if none is, the token is drawn from
the last p.

Source: Chen et al. 2023, "Accelerating large language model decoding with speculative sampling", for one child; Jeon et
al. 2024, "Recursive speculative decoding", and Yang et al. 2024, "Multi-candidate speculative decoding", for several.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.ids import Epoch
from outrider.messages import SparseRow
from outrider.noise import word64

_WORDS = 1 << 64
_RETRY = 1 << 32
"""Words of one child are this far apart: no tree has as many nodes."""


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a draft row once some of its tokens are gone."""

    token_ids: tuple[int, ...]
    counts: tuple[int, ...]
    """Positive."""

    @classmethod
    def of(cls, row: SparseRow, gone: Sequence[int]) -> "Left":
        """Take tokens out of a row."""
        kept = [(token, count) for token, count in zip(row.token_ids, row.counts, strict=True) if token not in gone]
        return cls(tuple(token for token, _ in kept), tuple(count for _, count in kept))

    @property
    def total(self) -> int:
        """Sum of the counts."""
        return sum(self.counts)

    def at(self, slot: int) -> int:
        """Return the token that a number below the total falls to."""
        for token, count in zip(self.token_ids, self.counts, strict=True):
            if slot < count:
                return token
            slot -= count
        raise ValueError("a number at or past the total")


def draw_below(total: int, words: Callable[[int], int]) -> int:
    """Return a number uniform on 0 .. total - 1, exactly.

    Args:
        total: 1 .. 2**32.
        words: the independent 64-bit word of each attempt; the first nearly always serves.

    Source: Lemire 2019, "Fast random integer generation in an interval".
    """
    attempt = 0
    while True:
        slot, rest = divmod(words(attempt) * total, _WORDS)
        if rest >= _WORDS % total:
            return slot
        attempt += 1


def draw_sibling(row: SparseRow, before: Sequence[int], words: Callable[[int], int]) -> int | None:
    """Draw a child behind others of its family.

    Args:
        row: the family's.
        before: the children before it, in any order.
        words: see `draw_below`; of the first child the first word gives what `draw_from_counts` gives.

    Returns:
        A token of the row that is not among them; None if none is left, so that the child has to be named.
    """
    left = Left.of(row, before)
    return left.at(draw_below(left.total, words)) if left.counts else None


@dataclass(frozen=True, slots=True)
class DraftWords:
    """The words of a session's draft stream for one node of a tree."""

    key: bytes
    """Of the draft stream."""
    position: int
    epoch: Epoch
    node: int
    """Index in the tree: nodes of one position have words of their own."""

    def __call__(self, attempt: int) -> int:
        """Return the word of an attempt."""
        return word64(self.key, self.position, self.epoch, self.node + attempt * _RETRY)


def family_problem(row: SparseRow, children: Sequence[int]) -> str:
    """Say why a row cannot be the one that these children come from; an empty string if it can.

    Args:
        row: a sound one (`sampling.row_problem`).
        children: in the order drawn, at least one.
    """
    if len(set(children)) != len(children):
        return f"children {list(children)} must be distinct"
    for index, token in enumerate(children):
        left = Left.of(row, children[:index])
        if left.counts and token not in left.token_ids:
            return f"child {token} has no mass in what is left of its row"
    return ""


def chances_of(target: Tensor, row: SparseRow, children: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return with which probability each child is the first to pass, and what is drawn from if none does.

    Args:
        target: [vocab] probabilities of the target.
        row: the family's draft row.
        children: in the order drawn.

    Returns:
        [children + 1] float64, the last for none; and [vocab] float64 weights.

    Raises:
        ValueError: the target's row sums to 0, or not to a finite number, as when a model returned NaN.
    """
    rest = target.double()
    total = float(rest.sum())
    if not 0.0 < total < float("inf"):
        raise ValueError(f"nothing to test with: the target's row sums to {total}")
    rest = rest / total
    chances, none = [], 1.0
    for index, token in enumerate(children):
        left = Left.of(row, children[:index])
        own, weights = _draft_weights(left, token, rest)
        passing = min(1.0, float(rest[token]) / own)
        chances.append(none * passing)
        none *= 1.0 - passing
        after = (rest - weights).clamp_(min=0.0)
        mass = float(after.sum())
        if not mass > 0.0:
            # Equal laws reject nothing, except by rounding; the rest is then the nearest law with the target's support.
            break
        rest = after / mass
    chances += [0.0] * (len(children) - len(chances))
    return torch.tensor([*chances, none], dtype=torch.float64), rest


def _draft_weights(left: Left, token: int, like: Tensor) -> tuple[float, Tensor]:
    """Return the token's own draft probability, and the whole draft law as a row like another."""
    weights = torch.zeros_like(like)
    if not left.counts:
        weights[token] = 1.0
        return 1.0, weights
    ids = torch.tensor(left.token_ids, device=like.device)
    weights[ids] = torch.tensor(left.counts, dtype=torch.float64, device=like.device) / left.total
    return left.counts[left.token_ids.index(token)] / left.total, weights
