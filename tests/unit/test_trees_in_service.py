"""Trees from the draft worker to the verdict: the real worker, window, engine and chain, with nothing between them."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from draft_service.drafters.causal_lm import CausalLm
from draft_service.orders import Outgoing
from draft_service.session import SessionKey
from outrider.ids import Epoch, Mode, SessionId, TokenKind, WorkerId
from outrider.messages import (
    DraftCommit,
    DraftOpen,
    Pass,
    Proposal,
    ProposalHeader,
    SamplingParams,
    Speculation,
    TargetFeatures,
)
from outrider.model.planning import Layout, RowClasses
from outrider.model.probe import calibrate
from outrider.model.runner import ModelRunner
from outrider.model.tiny import random_model
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.model.transformers_runner import TransformersRunner
from outrider.noise import Purpose, derive_key
from tests.unit import draft_desk, verify_desk
from tests.unit.verify_desk import KEY, VOCAB, Client, Request, twin

DEEP = Speculation(3, 3, 3)
PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.8, repetition_penalty=1.2)


@dataclass
class Table:
    """An engine, a draft worker, and the orchestrator's part between them."""

    desk: verify_desk.Desk
    drafts: draft_desk.Desk
    request: Request
    sent: list[Proposal | ProposalHeader | Pass] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = Client(self.desk, self.request, lambda _: torch.empty(0))
        key = {Mode.GREEDY: b"", Mode.COUPLED: derive_key(self.request.key or KEY, Purpose.FIELD)}.get(
            self.request.mode, derive_key(self.request.key or KEY, Purpose.DRAFT)
        )
        ask = self.request
        opened = DraftOpen(
            SessionId(ask.session_id), Epoch(ask.generation), ask.prompt, ask.mode, ask.sampling, key, ask.speculation,
            WorkerId("v"), "v:1", prompt_len=len(ask.prompt),
        )  # fmt: skip
        self.key: SessionKey = self.drafts.open(opened)
        self.told = 0

    def turn(self) -> None:
        if self.drafts.worker.has_work:
            self.drafts.worker.step()
        for report in self.drafts.take(Outgoing):
            self.sent.append(report.message)
            self.desk.propose(report.message)  # type: ignore[arg-type]
        self.desk.step(0.0)
        for verdict in self.client.verdicts[self.told :]:
            commit = DraftCommit(verdict.next_epoch, verdict.start, verdict.token_ids, self.request.speculation)
            self.drafts.commit(self.key, commit.start, commit.token_ids, commit.epoch.round, commit.speculation)
        self.told = len(self.client.verdicts)

    def run(self, turns: int = 2000) -> "Table":
        for _ in range(turns):
            if self.client.done:
                assert not self.client.errors
                assert not self.drafts.deaths()
                return self
            self.turn()
        raise AssertionError(f"not done: {len(self.client.committed)} tokens")

    @property
    def trees(self) -> list[Proposal]:
        return [message for message in self.sent if isinstance(message, Proposal) and message.parents]


def toy_drafter(nodes: int, weight: float = 0.4) -> CausalLm:
    runner = ToyRunner(ToyLanguage(VOCAB, seed=5).draft(weight, 77), num_blocks=64)
    return CausalLm(runner, vocab_len=VOCAB, kind="toy", tree_nodes=nodes)


def asked(mode: Mode, sampling: SamplingParams | None = None, **fields: Any) -> Request:
    plain = SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 1.0)
    key = b"" if mode is Mode.GREEDY else KEY
    return Request(mode=mode, sampling=sampling or plain, key=key, speculation=DEEP, **fields)


def played(
    request: Request, nodes: int = 7, runner: ModelRunner | None = None, drafter: CausalLm | None = None
) -> Table:
    table = Table(verify_desk.Desk(runner), draft_desk.Desk(drafter or toy_drafter(nodes)), request)
    return table.run()


SAMPLINGS = {
    "plain": None,
    "penalised": PENALISED,
    "filtered": SamplingParams(temperature=0.8, top_k=5, top_p=0.9),
    "one token left": SamplingParams(temperature=0.8, top_k=1),
}


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED], ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_the_twins(mode: Mode, name: str) -> None:
    sampling = SAMPLINGS[name]
    if sampling is not None and mode is Mode.GREEDY:
        sampling = replace(sampling, temperature=0.0)
    request = asked(mode, sampling)
    table = played(request)
    assert table.client.output == twin(request)
    assert len(table.trees) > 3
    assert {TokenKind.ACCEPTED, TokenKind.RECOVERED} <= set(table.client.kinds)


