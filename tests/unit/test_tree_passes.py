"""Trees in a pass: every row has the bits it would have had as the end of a run, and one path can be kept."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.ids import TokenClass
from outrider.model.planning import Layout
from outrider.model.probe import calibrate
from outrider.model.runner import BLOCK_LEN, Feed, InvalidFeed, KvSlot, ModelRunner, prefill_plan
from outrider.model.tiny import random_model
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.model.transformers_runner import TransformersRunner
from outrider.verification import Tree

VOCAB = 97


@pytest.fixture(scope="module", params=["toy", "float32", "bfloat16", "window"])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    if request.param == "toy":
        yield ToyRunner(ToyLanguage(VOCAB, seed=3), num_blocks=64)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny(request.param)
    torch.set_num_threads(threads)


def tiny(kind: str) -> TransformersRunner:
    if kind == "window":
        from transformers import MistralConfig, MistralForCausalLM  # noqa: PLC0415

        torch.manual_seed(5)
        config = MistralConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=21, max_position_embeddings=512,
        )  # fmt: skip
        model: Any = MistralForCausalLM(config)
        model.to(torch.bfloat16)
    else:
        model = random_model(5, getattr(torch, kind), vocab_size=VOCAB)
    made = TransformersRunner(model, name=kind, num_blocks=64)
    calibrate(made)
    return made


def random_tree(rng: random.Random, count: int) -> Tree:
    parents = tuple(rng.randrange(max(-1, node - 6), node) for node in range(count))
    return Tree(tuple(rng.randrange(VOCAB) for _ in range(count)), parents)


def filled(runner: ModelRunner, text: Sequence[int]) -> KvSlot:
    slot = runner.new_slot()
    for first, last in prefill_plan(0, len(text)):
        runner.forward([Feed(slot, tuple(text[first:last]), TokenClass.PROMPT, 0)])
    return slot


def spread(runner: ModelRunner, slot: KvSlot, tree: Tree) -> Tensor:
    """Feed a tree; [nodes, vocab]."""
    return runner.forward([Feed(slot, tree.token_ids, TokenClass.DECODE, len(tree), parents=tree.parents)])[0].logits


def run(runner: ModelRunner, slot: KvSlot, ids: Sequence[int]) -> Tensor:
    return runner.forward([Feed(slot, tuple(ids), TokenClass.DECODE, len(ids))])[0].logits


@dataclass
class Case:
    text: list[int]
    tree: Tree
    rng: random.Random

    @classmethod
    def of(cls, seed: int, length: int, count: int) -> "Case":
        rng = random.Random(seed)
        return cls([rng.randrange(VOCAB) for _ in range(length)], random_tree(rng, count), rng)


# Lengths before, at and behind a block's border, so that trees hang over it.
CASES = [(0, 5, 7), (1, 60, 9), (2, 64, 12), (3, 63, 31), (4, 130, 3), (5, 126, 40)]


@pytest.mark.parametrize(("seed", "length", "count"), CASES)
def test_a_node_has_the_row_of_its_path_fed_as_a_run(runner: ModelRunner, seed: int, length: int, count: int) -> None:
    case = Case.of(seed, length, count)
    slot = filled(runner, case.text)
    rows = spread(runner, slot, case.tree)
    assert slot.length == length
    leaves = set(range(count)) - set(case.tree.parents)
    for leaf in leaves:
        path = case.tree.path_to(leaf)
        slot.truncate(length)
        assert torch.equal(run(runner, slot, case.tree.tokens(path)), rows[list(path)])
    runner.free_slot(slot)


@pytest.mark.parametrize(("seed", "length", "count"), CASES)
def test_a_kept_path_leaves_the_kv_of_a_run(runner: ModelRunner, seed: int, length: int, count: int) -> None:
    case = Case.of(seed, length, count)
    slot, other = filled(runner, case.text), filled(runner, case.text)
    spread(runner, slot, case.tree)
    path = case.tree.path_to(case.rng.randrange(-1, count))
    slot.keep(path)
    assert slot.length == length + len(path)
    if path:
        run(runner, other, case.tree.tokens(path))
    more = [case.rng.randrange(VOCAB) for _ in range(5)]
    assert torch.equal(run(runner, slot, more), run(runner, other, more))
    if isinstance(runner, TransformersRunner):
        assert all(torch.equal(own, theirs) for own, theirs in zip(kv(runner, slot), kv(runner, other), strict=True))
    runner.free_slot(slot)
    runner.free_slot(other)
    assert runner.kv_usage.used == 0


def kv(runner: TransformersRunner, slot: KvSlot) -> list[Tensor]:
    from outrider.model.kv import BlockSlot, pool_rows  # noqa: PLC0415

    assert isinstance(slot, BlockSlot)
    rows = pool_rows(slot, 0, slot.length)
    return [layer[rows] for layer in runner._kv.layers]


def test_trees_runs_and_prompts_share_a_pass_and_do_not_show(runner: ModelRunner) -> None:
    cases = [Case.of(seed, length, count) for seed, length, count in ((7, 61, 8), (8, 70, 5), (9, 3, 6))]
    alone = []
    for case in cases:
        slot = filled(runner, case.text)
        alone.append(spread(runner, slot, case.tree))
        runner.free_slot(slot)
    slots = [filled(runner, case.text) for case in cases]
    chain = filled(runner, cases[0].text)
    feeds = [
        Feed(slot, case.tree.token_ids, TokenClass.DECODE, len(case.tree), parents=case.tree.parents)
        for slot, case in zip(slots, cases, strict=True)
    ]
    feeds.insert(1, Feed(chain, (4, 5, 6), TokenClass.DECODE, 3))
    together = runner.forward(feeds)
    for rows, own in zip(together[:1] + together[2:], alone, strict=True):
        assert torch.equal(rows.logits, own)
    chain.truncate(len(cases[0].text))
    assert torch.equal(together[1].logits, run(runner, chain, (4, 5, 6)))
    for slot in [*slots, chain]:
        runner.free_slot(slot)


def test_a_tree_below_known_blocks_leaves_them_alone(runner: ModelRunner) -> None:
    case = Case.of(11, 2 * BLOCK_LEN, 20)
    first = filled(runner, case.text)
    first.commit(first.length)
    shared = runner.new_slot()
    shared.match(case.text, [TokenClass.PROMPT] * len(case.text))
    assert shared.length == len(case.text)
    shared.truncate(len(case.text) - 3)
    before = spread(runner, first, case.tree)
    first.keep(())
    spread(runner, shared, case.tree)
    shared.keep(case.tree.path_to(19))
    assert torch.equal(spread(runner, first, case.tree), before)
    runner.free_slot(first, forget=True)
    runner.free_slot(shared, forget=True)


def test_only_wanted_rows_come_back_and_hidden_states_and_best_ids_with_them(runner: ModelRunner) -> None:
    case = Case.of(12, 30, 9)
    slot = filled(runner, case.text)
    whole = spread(runner, slot, case.tree)
    slot.keep(())
    feed = Feed(slot, case.tree.token_ids, TokenClass.DECODE, 4, want_hidden=True, best_below=VOCAB,
                parents=case.tree.parents)  # fmt: skip
    rows = runner.forward([feed])[0]
    assert rows.hidden is not None
    assert rows.best is not None
    assert len(rows.hidden) == 4
    assert rows.best.tolist() == whole[-4:].argmax(-1).tolist()
    runner.free_slot(slot)


def test_a_path_is_kept_once_and_only_of_the_last_tree(runner: ModelRunner) -> None:
    case = Case.of(13, 10, 6)
    slot = filled(runner, case.text)
    with pytest.raises(ValueError, match="no tree"):
        slot.keep(())
    spread(runner, slot, Tree((1, 2, 3), (-1, -1, 0)))
    with pytest.raises(ValueError, match="no path"):
        slot.keep((1, 2))
    with pytest.raises(ValueError, match="no path"):
        slot.keep((2,))
    slot.keep((0, 2))
    with pytest.raises(ValueError, match="no tree"):
        slot.keep((0,))
    spread(runner, slot, case.tree)
    run(runner, slot, (1,))
    with pytest.raises(ValueError, match="no tree"):
        slot.keep(())
    assert slot.length == 10 + 2 + 1
    runner.free_slot(slot)


@pytest.mark.parametrize(
    ("parents", "token_class"),
    [((-1, 1), TokenClass.DECODE), ((-1,), TokenClass.DECODE), ((-1, 0), TokenClass.PROMPT)],
    ids=["own parent", "too few", "prompt"],
)
def test_feeds_that_are_no_trees_are_refused(
    runner: ModelRunner, parents: tuple[int, ...], token_class: TokenClass
) -> None:
    slot = runner.new_slot()
    with pytest.raises(InvalidFeed):
        runner.forward([Feed(slot, (1, 2), token_class, 1, parents=parents)])
    runner.free_slot(slot)


def test_a_tree_may_be_larger_than_what_is_left_of_the_context() -> None:
    runner = ToyRunner(ToyLanguage(VOCAB), context_len=66, num_blocks=4)
    slot = filled(runner, [1] * 64)
    spread(runner, slot, Tree((1, 2, 3, 4), (-1, -1, 0, 0)))
    with pytest.raises(InvalidFeed, match="exceed the context"):
        spread(runner, slot, Tree((1, 2, 3), (-1, 0, 1)))


def test_layouts_that_cannot_run_trees_say_so() -> None:
    runner = TransformersRunner(random_model(5, vocab_size=VOCAB), name="tight", num_blocks=4, layout=Layout.TIGHT)
    assert not runner.info.trees
    with pytest.raises(InvalidFeed, match="cannot run trees"):
        spread(runner, runner.new_slot(), Tree((1,), (-1,)))
