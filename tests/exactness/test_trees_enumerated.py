"""Trees have the target's law in every mode, by exact enumeration; each planted mistake is caught by the same
comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from outrider.history import History
from outrider.ids import Mode
from outrider.messages import COUNT_TOTAL, SamplingParams, SparseRow
from outrider.noise import Purpose, seed_key
from outrider.sampling import one_hot_row, target_rows
from outrider.shape import Shape, chain
from outrider.verification import Draws, TokenRule, Tree, TreeJudgement, judge_tree, rule_for
from outrider.verification.rejection import draft_prob
from outrider.verification.siblings import Left, chances_of
from outrider.verification.tree import ROOT, families_problem
from tests.exactness.enumeration import EnumeratingSource, Law, enumerate_law, sequential_law, total_variation
from tests.exactness.test_rules_enumerated import CAUGHT, DRAFT, EXACT, FILTERS, PENALTIES, TARGET
from tests.exactness.toy import VOCAB, Decoder, Source, Toy

BUSH = Shape((-1, -1, 0, 0, 1))
"""Two first tokens, two behind the first of them, one behind the second."""
PAIR = Shape((-1, -1))
WIDE = Shape((-1, -1, -1))
DEEP = Shape((-1, -1, 0, 2))
SHAPES = {"bush": BUSH, "wide": WIDE, "deep": DEEP, "chain": chain(2)}


@dataclass
class TreeDecoder(Decoder):
    """Rounds of one tree each, as the services have them: drawn level by level, judged by the real code."""

    shape: Shape = BUSH

    def round(self, source: Source, committed: tuple[int, ...]) -> tuple[int, ...]:
        assert isinstance(source, EnumeratingSource)
        tree = self.grow(source, committed)
        judgement = self.judge_tree(source, committed, tree)
        return (*committed, *tree.tokens(judgement.path), judgement.drawn)

    def judge_tree(self, source: Draws, committed: tuple[int, ...], tree: Tree) -> TreeJudgement:
        assert not families_problem(tree)
        return judge_tree(tree, self.rule, lambda node: self.row_at(committed, tree, node), len(committed), source)

    def row_at(self, committed: tuple[int, ...], tree: Tree, node: int) -> Tensor:
        path = tree.tokens(tree.path_to(node))
        return self.rows(committed, path)[len(path)]

    def grow(self, source: EnumeratingSource, committed: tuple[int, ...]) -> Tree:
        tokens: dict[int, int] = {}
        rows: list[SparseRow] = []
        parents = self.shape_for(committed)
        for parent, children in Tree((0,) * len(parents), parents).families.items():
            tree = Tree(tuple(tokens[node] for node in sorted(tokens)), parents[: len(tokens)])
            prefix = committed + tree.tokens(tree.path_to(parent))
            row = self.family_row(prefix)
            drawn: list[int] = []
            for node in children:
                drawn.append(self.child(source, row, drawn, prefix))
                tokens[node] = drawn[-1]
            rows.append(row)
        token_ids = tuple(tokens[node] for node in range(len(tokens)))
        return Tree(token_ids, parents, tuple(rows) if self.mode.needs_rows else ())

    def shape_for(self, committed: tuple[int, ...]) -> tuple[int, ...]:
        """Leave out what would be too deep for a token of the target's own to follow."""
        parents = self.shape.parents
        return Tree((0,) * len(parents), parents).down_to(self.length - len(committed) - 1).parents

    def family_row(self, prefix: tuple[int, ...]) -> SparseRow:
        return self.draft_row(prefix)

    def child(self, source: EnumeratingSource, row: SparseRow, drawn: list[int], prefix: tuple[int, ...]) -> int:
        token = source.draw_sibling(row, drawn)
        return next(own for own in range(VOCAB) if own not in drawn) if token is None else token


@dataclass
class NamedDecoder(TreeDecoder):
    """Names children by rank, in an order that a table gives, and draws none."""

    def ranked(self, prefix: tuple[int, ...]) -> list[int]:
        first = (sum(prefix) + len(prefix)) % VOCAB
        return [(first + step) % VOCAB for step in range(VOCAB)]

    def family_row(self, prefix: tuple[int, ...]) -> SparseRow:
        return one_hot_row(self.ranked(prefix)[0])

    def child(self, source: EnumeratingSource, row: SparseRow, drawn: list[int], prefix: tuple[int, ...]) -> int:
        return self.ranked(prefix)[len(drawn)]


