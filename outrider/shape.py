"""Which tree to guess: the shape that is expected to have the longest path accepted. Pure.

A shape says how many children each node has, before any of them is drawn. Its nodes are told apart by ranks: the first
child of a node is the drafter's first choice there, the second what it would say if the first is wrong, and so on. What
a node adds to the expected length is the probability that it is reached and accepted: the product, along its path, of
the probabilities that a child of that depth and rank is the accepted one.

Shapes see rates of verdicts that are past, never tokens: what decides whether a token is tested must not have looked at
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rates = Sequence[Sequence[float]]
"""rates[d][r]: probability that the child of rank r is accepted, given that its parent, at depth d, was. The root has
depth 0. Of one depth they sum up to at most 1."""
_Values = npt.NDArray[np.float64]
_Sizes = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens: level by level, families together, siblings by rank."""

    parents: tuple[int, ...]
    """Index of each node's parent, or -1 for the root."""

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes by depth, children of the root first."""
        depths: list[int] = []
        levels: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            if depths[node] == len(levels):
                levels.append(())
            levels[depths[node]] += (node,)
        return tuple(levels)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among its siblings."""
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return tuple(ranks)

    def expected_len(self, rates: Rates) -> float:
        """Return how many of its tokens are accepted on average, with the rates of each depth and rank."""
        reached: list[float] = []
        for depth, level in enumerate(self.levels):
            for node in level:
                above = reached[self.parents[node]] if self.parents[node] >= 0 else 1.0
                reached.append(above * rates[depth][self.ranks[node]])
        return sum(reached)


def chain(length: int) -> Shape:
    """Return the shape of a run."""
    return Shape(tuple(range(-1, length - 1)))


def best_tree(rates: Rates, max_nodes: int) -> Shape:
    """Return the shape of the largest expected length.

    Args:
        rates: of each depth that nodes may have, and of each rank there; at least one of both.
        max_nodes: 1 or more; no node is used that adds nothing.

    Raises:
        ValueError: a rate is outside of 0 .. 1, a depth has none, or `max_nodes` is not positive.
    """
    if max_nodes < 1 or not rates or not all(rates):
        raise ValueError(f"{max_nodes} nodes over {[len(own) for own in rates]} rates: at least one of each is needed")
    if not all(0.0 <= rate <= 1.0 for own in rates for rate in own):
        raise ValueError("a rate is outside of 0 .. 1")
    chosen: list[list[_Sizes]] = []
    below = np.zeros(max_nodes + 1)
    for own in reversed(rates):
        below, sizes = _family(own, below)
        chosen.insert(0, sizes)
    return _unfold(chosen, max_nodes)


def _family(rates: Sequence[float], below: _Values) -> tuple[_Values, list[_Sizes]]:
    """Return what the children of a node add at best, and how they share its nodes.

    A child of a later rank is tested only behind the earlier ones, so there is none without them.

    Args:
        rates: of each rank.
        below: [nodes], what so many nodes below one of the children add at best.

    Returns:
        [nodes] of the same for their parent; of each rank [nodes], how many of those for it and later ranks it gets.
    """
    values, sizes = np.zeros_like(below), list[_Sizes]()
    left = np.arange(len(below))[:, None] - np.arange(1, len(below))
    for rate in reversed(rates):
        # [nodes, nodes of this child - 1]
        either = np.where(left >= 0, rate * (1.0 + below[:-1]) + values[left], 0.0)
        values = either.max(axis=1)
        sizes.insert(0, np.where(values > 0.0, either.argmax(axis=1) + 1, 0))
    return values, sizes


def _unfold(chosen: Sequence[Sequence[_Sizes]], max_nodes: int) -> Shape:
    """Lay a shape out level by level; `chosen[depth][rank][nodes]` says how a node's children share its nodes."""
    parents: list[int] = []
    level = [(-1, max_nodes)]
    for sizes in chosen:
        below: list[tuple[int, int]] = []
        for parent, nodes in level:
            for own in _shares(sizes, nodes):
                below.append((len(parents), own - 1))
                parents.append(parent)
        level = below
    return Shape(tuple(parents))


def _shares(sizes: Sequence[_Sizes], nodes: int) -> list[int]:
    """Return how many of a node's nodes each of its children gets; the first that gets none is no child."""
    shares: list[int] = []
    for own in sizes:
        share = int(own[nodes])
        if not share:
            break
        shares.append(share)
        nodes -= share
    return shares
