"""Trees of proposals: several continuations verified in one pass, of which at most one path is committed.

A tree hangs below the committed text. Its verdict is a path from there, and one token of the target's own behind it: at
a leaf as after a run that was accepted whole, elsewhere in place of the children that all failed. So a tree ends its
epoch.

* Greedy and coupled mode: at each node the target's own token is what it is, and the child that equals it is followed.
* Rejection mode: at each node the family is tested as `siblings.py` says.

Whether a node is in the tree was decided before its token was drawn. It makes no difference to the law that other
branches are thrown away: what is tested next depends on what was accepted, and on coins.

A node's row is the target's after the committed text and the node's own path: penalties see those tokens, no others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.ids import Epoch
from outrider.messages import SparseRow
from outrider.noise import Purpose
from outrider.verification.rule import Draws, Rule
from outrider.verification.siblings import DraftWords, chances_of, draw_sibling, family_problem

ROOT = -1
"""In place of a node: the committed text."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Tokens below a text; every node comes behind its parent, and siblings in the order in which they are tested."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    """Index of each node's parent, or `ROOT`."""
    rows: tuple[SparseRow, ...] = ()
    """In modes that need rows one per family, in the order of their first children."""
    drawn_as: tuple[int, ...] = field(default=(), compare=False)
    """Of what was cut out of another tree: the number that each node has there, under which it was drawn."""

    def __len__(self) -> int:
        """Count the nodes."""
        return len(self.token_ids)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths, default=0)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return self.parents == tuple(range(ROOT, len(self) - 1))

    @property
    def families(self) -> dict[int, tuple[int, ...]]:
        """Children of each node that has some, in the order of first children; the root is one."""
        families: dict[int, tuple[int, ...]] = {}
        for node, parent in enumerate(self.parents):
            families[parent] = (*families.get(parent, ()), node)
        return families

    def row_of(self, parent: int) -> SparseRow:
        """Return the draft row of a family."""
        return self.rows[list(self.families).index(parent)]

    def tokens(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of some nodes."""
        return tuple(self.token_ids[node] for node in nodes)

    def path_to(self, node: int) -> tuple[int, ...]:
        """Return the nodes from below the root to a node, itself included; none for the root."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def follow(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the path that says what these tokens say, as far as one does."""
        path: list[int] = []
        for token in token_ids:
            children = self.families.get(path[-1] if path else ROOT, ())
            node = next((child for child in children if self.token_ids[child] == token), None)
            if node is None:
                break
            path.append(node)
        return tuple(path)

    def down_to(self, depth: int) -> "Tree":
        """Return the tree without what is deeper; what stays is tested as before."""
        return self._only([node for node, own in enumerate(self.depths) if own <= depth])

    @property
    def first_path(self) -> "Tree":
        """The chain of first children, which is what a target that runs no trees can test."""
        path, families = [], self.families
        node = ROOT
        while node in families:
            node = families[node][0]
            path.append(node)
        return self._only(path)

    def _only(self, nodes: list[int]) -> "Tree":
        """Keep nodes whose parents, and earlier siblings, are kept."""
        at = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        parents = [self.parents[node] for node in nodes]
        rows = dict(zip(self.families, self.rows, strict=True)) if self.rows else {}
        kept = tuple(rows[parent] for parent in dict.fromkeys(parents)) if rows else ()
        drawn_as = tuple(self.drawn_as[node] for node in nodes) if self.drawn_as else tuple(nodes)
        return Tree(self.tokens(nodes), tuple(at[parent] for parent in parents), kept, drawn_as)


@dataclass(frozen=True, slots=True)
class TreeJudgement:
    """What became of a tree."""

    path: tuple[int, ...]
    """Nodes whose tokens are committed, from below the root."""
    drawn: int
    """The target's own token behind them."""
    num_tested: int
    """Families that were tested: one more than were passed, unless the path ends at a leaf."""


def tree_problem(parents: Sequence[int]) -> str:
    """Say why parents make no tree; an empty string if they do.

    Args:
        parents: of each node, as received.
    """
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            return f"node {node} has the parent {parent}: must be in {ROOT} .. {node - 1}"
    return ""


def families_problem(tree: Tree) -> str:
    """Say why no honest drafter sends these siblings; an empty string if one may.

    Args:
        tree: with sound parents, and with no rows or a sound one for each family.
    """
    for index, (parent, children) in enumerate(tree.families.items()):
        tokens = tree.tokens(children)
        problem = family_problem(tree.rows[index], tokens) if tree.rows else ""
        if problem or len(set(tokens)) != len(tokens):
            return problem or f"children {list(tokens)} of node {parent} must be distinct"
    return ""


def judge_tree(tree: Tree, rule: Rule, row_at: Callable[[int], Tensor], base_len: int, draws: Draws) -> TreeJudgement:
    """Follow a tree from its root as far as its tokens pass.

    Args:
        tree: without rows in modes that need none; else one that `families_problem` found nothing in.
        rule: of the session's mode, not the block rule.
        row_at: gives the target's row for what comes behind a node, or the root, prepared as the rule needs it
            (`sampling.target_rows`, with the node's path as the run). Asked for nodes of the path alone, each once.
        base_len: absolute position of the root's children.
        draws: the session's randomness.
    """
    path: list[int] = []
    families, node, num_tested = tree.families, ROOT, 0
    while True:
        row, position, children = row_at(node), base_len + len(path), families.get(node, ())
        if not children:
            return TreeJudgement(tuple(path), rule.draw(row, draws, position), num_tested)
        num_tested += 1
        if tree.rows:
            won, own = _test(tree, node, row, draws, position)
        else:
            own = rule.draw(row, draws, position)
            won = next((child for child in children if tree.token_ids[child] == own), None)
        if won is None:
            return TreeJudgement(tuple(path), own, num_tested)
        path.append(won)
        node = won


def _test(tree: Tree, node: int, row: Tensor, draws: Draws, position: int) -> tuple[int | None, int]:
    """Test a family in rejection mode; return the node that passed, or None and the token that replaces all.

    All tests of a family are one draw: which child is the first to pass, or none.
    """
    children = tree.families[node]
    chances, residual = chances_of(row, tree.row_of(node), tree.tokens(children))
    won = draws.pick(chances, Purpose.COIN, position)
    if won < len(children):
        return children[won], tree.token_ids[children[won]]
    return None, draws.pick(residual, Purpose.REPLACEMENT, position)


def num_tree_mismatches(tree: Tree, key: bytes, base_len: int, epoch: Epoch) -> int:
    """Return how many nodes were not drawn from their family's row by the draft stream; named ones are not counted.

    Args:
        tree: with rows.
        key: of the session's draft stream.
        base_len: absolute position of the root's children.
        epoch: the tree's.
    """
    wrong, depths, drawn_as = 0, tree.depths, tree.drawn_as or range(len(tree))
    for row, children in zip(tree.rows, tree.families.values(), strict=True):
        tokens = tree.tokens(children)
        for index, (node, token) in enumerate(zip(children, tokens, strict=True)):
            words = DraftWords(key, base_len + depths[node] - 1, epoch, drawn_as[node])
            wrong += draw_sibling(row, tokens[:index], words) not in (token, None)
    return wrong