def round_from(decoder: Decoder, committed: tuple[int, ...], source: EnumeratingSource) -> tuple[int, ...]:
    return decoder.round(source, committed)


def law_of(decoder: Decoder) -> Law:
    """Return the law of the text: rounds share no randomness, so those after equal texts are enumerated once."""
    law: Law = {}
    going: Law = {(): 1.0}
    while going:
        committed, mass = going.popitem()
        for text, share in enumerate_law(partial(round_from, decoder, committed)).items():
            held = law if len(text) >= decoder.length else going
            held[text] = held.get(text, 0.0) + mass * share
    return law


def distance(decoder: Decoder) -> float:
    target = sequential_law(lambda prefix: decoder.target.next_probs(prefix, decoder.params), decoder.length)
    return total_variation(law_of(decoder), target)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", [TreeDecoder, NamedDecoder])
def test_trees_have_the_target_law(kind: type[TreeDecoder], shape: Shape) -> None:
    assert distance(kind(TARGET, DRAFT, shape=shape)) < EXACT


@pytest.mark.parametrize("params", [PENALTIES, FILTERS, SamplingParams(top_p=0.7)], ids=["penalties", "top-k", "top-p"])
@pytest.mark.parametrize("kind", [TreeDecoder, NamedDecoder])
def test_parameters_keep_the_law_of_trees(kind: type[TreeDecoder], params: SamplingParams) -> None:
    draft_params = SamplingParams(temperature=0.6, top_p=0.95)
    assert distance(kind(TARGET, DRAFT, params=params, draft_params=draft_params)) < EXACT


def test_equal_target_and_draft_have_the_target_law() -> None:
    assert distance(TreeDecoder(TARGET, TARGET)) < EXACT


def test_rows_with_fewer_tokens_than_children_keep_the_law() -> None:
    decoder = TreeDecoder(TARGET, Toy(2, spread=6.0), shape=WIDE)
    assert min(len(decoder.draft_row(prefix).token_ids) for prefix in [(), (0,), (1,), (2,)]) < VOCAB
    assert distance(decoder) < EXACT


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), replace(PENALTIES, temperature=0.0)])
@pytest.mark.parametrize("kind", [TreeDecoder, NamedDecoder])
def test_greedy_text_is_the_targets_whatever_tree_is_guessed(kind: type[TreeDecoder], params: SamplingParams) -> None:
    assert distance(kind(TARGET, DRAFT, mode=Mode.GREEDY, params=params, rule=rule_for(Mode.GREEDY))) < EXACT


@pytest.mark.parametrize("params", [SamplingParams(), PENALTIES], ids=["none", "penalties"])
def test_coupled_text_depends_on_target_and_seed_alone(params: SamplingParams) -> None:
    texts = set()
    for seed in range(3):
        rule = rule_for(Mode.COUPLED, seed_key(seed))
        plain: tuple[int, ...] = ()
        run = Decoder(TARGET, DRAFT, mode=Mode.COUPLED, params=params, rule=rule)
        while len(plain) < run.length:
            plain = run.plain(EnumeratingSource(), plain)
        for kind in (TreeDecoder, NamedDecoder):
            law = law_of(kind(TARGET, DRAFT, Mode.COUPLED, params, rule=rule))
            assert law == {plain: pytest.approx(1.0)}
        texts.add(plain)
    assert len(texts) > 1


def mean_accepted(decoder: TreeDecoder) -> float:
    def num_accepted(source: EnumeratingSource) -> tuple[int, ...]:
        return (len(decoder.judge_tree(source, (), decoder.grow(source, ())).path),)

    return sum(key[0] * mass for key, mass in enumerate_law(num_accepted).items())


def test_a_second_child_adds_accepted_tokens() -> None:
    assert mean_accepted(TreeDecoder(TARGET, DRAFT, shape=PAIR)) > 0.05 + mean_accepted(
        TreeDecoder(TARGET, DRAFT, shape=chain(1))
    )


def test_a_family_that_is_drawn_whole_always_passes() -> None:
    """Without replacement, all tokens of a vocabulary together leave the target no other."""
    assert mean_accepted(TreeDecoder(TARGET, DRAFT, shape=WIDE)) == pytest.approx(1.0)


# --- planted mistakes -------------------------------------------------------------------------------------------------


