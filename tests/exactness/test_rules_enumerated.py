"""The output law of every rule equals the target's, by exact enumeration; each planted mistake is caught by the
same comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from outrider.history import History
from outrider.ids import Mode
from outrider.messages import SamplingParams, SparseRow
from outrider.noise import Purpose, seed_key
from outrider.sampling import draw_from_counts, one_hot_row, sparse_row, target_rows
from outrider.verification import BlockRule, Draws, Judgement, Rule, TokenRule, rule_for
from outrider.verification.rejection import draft_prob, probs_of, residual
from outrider.verification.rule import passes
from tests.exactness.enumeration import Coin, EnumeratingSource, enumerate_law, sequential_law, total_variation
from tests.exactness.toy import VOCAB, Decoder, PipelinedDecoder, Source, Toy

EXACT = 1e-12
CAUGHT = 1e-3
TARGET, DRAFT = Toy(1), Toy(2)
PENALTIES = SamplingParams(
    logit_bias=((1, 0.5),), repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7, temperature=0.8
)
FILTERS = SamplingParams(temperature=1.4, top_k=2, min_p=0.05)


def distance(decoder: Decoder) -> float:
    """Return the total variation between what the decoder says and what its target says."""
    target = sequential_law(lambda prefix: decoder.target.next_probs(prefix, decoder.params), decoder.length)
    return total_variation(enumerate_law(decoder), target)


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=["token", "block"])
def test_sequential_rounds_have_the_target_law(rule: Rule, gamma: int) -> None:
    assert distance(Decoder(TARGET, DRAFT, rule=rule, gamma=gamma)) < EXACT


@pytest.mark.parametrize("plain", [False, True], ids=["chain", "plain steps between"])
@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=["token", "block"])
@pytest.mark.parametrize("gamma", [1, 2])
def test_a_chain_with_proposals_in_flight_has_the_target_law(rule: Rule, plain: bool, gamma: int) -> None:
    decoder = PipelinedDecoder(TARGET, DRAFT, rule=rule, gamma=gamma, length=3, plain_after_rejection=plain)
    assert distance(decoder) < EXACT


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=["token", "block"])
@pytest.mark.parametrize("params", [PENALTIES, FILTERS, SamplingParams(top_p=0.7)], ids=["penalties", "top-k", "top-p"])
def test_parameters_keep_the_law_with_a_drafter_of_other_parameters(rule: Rule, params: SamplingParams) -> None:
    draft_params = SamplingParams(temperature=0.6, top_p=0.95)
    assert distance(Decoder(TARGET, DRAFT, params=params, draft_params=draft_params, rule=rule)) < EXACT


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=["token", "block"])
def test_equal_target_and_draft_have_the_target_law(rule: Rule) -> None:
    assert distance(Decoder(TARGET, TARGET, rule=rule, gamma=3)) < EXACT


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=["token", "block"])
def test_rows_that_lost_tokens_on_the_way_to_the_wire_keep_the_law(rule: Rule) -> None:
    decoder = Decoder(TARGET, Toy(2, spread=6.0), rule=rule)
    prefixes = [(), *((i,) for i in range(VOCAB))]
    assert min(len(decoder.draft_row(prefix).token_ids) for prefix in prefixes) < VOCAB
    assert distance(decoder) < EXACT


@dataclass
class OneHotDecoder(Decoder):
    """Proposes the token a table names, without drawing."""

    def draft_row(self, prefix: tuple[int, ...]) -> SparseRow:
        return one_hot_row((sum(prefix) + len(prefix)) % VOCAB)


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=["token", "block"])
@pytest.mark.parametrize("params", [SamplingParams(), PENALTIES, FILTERS], ids=["none", "penalties", "top-k"])
def test_one_hot_drafts_have_the_target_law(rule: Rule, params: SamplingParams) -> None:
    assert distance(OneHotDecoder(TARGET, DRAFT, params=params, rule=rule, gamma=3)) < EXACT


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), replace(PENALTIES, temperature=0.0)])
@pytest.mark.parametrize("decoder", [Decoder, PipelinedDecoder, OneHotDecoder])
def test_greedy_text_is_the_targets_whatever_is_proposed(decoder: type[Decoder], params: SamplingParams) -> None:
    run = decoder(TARGET, DRAFT, mode=Mode.GREEDY, params=params, rule=rule_for(Mode.GREEDY))
    assert distance(run) < EXACT


@pytest.mark.parametrize("params", [SamplingParams(), PENALTIES, FILTERS], ids=["none", "penalties", "top-k"])
def test_coupled_text_depends_on_target_and_seed_alone(params: SamplingParams) -> None:
    texts = set()
    for seed in range(4):
        rule = rule_for(Mode.COUPLED, seed_key(seed))
        run = Decoder(TARGET, DRAFT, mode=Mode.COUPLED, params=params, length=3, rule=rule)
        plain: tuple[int, ...] = ()
        while len(plain) < run.length:
            plain = run.plain(EnumeratingSource(), plain)
        for gamma in (1, 2, 3):
            for kind in (Decoder, PipelinedDecoder, OneHotDecoder):
                other = kind(TARGET, DRAFT, Mode.COUPLED, params, gamma=gamma, length=3, rule=rule)
                assert enumerate_law(other) == {plain: pytest.approx(1.0)}
        texts.add(plain)
    assert len(texts) > 1


def test_the_block_rule_accepts_at_least_as_many_tokens() -> None:
    def mean_accepted(rule: Rule) -> float:
        decoder = Decoder(TARGET, DRAFT, rule=rule)

        def num_accepted(source: EnumeratingSource) -> tuple[int, ...]:
            tokens, rows = decoder.propose(source, (), 3)
            return (rule.judge(decoder.rows((), tokens), tokens, rows, 0, source).num_accepted,)

        return sum(key[0] * mass for key, mass in enumerate_law(num_accepted).items())

    token, block = mean_accepted(TokenRule()), mean_accepted(BlockRule())
    assert block > token + 0.01


# --- real coins on a grid: u itself is enumerated, including u = 0 --------------------------------------------------


@dataclass
class TableDecoder(Decoder):
    """One memoryless table for target and draft, in sixteenths."""

    sixteenths: tuple[int, ...] = (0, 6, 10)
    quarters: tuple[int, ...] = (1, 1, 2)

    def rows(self, committed: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
        return torch.tensor([self.sixteenths] * (len(tokens) + 1), dtype=torch.float64) / 16

    def draft_row(self, prefix: tuple[int, ...]) -> SparseRow:
        return SparseRow(tuple(range(len(self.quarters))), tuple(count << 14 for count in self.quarters))

    def distance(self, coin: Coin) -> float:
        law = enumerate_law(self, grid=16, coin=coin)
        return total_variation(law, sequential_law(lambda _: [count / 16 for count in self.sixteenths], self.length))


def test_a_token_without_target_mass_never_passes_even_at_the_coin_zero() -> None:
    decoder = TableDecoder(TARGET, DRAFT)
    assert decoder.distance(passes) < EXACT

    def lenient(u: float, target_prob: float, draft_prob: float) -> bool:
        return u * draft_prob <= target_prob

    assert decoder.distance(lenient) > CAUGHT


# --- planted mistakes -----------------------------------------------------------------------------------------------


@dataclass
class WeightedRule:
    """The token rule with another choice of replacement weights."""

    weights: Callable[[Tensor, SparseRow], Tensor]

    def judge(
        self, rows: Tensor, tokens: Sequence[int], draft_rows: Sequence[SparseRow], base_len: int, draws: Draws
    ) -> Judgement:
        for i, (token, prob) in enumerate(zip(tokens, probs_of(rows, tokens), strict=True)):
            if not draws.accept(prob, draft_prob(draft_rows[i], token), base_len + i):
                weights = self.weights(rows[i], draft_rows[i])
                return Judgement(i, i + 1, draws.pick(weights, Purpose.REPLACEMENT, base_len + i))
        return Judgement(len(tokens), len(tokens), None)

    def draw(self, row: Tensor, draws: Draws, position: int) -> int:
        return draws.pick(row, Purpose.TARGET, position)


def test_a_replacement_from_the_target_instead_of_the_residual_is_caught() -> None:
    right = WeightedRule(lambda row, draft_row: residual(row, draft_row, 1.0))
    assert distance(Decoder(TARGET, DRAFT, rule=right)) < EXACT
    wrong = WeightedRule(lambda row, draft_row: row)
    assert distance(Decoder(TARGET, DRAFT, rule=wrong)) > CAUGHT


def test_a_residual_from_a_truncated_row_is_caught() -> None:
    def truncated(row: Tensor, draft_row: SparseRow) -> Tensor:
        full = torch.zeros(VOCAB, dtype=torch.float64)
        full[list(draft_row.token_ids[:2])] = torch.tensor(draft_row.counts[:2], dtype=torch.float64)
        return residual(row, sparse_row(full), 1.0)

    assert distance(Decoder(TARGET, DRAFT, rule=WeightedRule(truncated))) > CAUGHT


@dataclass
class RelabelledDecoder(Decoder):
    """Draws tokens from its row and sends them as if it had not drawn them."""

    def propose(
        self, source: Source, prefix: tuple[int, ...], count: int
    ) -> tuple[tuple[int, ...], tuple[SparseRow, ...]]:
        tokens, _ = super().propose(source, prefix, count)
        return tokens, tuple(one_hot_row(token) for token in tokens)


def test_a_drawn_token_sent_as_one_hot_is_still_exact() -> None:
    """The one-hot test has the target's law for every single token, so it does not matter where the token came from."""
    assert distance(RelabelledDecoder(TARGET, DRAFT)) < EXACT


