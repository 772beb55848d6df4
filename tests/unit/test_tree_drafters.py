"""What drafters put into a tree: the model's likeliest children, the noisiest, or siblings drawn from one row."""

from typing import Any

import pytest
import torch

from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.medusa import Medusa
from draft_service.drafters.protocol import Guessed, Plan, Work
from outrider.history import History
from outrider.ids import Epoch, Generation, Mode, SessionId
from outrider.messages import SamplingParams
from outrider.model.toy import ToyRunner
from outrider.noise import gumbel_field
from outrider.sampling import probabilities
from outrider.verification import Tree
from outrider.verification.tree import families_problem, num_tree_mismatches
from tests.unit.drafter_bench import KEY, TARGET, VOCAB, prompt, session
from tests.unit.feature_bench import KNOWN_IDS, medusa, random_draft, sent

EPOCH = Epoch(Generation(1, 1), 3)
BUSH = (-1, -1, -1, 0, 0, 1, 3)
PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.8, repetition_penalty=1.2)
MODES = pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED, Mode.REJECTION], ids=lambda mode: mode.name)


def causal_lm(nodes: int = 7) -> CausalLm:
    return CausalLm(ToyRunner(TARGET, context_len=512, num_blocks=64), vocab_len=VOCAB, tree_nodes=nodes)


def grown(drafter: CausalLm | Medusa, ids: list[int], parents: tuple[int, ...] = BUSH, epoch: Epoch = EPOCH) -> Tree:
    for _ in range(50):
        if drafter.plan(SessionId("s"), ids, 4) is not None:
            break
        drafter.draw([Work(SessionId("s"), epoch, ids, 0)])
    for _ in range(50):
        [outcome] = drafter.draw([Work(SessionId("s"), epoch, ids, len(parents), parents)])
        assert isinstance(outcome, Guessed), outcome
        if outcome.token_ids:
            return Tree(outcome.token_ids, parents, outcome.rows)
    raise AssertionError("no tree")


def law(ids: list[int], tree: Tree, node: int, params: SamplingParams) -> torch.Tensor:
    text = [*ids, *tree.tokens(tree.path_to(node))]
    logits = TARGET.probs(text).log()[None]
    return probabilities(logits, params, VOCAB, History(ids[:4], text[4:]))[0]


def ranked(values: torch.Tensor, count: int) -> list[int]:
    return torch.sort(values, descending=True, stable=True).indices[:count].tolist()


@pytest.mark.parametrize("sampling", [None, PENALISED], ids=["plain", "penalised"])
def test_greedy_children_are_the_likeliest(sampling: SamplingParams | None) -> None:
    params = SamplingParams(temperature=0.0) if sampling is None else sampling
    drafter, ids = causal_lm(), prompt(40)
    drafter.open(session(sampling=params), ids)
    tree = grown(drafter, ids)
    for node, children in tree.families.items():
        own = law(ids, tree, node, SamplingParams(temperature=1.0) if sampling is None else sampling)
        assert list(tree.tokens(children)) == ranked(own, len(children))


def test_coupled_children_are_those_that_the_field_prefers() -> None:
    drafter, ids = causal_lm(), prompt(30)
    drafter.open(session(mode=Mode.COUPLED), ids)
    tree = grown(drafter, ids)
    for node, children in tree.families.items():
        position = len(ids) + len(tree.path_to(node))
        noise = torch.from_numpy(gumbel_field(KEY, 0, position, VOCAB))
        scores = law(ids, tree, node, SamplingParams()).double().log() + noise
        assert list(tree.tokens(children)) == ranked(scores, len(children))


@pytest.mark.parametrize("sampling", [None, PENALISED, SamplingParams(top_k=2)], ids=["plain", "penalised", "short"])
def test_children_with_rows_are_drawn_by_the_draft_stream(sampling: SamplingParams | None) -> None:
    drafter, ids = causal_lm(), prompt(30)
    drafter.open(session(mode=Mode.REJECTION, sampling=sampling), ids)
    tree = grown(drafter, ids)
    assert not families_problem(tree)
    assert num_tree_mismatches(tree, KEY, len(ids), EPOCH) == 0
    assert len(tree.rows) == 4