@dataclass
class SortedDecoder(TreeDecoder):
    """Tests siblings by their draft probability, not in the order drawn."""

    def grow(self, source: EnumeratingSource, committed: tuple[int, ...]) -> Tree:
        tree = super().grow(source, committed)
        tokens = list(tree.token_ids)
        for row, children in zip(tree.rows, tree.families.values(), strict=True):
            ordered = sorted(tree.tokens(children), key=lambda token: -draft_prob(row, token))
            for node, token in zip(children, ordered, strict=True):
                tokens[node] = token
        return Tree(tuple(tokens), tree.parents, tree.rows)


def test_siblings_tested_by_probability_are_caught() -> None:
    # Leaves, because reordered tokens would be other parents of the same children.
    assert distance(TreeDecoder(TARGET, DRAFT, shape=WIDE, length=2)) < EXACT
    assert distance(SortedDecoder(TARGET, DRAFT, shape=WIDE, length=2)) > 0.05
    assert distance(SortedDecoder(TARGET, DRAFT, shape=PAIR, length=2)) > CAUGHT


@dataclass
class WrongDecoder(TreeDecoder):
    """Judges families by a rule of the test's own: [children + 1] chances, and replacement weights."""

    chances: Callable[[Tensor, SparseRow, Sequence[int]], tuple[Tensor, Tensor]] = chances_of
    shape: Shape = PAIR
    length: int = 2

    def judge_tree(self, source: Draws, committed: tuple[int, ...], tree: Tree) -> TreeJudgement:
        row = self.row_at(committed, tree, ROOT)
        if not len(tree):
            return TreeJudgement((), self.rule.draw(row, source, len(committed)), 0)
        chances, weights = self.chances(row, tree.rows[0], tree.token_ids)
        won = source.pick(chances, Purpose.COIN, 0)
        if won == len(tree):
            return TreeJudgement((), source.pick(weights, Purpose.REPLACEMENT, 0), 1)
        return TreeJudgement((won,), self.rule.draw(self.row_at(committed, tree, won), source, 1), 1)


def from_the_target(target: Tensor, row: SparseRow, children: Sequence[int]) -> tuple[Tensor, Tensor]:
    return chances_of(target, row, children)[0], target


