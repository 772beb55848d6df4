"""Trees as values, siblings from integer counts, and shapes; laws are enumerated in tests/exactness."""

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.ids import Epoch, Generation, Mode
from outrider.messages import COUNT_TOTAL, SparseRow
from outrider.noise import Purpose, derive_key, seed_key, word64
from outrider.sampling import draw_from_counts, one_hot_row
from outrider.shape import Shape, best_tree, chain
from outrider.verification import KeyedDraws, Tree, TreeJudgement, judge_tree, rule_for
from outrider.verification.siblings import DraftWords, Left, chances_of, draw_below, draw_sibling
from outrider.verification.tree import ROOT, families_problem, num_tree_mismatches, tree_problem
from tests.exactness.enumeration import word_of

REPEATABLE = settings(deadline=None, database=None, derandomize=True, max_examples=60)
KEY = seed_key(3)
ROW = SparseRow((4, 7, 2), (1 << 15, 1 << 14, 1 << 14))
TREE = Tree((5, 6, 7, 8, 9), (-1, -1, 0, 0, 3))


# --- the value --------------------------------------------------------------------------------------------------------


def test_a_tree_knows_depths_families_and_paths() -> None:
    assert TREE.depths == (1, 1, 2, 2, 3)
    assert TREE.families == {ROOT: (0, 1), 0: (2, 3), 3: (4,)}
    assert TREE.path_to(4) == (0, 3, 4)
    assert TREE.path_to(ROOT) == ()
    assert TREE.tokens((0, 3, 4)) == (5, 8, 9)
    assert (len(TREE), TREE.depth, TREE.is_chain) == (5, 3, False)
    assert Tree((1, 2, 3), (-1, 0, 1)).is_chain
    assert not Tree((1, 2, 3), (-1, 0, 0)).is_chain


def test_a_tree_cut_at_a_depth_keeps_the_rows_of_what_stays() -> None:
    rows = (one_hot_row(5), one_hot_row(7), one_hot_row(9))
    tree = Tree(TREE.token_ids, TREE.parents, rows)
    assert tree.down_to(2) == Tree((5, 6, 7, 8), (-1, -1, 0, 0), rows[:2])
    assert tree.down_to(0) == Tree((), ())
    assert tree.down_to(3) == tree
    assert tree.first_path == Tree((5, 7), (-1, 0), rows[:2])


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-2,), (-1, 0, 3)])
def test_parents_that_are_not_before_their_children_make_no_tree(parents: tuple[int, ...]) -> None:
    assert "parent" in tree_problem(parents)


def test_siblings_must_differ_and_come_from_their_row() -> None:
    assert not families_problem(TREE)
    assert "distinct" in families_problem(Tree((5, 5), (-1, -1)))
    assert not families_problem(Tree((5, 5), (-1, 0)))
    assert not families_problem(Tree((7, 2, 4, 9), (-1,) * 4, (ROW,)))
    assert "no mass" in families_problem(Tree((7, 9), (-1, -1), (ROW,)))
    assert "distinct" in families_problem(Tree((7, 2, 4, 7), (-1,) * 4, (ROW,)))


