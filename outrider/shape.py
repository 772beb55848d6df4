"""Which tree to guess: the shape that is expected to have the longest path accepted. Pure.

A shape says how many children each node has, before any of them is drawn. Its nodes are told apart by ranks: the first
child of a node is the drafter's first choice there, the second what it would say if the first is wrong, and so on. What
a node adds to the expected length is the probability that it is reached and accepted: the product, along its path, of
the probabilities that a child of that depth and rank is the accepted one.

Shapes see rates of verdicts that are past, never tokens: what decides whether a token is tested must not have looked at
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

Rates = Sequence[Sequence[float]]
"""rates[d][r]: probability that the child of rank r is accepted, given that its parent, at depth d, was. The root has
depth 0. Of one depth they sum up to at most 1."""


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

    @cache
    def family(depth: int, rank: int, nodes: int) -> tuple[float, tuple[int, ...]]:
        """Return the best value of the children from `rank` on below a node, and the nodes each of them gets.

        A child of a later rank is tested only behind the earlier ones, so there is none without them.
        """
        best: tuple[float, tuple[int, ...]] = (0.0, ())
        if depth == len(rates) or rank == len(rates[depth]):
            return best
        for own in range(1, nodes + 1):
            value = rates[depth][rank] * (1.0 + family(depth + 1, 0, own - 1)[0])
            others, sizes = family(depth, rank + 1, nodes - own)
            if value + others > best[0]:
                best = (value + others, (own, *sizes))
        return best

    return _unfold(lambda depth, nodes: family(depth, 0, nodes)[1], max_nodes)


def _unfold(sizes_below: Callable[[int, int], tuple[int, ...]], max_nodes: int) -> Shape:
    """Lay a shape out level by level; `sizes_below(depth, nodes)` says how a node's children share its nodes."""
    parents: list[int] = []
    level = [(-1, max_nodes)]
    depth = 0
    while level:
        below: list[tuple[int, int]] = []
        for parent, nodes in level:
            for own in sizes_below(depth, nodes):
                below.append((len(parents), own - 1))
                parents.append(parent)
        level, depth = below, depth + 1
    return Shape(tuple(parents))