def test_a_drafter_that_is_always_right_gets_its_trees_accepted_to_their_ends() -> None:
    table = played(asked(Mode.GREEDY), drafter=toy_drafter(7, weight=0.0))
    assert TokenKind.BONUS in table.client.kinds
    assert max(verdict.num_accepted for verdict in table.client.verdicts) == DEEP.gamma


@pytest.mark.parametrize(
    "sampling", [None, PENALISED, SAMPLINGS["one token left"]], ids=["plain", "penalised", "short"]
)
def test_trees_with_rows_are_drawn_as_the_verifier_would(sampling: SamplingParams | None) -> None:
    table = played(asked(Mode.REJECTION, sampling, max_tokens=60))
    assert table.desk.engine.counters["draft_row_mismatch"] == 0
    assert table.desk.engine.counters["garbage"] == 0
    assert TokenKind.ACCEPTED in table.client.kinds
    headers = [message for message in table.sent if isinstance(message, ProposalHeader)]
    assert {(header.count, header.depth > 0) for header in headers} >= {(7, True)}
    assert all(tree.rows for tree in table.trees)


def test_second_children_are_accepted_too() -> None:
    ranks = Counter[int]()
    table = Table(verify_desk.Desk(), draft_desk.Desk(toy_drafter(7)), asked(Mode.REJECTION, max_tokens=150))
    shapes = table.drafts.worker._drafter._shapes._shapes[Mode.REJECTION]  # type: ignore[attr-defined]
    learn = shapes.learn
    shapes.learn = lambda families: (ranks.update(rank for _, rank in families), learn(families))
    table.run()
    assert ranks[0] > ranks[1] > 0
    assert ranks[-1] > 0


def test_log_probabilities_are_those_of_the_path() -> None:
    request = asked(Mode.GREEDY, num_logprobs=2)
    table, alone = played(request), Client(verify_desk.Desk(), request)
    alone.desk.run([alone])
    own = [logprob for verdict in table.client.verdicts for logprob in verdict.logprobs]
    theirs = [logprob for verdict in alone.verdicts for logprob in verdict.logprobs]
    assert own == theirs


def test_features_are_those_of_the_path() -> None:
    """The toy's hidden state is the length of the text, so that a wrong node would show."""
    desk = verify_desk.Desk(feature_layers=(-1,))
    table = Table(desk, draft_desk.Desk(toy_drafter(7)), asked(Mode.GREEDY)).run()
    assert table.trees
    told: dict[int, float] = {}
    for message in desk.to_worker:
        if isinstance(message, TargetFeatures):
            values = torch.frombuffer(bytearray(message.features.data), dtype=torch.float32)
            told.update({message.position + index: float(value) for index, value in enumerate(values)})
    assert all(value == position + 1 for position, value in told.items())
    assert len(told) > 40


def test_a_commit_limit_cuts_trees() -> None:
    for max_tokens in (1, 2, 3):
        request = asked(Mode.GREEDY, max_tokens=max_tokens)
        assert played(request).client.output == twin(request)


def test_blocks_are_guessed_in_runs() -> None:
    table = played(asked(Mode.BLOCK))
    assert not table.trees


# --- real models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> TransformersRunner:
    runner = TransformersRunner(random_model(3, torch.bfloat16, vocab_size=VOCAB), name="tiny", num_blocks=16)
    calibrate(runner)
    return runner


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED], ids=lambda mode: mode.name)
def test_the_text_of_a_real_model_is_the_twins(target: TransformersRunner, mode: Mode) -> None:
    request = asked(mode, max_tokens=80, prompt=tuple(range(1, 20)))
    drafter = CausalLm(target_like(), vocab_len=VOCAB, tree_nodes=9)
    table = played(request, runner=target, drafter=drafter)
    assert table.client.output == twin(request, target)
    assert any(verdict.num_accepted for verdict in table.client.verdicts)


def target_like() -> TransformersRunner:
    """A drafter that is often right: the target with noise on its head."""
    model = random_model(3, torch.bfloat16, vocab_size=VOCAB)
    weight = model.lm_head.weight
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    # Not probed: the last bits of guesses are no matter.
    return TransformersRunner(model, name="like", num_blocks=16)


def test_a_target_without_trees_tests_first_children() -> None:
    request = asked(Mode.GREEDY, prompt=tuple(range(1, 9)))
    tight = TransformersRunner(random_model(3, vocab_size=VOCAB), name="tight", num_blocks=16, layout=Layout.TIGHT)
    tight.set_classes(RowClasses((16,), (16,), items_mix=False, spans_mix=False), "")
    like = CausalLm(target_like(), vocab_len=VOCAB, tree_nodes=9)
    table = played(request, runner=tight, drafter=like)
    assert table.trees
    assert table.client.output == twin(request, tight)
