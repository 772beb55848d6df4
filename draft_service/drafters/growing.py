"""Trees of guesses on the draft side: which shape they get, and how far one has grown.

Shapes follow from how far earlier trees of a mode were followed, of all sessions: rates by depth and rank, from which
`outrider.shape` finds the tree of the largest expected length. So a shape is settled before a token of its tree is
drawn, and no token that has not been judged has a say in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draft_service.drafters.protocol import DraftSession, Guessed
from draft_service.drafters.sampling import Family, guess_family
from outrider.history import History
from outrider.ids import Epoch, Mode
from outrider.messages import SparseRow
from outrider.shape import Shape, best_tree, chain
from outrider.verification.tree import ROOT, Tree

MAX_RANKS = 8
"""Most children of a node."""
_PRIOR = (0.6, 0.12, 0.06, 0.03, 0.02, 0.015, 0.01, 0.008)
"""Rates by rank before anything was measured; greedy drafts of a small model of the target's family are near it."""
_PRIOR_WEIGHT = 16.0
"""Families that the prior, and likewise all depths together, count as much as."""
_FORGET = 4096
"""Families of one depth after which all counts are halved."""
_FIRST_LOOK = 32
"""Families after which shapes are chosen anew for the first time; then whenever half as many more are known."""


class Shapes:
    """Chooses shapes of at most so many nodes by what was accepted."""

    def __init__(self, max_nodes: int) -> None:
        """Know nothing yet.

        Args:
            max_nodes: >= 1.
        """
        self._max_nodes = max_nodes
        self._tried: list[list[float]] = []
        """[depth][rank], families that had a child of this rank."""
        self._taken: list[list[float]] = []
        """[depth][rank], those whose child of this rank was accepted."""
        self._num_families = 0
        self._next_look = _FIRST_LOOK
        self._known: dict[int, Shape] = {}

    def learn(self, families: Sequence[tuple[int, int]]) -> None:
        """Count one tree: from the root on, the children of each node reached and the accepted one's rank, or -1."""
        for depth, (num_children, rank) in enumerate(families):
            if depth == len(self._tried):
                self._tried.append([0.0] * MAX_RANKS)
                self._taken.append([0.0] * MAX_RANKS)
            for own in range(min(num_children, MAX_RANKS)):
                self._tried[depth][own] += 1.0
                self._taken[depth][own] += own == rank
            if self._tried[depth][0] > _FORGET:
                self._tried[depth] = [count / 2 for count in self._tried[depth]]
                self._taken[depth] = [count / 2 for count in self._taken[depth]]
        self._num_families += len(families)
        if self._num_families >= self._next_look:
            self._next_look = self._num_families * 3 // 2
            self._known.clear()

    def shape(self, depth: int) -> Shape:
        """Return the best shape that is no deeper than `depth`, >= 1."""
        if depth not in self._known:
            levels = min(depth, self._max_nodes)
            shape = best_tree([self._rates(level) for level in range(levels)], self._max_nodes)
            # Where nothing is ever accepted, one guess is as good as none, and shows when that changes.
            self._known[depth] = shape if shape.parents else chain(1)
        return self._known[depth]

    def _rates(self, depth: int) -> list[float]:
        """Return the rates of a depth: measured there, else at all depths, else the prior."""
        tried = [sum(own[rank] for own in self._tried) for rank in range(MAX_RANKS)]
        taken = [sum(own[rank] for own in self._taken) for rank in range(MAX_RANKS)]
        rates = [_mixed(*counts) for counts in zip(taken, tried, _PRIOR, strict=True)]
        if depth < len(self._tried):
            rates = [_mixed(*counts) for counts in zip(self._taken[depth], self._tried[depth], rates, strict=True)]
        return rates


class ModeShapes:
    """Shapes of each mode that has trees; the block rule has none.

    Modes accept at different rates: a draw without a seed passes more often than one that has to be the same.
    """

    def __init__(self, max_nodes: int) -> None:
        """Know nothing yet.

        Args:
            max_nodes: of a tree; 0: no mode has trees.
        """
        modes = (Mode.GREEDY, Mode.COUPLED, Mode.REJECTION) if max_nodes else ()
        self._shapes = {mode: Shapes(max_nodes) for mode in modes}

    def parents(self, mode: Mode, depth: int) -> tuple[int, ...]:
        """Return the parents of the best tree no deeper than `depth`, >= 1; none where a run is guessed."""
        shapes = self._shapes.get(mode)
        return shapes.shape(depth).parents if shapes is not None else ()

    def learn(self, mode: Mode, families: Sequence[tuple[int, int]]) -> None:
        """Count one tree; see `Shapes.learn`."""
        if mode in self._shapes:
            self._shapes[mode].learn(families)


def _mixed(taken: float, tried: float, prior: float) -> float:
    return (taken + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)


@dataclass(slots=True)
class Growth:
    """A tree that is being drawn, level by level."""

    epoch: Epoch
    base_len: int
    """Absolute position of its first tokens."""
    parents: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    """Of the levels that are drawn."""
    rows: list[SparseRow] = field(default_factory=list)

    @property
    def level(self) -> tuple[int, ...]:
        """Nodes that were drawn last; the root if none were."""
        levels = Shape(self.parents).levels
        done = [own for own in levels if own[-1] < len(self.token_ids)]
        return done[-1] if done else (ROOT,)

    @property
    def is_whole(self) -> bool:
        """Whether all is drawn."""
        return len(self.token_ids) == len(self.parents)

    def children(self, node: int) -> tuple[int, ...]:
        """Return the children of a node, drawn or not."""
        return tuple(own for own, parent in enumerate(self.parents) if parent == node)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens from below the text down to a node that is drawn."""
        tree = Tree(tuple(self.token_ids), self.parents[: len(self.token_ids)])
        return tree.tokens(tree.path_to(node))

    def add(self, token_ids: Sequence[int], row: SparseRow | None) -> None:
        """Add the next family."""
        self.token_ids.extend(token_ids)
        self.rows.extend([] if row is None else [row])


def grow(session: DraftSession, growth: Growth, logits: Tensor, history: History | None) -> Guessed:
    """Choose the children of the nodes drawn last; give the tree out when it is whole.

    Args:
        session: its mode, parameters and key.
        growth: the tree so far.
        logits: [nodes drawn last, vocab_len].
        history: of the text before the tree.
    """
    for index, node in enumerate(growth.level):
        nodes = growth.children(node)
        if nodes:
            family = Family(nodes, growth.path(node))
            chosen = guess_family(logits[index : index + 1], session, growth.base_len, growth.epoch, family, history)
            growth.add(*chosen)
    if not growth.is_whole:
        return Guessed()
    return Guessed(tuple(growth.token_ids), tuple(growth.rows))