@MODES
def test_a_tree_is_the_same_in_whatever_company_and_after_whatever_was_there_before(mode: Mode) -> None:
    ids, alone, drafter = prompt(70), causal_lm(), causal_lm()
    alone.open(session(mode=mode), ids)
    expected = grown(alone, ids)
    drafter.open(session(mode=mode), ids)
    drafter.open(session("other", mode=mode), ids[:9])
    grown(drafter, ids[:60], epoch=Epoch(Generation(1, 1), 2))
    # Half of a tree of another epoch, then the right one beside another session's run.
    drafter.draw([Work(SessionId("s"), Epoch(Generation(1, 1), 1), ids, 7, BUSH)])
    work = [Work(SessionId("s"), EPOCH, ids, 7, BUSH), Work(SessionId("other"), EPOCH, ids[:9], 1)]
    found = Guessed()
    while not found.token_ids:
        outcome, other = drafter.draw(work)
        assert isinstance(outcome, Guessed)
        assert isinstance(other, Guessed)
        found = outcome
    assert Tree(found.token_ids, BUSH, found.rows) == expected


def test_plans_are_trees_no_deeper_than_asked_for_except_for_blocks() -> None:
    ids, drafter = prompt(8), causal_lm()
    for name, mode in (("s", Mode.GREEDY), ("r", Mode.REJECTION)):
        drafter.open(session(name, mode=mode), ids)
        plan = drafter.plan(SessionId(name), ids, 2)
        assert plan is not None
        assert (plan.count, len(plan.parents), Tree(plan.parents, plan.parents).depth) == (7, 7, 2)
    drafter.open(session("b", mode=Mode.BLOCK), ids)
    assert drafter.plan(SessionId("b"), ids, 2) == Plan(2)


def test_a_model_without_trees_guesses_runs() -> None:
    runner = ToyRunner(TARGET, context_len=512, num_blocks=64)
    runner._info = type(runner.info)(**{**_fields(runner.info), "trees": False})
    drafter = CausalLm(runner, vocab_len=VOCAB, tree_nodes=7)
    drafter.open(session(), prompt(8))
    assert drafter.plan(SessionId("s"), prompt(8), 3) == Plan(3)


def _fields(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in type(info).__dataclass_fields__}


def test_a_tree_needs_room_for_all_its_tokens() -> None:
    drafter = CausalLm(ToyRunner(TARGET, context_len=512, num_blocks=1), vocab_len=VOCAB, tree_nodes=7)
    ids = prompt(60)
    drafter.open(session(), ids)
    plan = drafter.plan(SessionId("s"), ids, 3)
    assert plan is not None
    assert (plan.count, plan.reason) == (0, "kv_full")


# --- Medusa -----------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("sampling", [None, PENALISED], ids=["plain", "penalised"])
def test_medusas_trees_are_sound_and_can_be_drawn_again(mode: Mode, sampling: SamplingParams | None) -> None:
    drafter, ids = medusa(tree_nodes=7), prompt(20)
    drafter.open(session(mode=mode, sampling=sampling), ids)
    drafter.take_features(sent(ids, 0, len(ids) - 1))
    tree = grown(drafter, ids)
    assert not families_problem(tree)
    assert set(tree.token_ids) <= set(random_draft("medusa").draft_ids.tolist())
    assert len(set(tree.token_ids)) < KNOWN_IDS
    if mode is Mode.REJECTION:
        assert num_tree_mismatches(tree, KEY, len(ids), EPOCH) == 0


def test_medusas_first_path_is_its_run() -> None:
    ids = prompt(20)
    for mode in (Mode.GREEDY, Mode.COUPLED):
        drafter = medusa(tree_nodes=7)
        drafter.open(session(mode=mode), ids)
        drafter.take_features(sent(ids, 0, len(ids) - 1))
        tree = grown(drafter, ids)
        [outcome] = drafter.draw([Work(SessionId("s"), EPOCH, ids, 3)])
        assert isinstance(outcome, Guessed)
        assert tree.first_path.token_ids == outcome.token_ids