# --- siblings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, 3, 24576, 49152, COUNT_TOTAL])
def test_numbers_below_a_total_are_equally_many_words_each(total: int) -> None:
    """The first and last word of a number are as far apart as those of any other."""
    width = (1 << 64) // total
    for slot in {0, total // 2, total - 1}:
        first = word_of(slot, total)
        assert draw_below(total, [first].__getitem__) == slot
        assert draw_below(total, [first + width - 1].__getitem__) == slot
        assert draw_below(total, [first + width, word_of(0, total)].__getitem__) != slot or slot == 0


def test_a_word_that_would_favour_a_number_is_passed_over() -> None:
    assert draw_below(3, [0, (1 << 64) - 1].__getitem__) == 2


@REPEATABLE
@given(st.integers(0, (1 << 64) - 1))
def test_a_first_child_is_what_a_chain_would_draw(word: int) -> None:
    assert draw_sibling(ROW, (), [word].__getitem__) == draw_from_counts(ROW, word)


def test_a_sibling_is_drawn_from_what_is_left() -> None:
    words = [word_of(slot, Left.of(ROW, (7,)).total) for slot in (0, (1 << 15) - 1, 1 << 15)]
    assert [draw_sibling(ROW, (7,), [word].__getitem__) for word in words] == [4, 4, 2]
    assert draw_sibling(ROW, (7, 2), lambda _: 0) == 4
    assert draw_sibling(ROW, (7, 2, 4), lambda _: 0) is None


def test_nodes_of_one_position_have_words_of_their_own() -> None:
    nodes = [DraftWords(KEY, 5, Epoch(), node)(attempt) for node in range(3) for attempt in range(2)]
    assert len(set(nodes)) == 6
    assert nodes[0] == word64(KEY, 5, Epoch())


def test_chances_are_those_of_one_test_after_the_other() -> None:
    target = torch.tensor([0.2, 0.3, 0.5])
    chances, rest = chances_of(target, SparseRow((0, 1, 2), (1 << 15, 1 << 14, 1 << 14)), [0, 2])
    # First: .2 / .5; then (0, .05, .25) / .3 against (0, .5, .5), which takes the likelier token surely.
    assert chances.tolist() == pytest.approx([0.4, 0.6, 0.0])
    chances, rest = chances_of(target, one_hot_row(1), [1, 0])
    assert chances.tolist() == pytest.approx([0.3, 0.2, 0.5])
    assert rest.tolist() == pytest.approx([0.0, 0.0, 1.0])


def test_a_child_the_target_never_says_never_passes() -> None:
    chances, _ = chances_of(torch.tensor([0.0, 0.5, 0.5]), one_hot_row(0), [0, 1])
    assert chances.tolist() == pytest.approx([0.0, 0.5, 0.5])


def test_rounding_of_a_row_leaves_something_to_draw_from() -> None:
    row = torch.tensor([1.0 - 1e-7, 0.0], dtype=torch.float32)
    chances, rest = chances_of(row, one_hot_row(0), [0])
    assert chances.tolist() == [1.0, 0.0]
    assert float(rest.sum()) > 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_row_of_an_unsound_model_lets_no_child_pass(value: float) -> None:
    with pytest.raises(ValueError, match="the target's row sums to"):
        chances_of(torch.tensor([value, 0.0]), one_hot_row(0), [0])


# --- judging ----------------------------------------------------------------------------------------------------------


def rows_for(tokens: dict[int, int], vocab: int = 12) -> dict[int, torch.Tensor]:
    """Return rows whose likeliest token is given by node."""
    return {node: torch.nn.functional.one_hot(torch.tensor(token), vocab).float() for node, token in tokens.items()}


@pytest.mark.parametrize(
    ("likeliest", "expected"),
    [
        ({ROOT: 5, 0: 8, 3: 9, 4: 1}, TreeJudgement((0, 3, 4), 1, 3)),
        ({ROOT: 5, 0: 7, 2: 1}, TreeJudgement((0, 2), 1, 2)),
        ({ROOT: 6, 1: 3}, TreeJudgement((1,), 3, 1)),
        ({ROOT: 5, 0: 1}, TreeJudgement((0,), 1, 2)),
        ({ROOT: 1}, TreeJudgement((), 1, 1)),
    ],
    ids=["to the end", "first child", "second branch", "half way", "nothing"],
)
def test_greedy_trees_follow_the_likeliest_tokens(likeliest: dict[int, int], expected: TreeJudgement) -> None:
    rows = rows_for(likeliest)
    draws = KeyedDraws(KEY, Epoch())
    assert judge_tree(TREE, rule_for(Mode.GREEDY), rows.pop, 4, draws) == expected
    assert not rows


def test_an_empty_tree_is_a_plain_token() -> None:
    rows = rows_for({ROOT: 6})
    assert judge_tree(Tree((), ()), rule_for(Mode.GREEDY), rows.__getitem__, 4, KeyedDraws(KEY, Epoch())) == (
        TreeJudgement((), 6, 0)
    )


def drawn_tree(epoch: Epoch, base_len: int) -> Tree:
    """Draw a tree of two pairs and a named child from `ROW` by the session's draft stream."""
    key, parents = derive_key(KEY, Purpose.DRAFT), (-1, -1, 0, 0, 1, 1, 1, 1)
    shape, tokens = Tree((0,) * len(parents), parents), list[int]()
    for children in shape.families.values():
        before: list[int] = []
        for node in children:
            words = DraftWords(key, base_len + shape.depths[node] - 1, epoch, node)
            token = draw_sibling(ROW, before, words)
            before.append(0 if token is None else token)
        tokens += before
    return Tree(tuple(tokens), parents, (ROW,) * 3)


def test_the_verifier_can_draw_every_node_again() -> None:
    epoch = Epoch(Generation(1, 1), 4)
    tree, key = drawn_tree(epoch, 9), derive_key(KEY, Purpose.DRAFT)
    assert num_tree_mismatches(tree, key, 9, epoch) == 0
    assert num_tree_mismatches(tree, key, 10, epoch) > 0
    swapped = Tree((tree.token_ids[1], tree.token_ids[0], *tree.token_ids[2:]), tree.parents, tree.rows)
    assert num_tree_mismatches(swapped, key, 9, epoch) > 0


def test_what_is_cut_out_of_a_tree_was_drawn_under_the_numbers_it_had_there() -> None:
    """By chance a node draws the same under another number: so many trees, for one of them to tell."""
    for round_ in range(12):
        epoch = Epoch(Generation(1, 1), round_)
        tree, key = drawn_tree(epoch, 9), derive_key(KEY, Purpose.DRAFT)
        path = tree.first_path
        assert path.drawn_as == (0, 2)
        for cut in (path, path.down_to(1), path.down_to(2), tree.down_to(1)):
            assert num_tree_mismatches(cut, key, 9, epoch) == 0


def test_keyed_draws_of_a_tree_can_be_repeated_and_differ_by_epoch() -> None:
    vocab, found = 8, Counter[TreeJudgement]()
    row = torch.full((vocab,), 0.5 / (vocab - 1))
    row[2] = 0.5
    tree = Tree((4, 2, 7), (-1, -1, 0), (ROW, ROW))
    for round_ in range(60):
        draws = KeyedDraws(KEY, Epoch(Generation(), round_))
        first = judge_tree(tree, rule_for(Mode.REJECTION), lambda _: row, 3, draws)
        assert judge_tree(tree, rule_for(Mode.REJECTION), lambda _: row, 3, draws) == first
        found[first] += 1
    assert len(found) > 8
    assert {judgement.path for judgement in found} == {(), (0,), (1,), (0, 2)}


# --- shapes -----------------------------------------------------------------------------------------------------------


def all_shapes(max_nodes: int, depths: int, ranks: int) -> set[tuple[int, ...]]:
    """Return every shape as the sets of rank paths that are closed under parents and earlier siblings."""
    paths = [path for depth in range(1, depths + 1) for path in product(range(ranks), repeat=depth)]
    found: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(max_nodes):
        found |= {
            shape | {path}
            for shape in found
            for path in paths
            if path not in shape
            and (len(path) == 1 or path[:-1] in shape)
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in shape)
        }
    return {as_parents(shape) for shape in found}