@dataclass
class LyingDecoder(Decoder):
    """Sends another row than the one it draws from."""

    def propose(
        self, source: Source, prefix: tuple[int, ...], count: int
    ) -> tuple[tuple[int, ...], tuple[SparseRow, ...]]:
        tokens, rows = super().propose(source, prefix, count)
        flat = torch.ones(VOCAB, dtype=torch.float64)
        return tokens, tuple(sparse_row(flat) for _ in rows)


def test_a_row_that_the_token_was_not_drawn_from_is_caught() -> None:
    assert distance(LyingDecoder(TARGET, DRAFT)) > CAUGHT


@dataclass
class LookingDecoder(Decoder):
    """Draws a token and, if it is unlikely, does not propose it."""

    least: float = 0.4

    def propose(
        self, source: Source, prefix: tuple[int, ...], count: int
    ) -> tuple[tuple[int, ...], tuple[SparseRow, ...]]:
        tokens, rows = super().propose(source, prefix, count)
        keep = next((i for i in range(count) if draft_prob(rows[i], tokens[i]) < self.least), count)
        return tokens[:keep], rows[:keep]

    def round(self, source: Source, committed: tuple[int, ...]) -> tuple[int, ...]:
        tokens, draft_rows = self.propose(source, committed, min(self.gamma, self.length - len(committed)))
        if not tokens:
            return self.plain(source, committed)
        judgement = self.judge(source, self.rows(committed, tokens), tokens, draft_rows, len(committed))
        accepted = committed + tokens[: judgement.num_accepted]
        return accepted if judgement.replacement is None else (*accepted, judgement.replacement)


