"""The rules on single runs, the production draws, and their borders; laws are enumerated in tests/exactness."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outrider.ids import Epoch, Generation, Mode
from outrider.messages import COUNT_TOTAL, SparseRow
from outrider.noise import Purpose, derive_key, seed_key, word64
from outrider.sampling import coupled_token, draw_from_counts, one_hot_row, sparse_row
from outrider.verification import (
    BlockRule,
    CoupledRule,
    GreedyRule,
    Judgement,
    KeyedDraws,
    Rule,
    TokenRule,
    rule_for,
)
from outrider.verification.block import pass_probs, survival_probs
from outrider.verification.rejection import draft_prob, residual
from outrider.verification.rule import index_at, passes

REPEATABLE = settings(deadline=None, database=None, derandomize=True)
KEY = seed_key(7)
DRAWS = KeyedDraws(KEY, Epoch())
LAST_U = 1.0 - 2.0**-53


def table(*rows: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


def epoch(round_: int) -> Epoch:
    return Epoch(Generation(), round_)


# --- draws ----------------------------------------------------------------------------------------------------------


def test_a_coin_passes_strictly_below_the_ratio() -> None:
    assert passes(0.0, 1e-300, 1.0)
    assert not passes(0.0, 0.0, 1.0)
    assert not passes(0.5, 0.25, 0.5)
    assert passes(0.4999, 0.25, 0.5)
    assert passes(LAST_U, 0.3, 0.3)


@REPEATABLE
@given(st.floats(0, LAST_U), st.lists(st.sampled_from([0.0, 0.0, 1e-300, 1e-9, 0.3, 1.0, 7.0]), min_size=1).filter(any))
def test_a_picked_index_always_has_weight(u: float, weights: list[float]) -> None:
    assert weights[index_at(u, torch.tensor(weights, dtype=torch.float64))] > 0.0


@REPEATABLE
@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=8))
def test_the_borders_of_a_pick_are_the_cumulated_weights(weights: list[float]) -> None:
    total = math.fsum(weights)
    tensor = torch.tensor(weights, dtype=torch.float64)
    begin = 0.0
    for index, weight in enumerate(weights):
        assert index_at((begin + weight / 2) / total, tensor) == index
        begin += weight


def test_a_pick_takes_rows_of_any_float_type() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert index_at(LAST_U, torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=dtype)) == 2
        assert index_at(0.0, torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=dtype)) == 1


@pytest.mark.parametrize("weights", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_weights_without_a_finite_sum_are_refused_rather_than_guessed(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        index_at(0.5, torch.tensor(weights))


def test_keyed_draws_repeat_themselves_and_change_with_epoch_position_and_purpose() -> None:
    weights = torch.ones(1 << 16)
    first = DRAWS.pick(weights, Purpose.TARGET, 5)
    assert KeyedDraws(KEY, Epoch()).pick(weights, Purpose.TARGET, 5) == first
    others = [
        DRAWS.pick(weights, Purpose.REPLACEMENT, 5),
        DRAWS.pick(weights, Purpose.TARGET, 6),
        KeyedDraws(KEY, epoch(1)).pick(weights, Purpose.TARGET, 5),
        KeyedDraws(seed_key(8), Epoch()).pick(weights, Purpose.TARGET, 5),
    ]
    assert len({first, *others}) == 5


def test_keyed_coins_come_up_as_often_as_the_ratio_says() -> None:
    """20,000 coins of ratio .3: within 4.5 standard deviations (false-alarm rate 1e-5)."""
    hits = sum(DRAWS.accept(0.15, 0.5, position) for position in range(20_000))
    assert abs(hits - 6_000) < 4.5 * math.sqrt(20_000 * 0.3 * 0.7)


# --- all rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(Mode.GREEDY, GreedyRule), (Mode.COUPLED, CoupledRule), (Mode.REJECTION, TokenRule), (Mode.BLOCK, BlockRule)],
)
def test_every_mode_has_its_rule(mode: Mode, kind: type) -> None:
    assert isinstance(rule_for(mode, KEY, 2), kind)


def test_the_coupled_rule_uses_the_field_key_and_sample_index() -> None:
    assert rule_for(Mode.COUPLED, KEY, 2) == CoupledRule(derive_key(KEY, Purpose.FIELD), 2)
    with pytest.raises(ValueError, match="key"):
        rule_for(Mode.COUPLED)


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()])
def test_identical_rows_accept_everything_and_draw_nothing(rule: Rule) -> None:
    draft_row = SparseRow((2, 0, 1), (1 << 15, 1 << 14, 1 << 14))
    rows = table([0.25, 0.25, 0.5], [0.25, 0.25, 0.5], [0.25, 0.25, 0.5])
    for round_ in range(300):
        judgement = rule.judge(rows, [2, 1, 0], [draft_row] * 3, 9, KeyedDraws(KEY, epoch(round_)))
        assert judgement == Judgement(3, 3, None)


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()])
def test_a_token_without_target_mass_is_replaced_by_one_with_mass(rule: Rule) -> None:
    rows = table([0.5, 0.0, 0.5], [0.2, 0.3, 0.5])
    for round_ in range(300):
        draws = KeyedDraws(KEY, epoch(round_))
        judgement = rule.judge(rows, [1, 0], [one_hot_row(1), one_hot_row(0)], 4, draws)
        assert judgement.num_accepted == 0
        assert judgement.num_tested == 1
        assert judgement.replacement in (0, 2)


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()])
def test_a_bonus_or_plain_token_is_drawn_from_the_target_row(rule: Rule) -> None:
    """Chi-square over 20,000 draws, false-alarm rate 1e-4; the reversed row is rejected."""
    row = torch.tensor([0.5, 0.0, 0.3, 0.2])
    counts = np.bincount([rule.draw(row, DRAWS, position) for position in range(20_000)], minlength=4)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3]], [10_000, 6_000, 4_000]).pvalue > 1e-4
    assert stats.chisquare(counts[[0, 2, 3]], [4_000, 6_000, 10_000]).pvalue < 1e-4


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()])
@pytest.mark.parametrize("lie", [False, True])
def test_keyed_decoding_has_the_target_law_unless_the_row_is_a_lie(rule: Rule, lie: bool) -> None:
    """Chi-square over 8,000 two-token runs of float32 rows, false-alarm rate 1e-4; the lie about q is rejected."""
    target = table([0.5, 0.2, 0.3], [0.1, 0.6, 0.3], dtype=torch.float32)
    draft_rows = [sparse_row(torch.tensor(row)) for row in ([0.2, 0.6, 0.2], [0.3, 0.3, 0.4])]
    sent = [sparse_row(torch.ones(3) / 3)] * 2 if lie else draft_rows
    draft_key = derive_key(KEY, Purpose.DRAFT)
    counts = np.zeros((3, 3))
    for round_ in range(8_000):
        words = [word64(draft_key, position, epoch(round_)) for position in (0, 1)]
        tokens = [draw_from_counts(row, word) for row, word in zip(draft_rows, words, strict=True)]
        draws = KeyedDraws(KEY, epoch(round_))
        judgement = rule.judge(target, tokens, sent, 0, draws)
        out = tokens[: judgement.num_accepted] + [judgement.replacement] * (judgement.replacement is not None)
        if len(out) < 2:
            out.append(rule.draw(target[1], KeyedDraws(KEY, epoch(round_).next_round()), 10 + round_))
        counts[out[0], out[1]] += 1
    expected = np.outer(target[0].double().numpy(), target[1].double().numpy()).ravel()
    pvalue = stats.chisquare(counts.ravel(), expected / expected.sum() * 8_000).pvalue
    assert pvalue < 1e-4 if lie else pvalue > 1e-4


# --- rejection ------------------------------------------------------------------------------------------------------


def test_a_residual_is_the_part_of_the_target_above_the_draft() -> None:
    draft_row = SparseRow((1, 2), (3 << 14, 1 << 14))
    weights = residual(torch.tensor([0.25, 0.25, 0.5]), draft_row, 1.0)
    assert weights.dtype is torch.float64
    assert weights.tolist() == [0.25, 0.0, 0.25]
    assert residual(torch.tensor([0.25, 0.25, 0.5]), draft_row, 0.5).tolist() == [0.125, 0.0, 0.0]


def test_making_a_residual_leaves_the_row_alone() -> None:
    row = torch.tensor([0.25, 0.75], dtype=torch.float64)
    residual(row, one_hot_row(1), 1.0)
    assert row.tolist() == [0.25, 0.75]


def test_a_draft_probability_is_its_count() -> None:
    assert draft_prob(SparseRow((5, 3), (COUNT_TOTAL - 1, 1)), 3) == 2.0**-16


def test_a_residual_emptied_by_rounding_falls_back_to_the_target() -> None:
    rows = table([0.25 - 1e-9, 0.75 - 1e-9, 0.0])
    draft_row = SparseRow((1, 0), (3 << 14, 1 << 14))

    class Never:
        def accept(self, target_prob: float, draft_prob: float, position: int) -> bool:
            return False

        def pick(self, weights: Tensor, purpose: Purpose, position: int) -> int:
            return DRAWS.pick(weights, purpose, position)

    picked = {TokenRule().judge(rows, [1], [draft_row], base, Never()).replacement for base in range(100)}
    assert picked == {0, 1}


# --- block ----------------------------------------------------------------------------------------------------------


def test_block_thresholds_are_those_of_the_paper() -> None:
    half = SparseRow((0, 1), (1 << 15, 1 << 15))
    rows = table([0.25, 0.75], [0.9, 0.1], [0.5, 0.5])
    survival = survival_probs(rows, [0, 0], [half, half])
    assert survival == [1.0, 0.5, pytest.approx(0.9)]
    # p_1 = 1/2, so (P/2 - Q)+ = (0, 0) for P = (.9, .1): nothing of the prefix may pass by itself.
    assert pass_probs(rows, [half, half], survival) == [0.0, pytest.approx(0.9)]
    sure = survival_probs(rows, [1, 0], [half, half])
    assert sure == [1.0, 1.0, 1.0]
    assert pass_probs(rows, [half, half], sure) == [1.0, 1.0]


def test_a_block_that_agrees_from_there_on_surely_survives() -> None:
    half = SparseRow((0, 1), (1 << 15, 1 << 15))
    rows = table([0.5, 0.5], [0.5, 0.5])
    assert pass_probs(rows, [half, half], [1.0, 1.0, 1.0]) == [1.0, 1.0]


def test_a_block_may_pass_although_a_shorter_prefix_fails() -> None:
    class Script:
        asked: list[int]

        def __init__(self) -> None:
            self.asked = []

        def accept(self, target_prob: float, draft_prob: float, position: int) -> bool:
            self.asked.append(position)
            return position == 11

        def pick(self, weights: Tensor, purpose: Purpose, position: int) -> int:
            return position

    draft_row = SparseRow((0, 1), (1 << 15, 1 << 15))
    script = Script()
    rows = table([0.4, 0.6], [0.4, 0.6], [0.4, 0.6])
    assert BlockRule().judge(rows, [0, 0, 0], [draft_row] * 3, 10, script) == Judgement(2, 3, 12)
    assert script.asked == [12, 11]


@pytest.mark.parametrize("shared", [False, True])
def test_a_coupled_draft_must_not_be_judged_by_the_token_rule_with_the_same_noise(shared: bool) -> None:
    """Chi-square over 8,000 tokens, false-alarm rate 1e-4: fresh noise keeps the law, the field's own breaks it."""
    key = derive_key(KEY, Purpose.FIELD)
    target, draft = table([0.5, 0.2, 0.3]), table([0.25, 0.5, 0.25])[0]

    class FieldDraws(KeyedDraws):
        def pick(self, weights: Tensor, purpose: Purpose, position: int) -> int:
            return coupled_token(weights / weights.sum(), key, 0, position)

    counts = np.zeros(3)
    for position in range(8_000):
        token = coupled_token(draft, key, 0, position)
        draws = FieldDraws(KEY, Epoch()) if shared else DRAWS
        judgement = TokenRule().judge(target, [token], [sparse_row(draft)], position, draws)
        counts[token if judgement.replacement is None else judgement.replacement] += 1
    pvalue = stats.chisquare(counts, target[0].numpy() * 8_000).pvalue
    assert pvalue < 1e-4 if shared else pvalue > 1e-4