def as_parents(paths: frozenset[tuple[int, ...]]) -> tuple[int, ...]:
    ordered = sorted(paths, key=lambda path: (len(path), path))
    return tuple(ordered.index(path[:-1]) if len(path) > 1 else -1 for path in ordered)


RATES = st.lists(st.lists(st.integers(0, 8), min_size=2, max_size=2), min_size=3, max_size=3)


@REPEATABLE
@given(RATES, st.integers(1, 5))
def test_the_best_tree_is_the_best_of_all_trees(eighths: list[list[int]], max_nodes: int) -> None:
    rates = [[rate / 16 for rate in own] for own in eighths]
    found = best_tree(rates, max_nodes)
    assert len(found.parents) <= max_nodes
    best = max(Shape(parents).expected_len(rates) for parents in all_shapes(max_nodes, 3, 2))
    assert found.expected_len(rates) == pytest.approx(best)


def test_a_certain_drafter_is_asked_for_a_chain_and_an_uncertain_one_for_breadth() -> None:
    assert best_tree([[1.0, 0.0]] * 6, 4) == chain(4)
    assert best_tree([[0.3, 0.25, 0.2]] * 6, 3).levels == ((0, 1, 2),)
    assert best_tree([[0.5, 0.0]] * 2, 9) == chain(2)


def test_levels_and_ranks_of_a_shape() -> None:
    shape = Shape((-1, -1, 0, 0, 1, 2))
    assert shape.levels == ((0, 1), (2, 3, 4), (5,))
    assert shape.ranks == (0, 1, 0, 1, 0, 0)
    assert shape.expected_len([[0.5, 0.25], [0.5, 0.5], [1.0]]) == pytest.approx(
        0.5 + 0.25 + 0.25 + 0.25 + 0.125 + 0.25
    )


@pytest.mark.parametrize(
    ("rates", "max_nodes"), [([], 3), ([[]], 3), ([[0.5]], 0), ([[1.5]], 3), ([[-0.1]], 3)], ids=str
)
def test_shapes_of_nothing_are_refused(rates: list[list[float]], max_nodes: int) -> None:
    with pytest.raises(ValueError, match=r"rate|nodes"):
        best_tree(rates, max_nodes)