def with_the_whole_row(target: Tensor, row: SparseRow, children: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tests every child with the row that the first was drawn from."""
    rest, chances, none = target, list[float](), 1.0
    for token in children:
        passing = min(1.0, float(rest[token]) / draft_prob(row, token))
        chances.append(none * passing)
        none *= 1.0 - passing
        draft = torch.zeros(VOCAB, dtype=torch.float64)
        draft[list(row.token_ids)] = torch.tensor(row.counts, dtype=torch.float64) / COUNT_TOTAL
        rest = (rest - draft).clamp(min=0.0)
        rest = rest / rest.sum() if float(rest.sum()) > 0 else target
    return torch.tensor([*chances, none], dtype=torch.float64), rest


def with_independent_tests(target: Tensor, row: SparseRow, children: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tests every child by itself against the target's row; the likeliest of those that pass wins."""
    passing = []
    for index, token in enumerate(children):
        left = Left.of(row, children[:index])
        own = left.counts[left.token_ids.index(token)] / left.total if token in left.token_ids else 1.0
        passing.append(min(1.0, float(target[token]) / own))
    chances, none = [0.0] * len(children), 1.0
    for index in sorted(range(len(children)), key=lambda at: -float(target[children[at]])):
        chances[index], none = none * passing[index], none * (1.0 - passing[index])
    return torch.tensor([*chances, none], dtype=torch.float64), chances_of(target, row, children)[1]


def with_a_truncated_row(target: Tensor, row: SparseRow, children: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Takes away, of the row that was drawn from, only the two likeliest tokens."""
    rest, counts = target, row.counts[:2]
    second = counts[1] * COUNT_TOTAL // sum(counts)
    cut = SparseRow(row.token_ids[:2], (COUNT_TOTAL - second, second))
    for index in range(len(children)):
        left, draft = Left.of(cut, children[:index]), torch.zeros(VOCAB, dtype=torch.float64)
        if left.counts:
            draft[list(left.token_ids)] = torch.tensor(left.counts, dtype=torch.float64) / left.total
        after = (rest - draft).clamp(min=0.0)
        rest = after / after.sum() if float(after.sum()) > 0 else rest
    return chances_of(target, row, children)[0], rest


def without_later_tests(target: Tensor, row: SparseRow, children: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Right about the first child; the others are followed if the replacement happens to be one of them."""
    first, rest = chances_of(target, row, children[:1])
    own = torch.tensor([float(rest[token]) for token in children[1:]], dtype=torch.float64) * first[1]
    others = rest.clone()
    others[list(children[1:])] = 0.0
    return torch.cat([first[:1], own, first[1:] - own.sum()]), others


MISTAKES = [from_the_target, with_the_whole_row, with_independent_tests, with_a_truncated_row]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_wrong_tests_of_siblings_are_caught(mistake: Callable[..., tuple[Tensor, Tensor]]) -> None:
    alone = chain(1) if mistake is with_a_truncated_row else PAIR
    assert distance(WrongDecoder(TARGET, DRAFT, shape=alone)) < EXACT
    assert distance(WrongDecoder(TARGET, DRAFT, shape=alone, chances=mistake)) > CAUGHT


def test_following_later_siblings_by_the_residual_alone_is_exact_too() -> None:
    """Whatever is drawn behind the first test may be compared with siblings that are known: they decide nothing."""
    assert distance(WrongDecoder(TARGET, DRAFT, chances=without_later_tests)) < EXACT


@dataclass
class RepeatingDecoder(TreeDecoder):
    """Draws siblings with replacement, and says it did not: a repeated one is named anew."""

    def child(self, source: EnumeratingSource, row: SparseRow, drawn: list[int], prefix: tuple[int, ...]) -> int:
        token = source.draw_counts(row)
        return token if token not in drawn else next(own for own in row.token_ids if own not in drawn)


def test_siblings_drawn_with_replacement_are_caught() -> None:
    assert distance(RepeatingDecoder(TARGET, DRAFT, shape=PAIR, length=2)) > CAUGHT


@dataclass
class DrawnAsNamedDecoder(TreeDecoder):
    """Draws siblings and sends them as if a rule had named them."""

    def family_row(self, prefix: tuple[int, ...]) -> SparseRow:
        return self.draft_row(prefix)

    def grow(self, source: EnumeratingSource, committed: tuple[int, ...]) -> Tree:
        tree = super().grow(source, committed)
        rows = tuple(one_hot_row(tree.token_ids[children[0]]) for children in tree.families.values())
        return Tree(tree.token_ids, tree.parents, rows)


def test_drawn_siblings_sent_as_named_ones_are_still_exact() -> None:
    """As for single tokens: a test against a one-hot row has the target's law for every token."""
    assert distance(DrawnAsNamedDecoder(TARGET, DRAFT)) < EXACT


@dataclass
class PrefixDecoder(TreeDecoder):
    """Computes a node's row from the committed text alone, as far as penalties go."""

    def row_at(self, committed: tuple[int, ...], tree: Tree, node: int) -> Tensor:
        path = tree.tokens(tree.path_to(node))
        logits = self.target.logits((*committed, *path))[None]
        return target_rows(logits, self.mode, self.params, VOCAB, History((), committed))[0]


def test_penalties_that_do_not_see_a_nodes_path_are_caught() -> None:
    assert distance(PrefixDecoder(TARGET, DRAFT)) < EXACT
    assert distance(PrefixDecoder(TARGET, DRAFT, params=PENALTIES)) > CAUGHT


@dataclass
class PickyDecoder(TreeDecoder):
    """Draws a second child and leaves it out if it is unlikely."""

    def grow(self, source: EnumeratingSource, committed: tuple[int, ...]) -> Tree:
        tree = super().grow(source, committed)
        keep = not len(tree) or draft_prob(tree.rows[0], tree.token_ids[1]) >= 0.3
        return tree if keep else Tree(tree.token_ids[:1], (-1,), tree.rows)


def test_a_child_left_out_after_looking_at_it_is_caught() -> None:
    # Laws under which a first rejection leaves two tokens, so that a second child has something to decide.
    target, draft = Toy(2, spread=0.6), Toy(7)
    assert distance(TreeDecoder(target, draft, shape=PAIR, length=2)) < EXACT
    assert distance(PickyDecoder(target, draft, shape=PAIR, length=2)) > CAUGHT


def test_the_token_rule_is_the_rule_of_trees_that_are_chains() -> None:
    tree = TreeDecoder(TARGET, DRAFT, shape=chain(2), length=3)
    run = Decoder(TARGET, DRAFT, rule=TokenRule(), gamma=2, length=3)
    assert total_variation(law_of(tree), law_of(run)) < EXACT