# --- greedy and coupled ---------------------------------------------------------------------------------------------


def test_greedy_commits_the_targets_token_at_the_first_disagreement() -> None:
    rows = table([0.0, 3.0, 1.0], [5.0, 5.0, 1.0], [0.0, 0.0, 9.0])
    rule = rule_for(Mode.GREEDY)
    assert rule.judge(rows, [1, 0], (), 3, DRAWS) == Judgement(2, 2, None)
    assert rule.judge(rows, [1, 1], (), 3, DRAWS) == Judgement(1, 2, 0)
    assert rule.judge(rows, [2, 0], (), 3, DRAWS) == Judgement(0, 1, 1)
    assert rule.draw(rows[2], KeyedDraws(b"", Epoch()), 5) == 2


def test_coupled_commits_the_fields_token_whatever_was_proposed() -> None:
    rows = torch.softmax(torch.randn(4, 50, generator=torch.Generator().manual_seed(0)), -1)
    key = derive_key(KEY, Purpose.FIELD)
    own = [coupled_token(rows[i], key, 1, 20 + i) for i in range(4)]
    rule = rule_for(Mode.COUPLED, KEY, 1)
    assert rule.judge(rows, own[:3], (), 20, DRAWS) == Judgement(3, 3, None)
    wrong = (own[1] + 1) % 50
    assert rule.judge(rows, [own[0], wrong, own[2]], (), 20, DRAWS) == Judgement(1, 2, own[1])
    assert rule.draw(rows[3], KeyedDraws(KEY, epoch(9)), 23) == own[3]