def test_a_stop_decided_after_looking_at_the_token_is_caught() -> None:
    assert distance(LookingDecoder(TARGET, DRAFT, least=0.0)) < EXACT
    assert distance(LookingDecoder(TARGET, DRAFT)) > CAUGHT


def test_an_end_that_arrives_in_time_only_when_it_is_an_end_has_the_known_wrong_law() -> None:
    rule, row, draft_row = (
        TokenRule(),
        torch.tensor([[0.25, 0.75]], dtype=torch.float64),
        SparseRow((0, 1), (1 << 14, 3 << 14)),
    )

    def decode(source: EnumeratingSource) -> tuple[int, ...]:
        token = source.draw_counts(draft_row)
        if token != 0:
            return (rule.draw(row[0], source, 0),)
        judgement = rule.judge(row, [token], [draft_row], 0, source)
        return (token if judgement.replacement is None else judgement.replacement,)

    assert enumerate_law(decode) == {(0,): pytest.approx(7 / 16), (1,): pytest.approx(9 / 16)}


@dataclass
class ForgetfulDecoder(Decoder):
    """Computes penalties from the committed prefix only."""

    def rows(self, committed: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
        rows = [super().rows(committed, ())[0]]
        for i in range(len(tokens)):
            logits = self.target.logits((*committed, *tokens[: i + 1]))[None]
            rows.append(target_rows(logits, self.mode, self.params, VOCAB, History((), committed))[0])
        return torch.stack(rows)


def test_penalties_that_ignore_the_drafts_of_the_run_are_caught() -> None:
    assert distance(ForgetfulDecoder(TARGET, DRAFT)) < EXACT
    assert distance(ForgetfulDecoder(TARGET, DRAFT, params=PENALTIES)) > CAUGHT


@dataclass
class GreedyBonusDecoder(Decoder):
    """Draws a bonus token although the next proposal is under way, then tests that proposal at the same position."""

    def round(self, source: Source, committed: tuple[int, ...]) -> tuple[int, ...]:
        tokens, rows = self.propose(source, committed, 2)
        target = self.rows(committed, tokens)
        first = self.judge(source, target, tokens[:1], rows[:1], len(committed))
        if first.replacement is not None:
            return (*committed, first.replacement)
        committed = (*committed, tokens[0])
        bonus = self.rule.draw(target[1], source, len(committed))
        late = self.judge(source, target[1:], tokens[1:], rows[1:], len(committed))
        return (*committed, bonus if late.replacement is not None else tokens[1])


def test_testing_an_in_flight_token_after_a_bonus_was_drawn_there_is_caught() -> None:
    assert distance(GreedyBonusDecoder(TARGET, DRAFT)) > CAUGHT


class FirstFailureBlockRule(BlockRule):
    """Stops at the first prefix that fails."""

    def longest_pass(self, thresholds: Sequence[float], base_len: int, draws: Draws) -> int:
        for i, threshold in enumerate(thresholds):
            if not draws.accept(threshold, 1.0, base_len + i):
                return i
        return len(thresholds)


def test_a_block_rule_that_stops_at_the_first_failure_is_caught() -> None:
    assert distance(Decoder(TARGET, DRAFT, rule=FirstFailureBlockRule())) > CAUGHT


class SharedNoise(EnumeratingSource):
    """A source whose draft draw and coin share one uniform number per position, from a grid of 16."""

    def __init__(self, inner: EnumeratingSource, shared: bool) -> None:
        super().__init__()
        self.inner, self.shared, self.steps = inner, shared, list[int]()

    def step(self) -> int:
        return self.inner.choose([(step, 1 / 16) for step in range(16)])

    def draw_counts(self, row: SparseRow) -> int:
        self.steps.append(self.step())
        return draw_from_counts(row, self.steps[-1] << 60)

    def accept(self, target_prob: float, draft_prob: float, position: int) -> bool:
        step = self.steps[0] if self.shared else self.step()
        return self.inner.coin(step / 16, target_prob, draft_prob)

    def pick(self, weights: Tensor, purpose: Purpose, position: int) -> int:
        return self.inner.pick(weights, purpose, position)


@pytest.mark.parametrize("shared", [False, True])
def test_a_coin_that_reuses_the_drafts_noise_is_caught(shared: bool) -> None:
    decoder = TableDecoder(TARGET, DRAFT, length=1, sixteenths=(2, 5, 9))
    law = enumerate_law(lambda source: decoder(SharedNoise(source, shared)))
    distance = total_variation(law, {(0,): 2 / 16, (1,): 5 / 16, (2,): 9 / 16})
    assert distance > CAUGHT if shared else distance < EXACT


@dataclass
class RepeatedNoise:
    """Draft noise counted by position only, so that a position drafted again after a rollback sees the same number."""

    inner: EnumeratingSource
    by_epoch: bool
    steps: dict[tuple[int, int], int] = field(default_factory=dict)
    position: int = 0
    epoch: int = 0

    def draw_counts(self, row: SparseRow) -> int:
        key = (self.position, self.epoch if self.by_epoch else 0)
        if key not in self.steps:
            self.steps[key] = self.inner.choose([(step, 1 / 4) for step in range(4)])
        self.position += 1
        return draw_from_counts(row, self.steps[key] << 62)

    def accept(self, target_prob: float, draft_prob: float, position: int) -> bool:
        return self.inner.accept(target_prob, draft_prob, position)

    def pick(self, weights: Tensor, purpose: Purpose, position: int) -> int:
        self.position, self.epoch = position + 1, self.epoch + 1
        return self.inner.pick(weights, purpose, position)


@pytest.mark.parametrize("by_epoch", [True, False])
def test_draft_noise_that_repeats_after_a_rollback_is_caught(by_epoch: bool) -> None:
    decoder = TableDecoder(
        TARGET, DRAFT, rule=BlockRule(), length=3, gamma=2, bonus=False, sixteenths=(2, 5, 9), quarters=(2, 1, 1)
    )
    law = enumerate_law(lambda source: decoder(RepeatedNoise(source, by_epoch)))
    target = sequential_law(lambda _: [2 / 16, 5 / 16, 9 / 16], 3)
    distance = total_variation(law, target)
    assert distance < EXACT if by_epoch else distance > CAUGHT
