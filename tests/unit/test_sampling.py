"""Logits to distributions, and distributions to the rows that are sent."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outrider.errors import InvalidRequest
from outrider.history import History
from outrider.ids import Mode
from outrider.messages import COUNT_TOTAL, SamplingParams, SparseRow
from outrider.noise import Purpose, derive_key, seed_key
from outrider.parameters import validate
from outrider.sampling import (
    MAX_SPARSE_TOKENS,
    SPARSE_MASS,
    UNSOUND,
    coupled_token,
    draw_from_counts,
    greedy_ids,
    greedy_token,
    one_hot_row,
    probabilities,
    processed_logits,
    row_problem,
    sparse_row,
    target_rows,
)

REPEATABLE = settings(deadline=None, database=None, derandomize=True)
PLAIN = SamplingParams()
FIELD_KEY = derive_key(seed_key(3), Purpose.FIELD)


def logits_of(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape) * 3.0, dtype=dtype)


def kept(logits: list[float], params: SamplingParams) -> list[int]:
    row = probabilities(torch.tensor([logits], dtype=torch.float64), params, len(logits))[0]
    return torch.nonzero(row).squeeze(1).tolist()


# --- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("repetition_penalty", value) for value in (0.0, -1.0, 101.0, math.nan, math.inf)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, math.nan, -math.inf)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, math.nan)],
        *[("temperature", value) for value in (-0.1, 100.5, math.nan, math.inf)],
        ("top_k", -1),
        *[("top_p", value) for value in (0.0, 1.1, -0.5, math.nan)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        ("logit_bias", ((10, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((2**31, 1.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, math.inf),)),
        ("logit_bias", ((1, -math.inf),)),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((token, -100.0) for token in range(10))),
    ],
)
def test_a_bad_parameter_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match="expected") as caught:
        validate(replace(PLAIN, **{field: value}), 10)  # type: ignore[arg-type]
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        SamplingParams((), 0.01, -2.0, -2.0, 0.0, 0, 1e-9, 0.0),
        SamplingParams(((0, -100.0), (9, 100.0)), 100.0, 2.0, 2.0, 100.0, 10**9, 1.0, 1.0),
        SamplingParams(tuple((token, -500.0) for token in range(9))),
    ],
)
def test_parameters_at_their_borders_are_taken_and_have_a_distribution(params: SamplingParams) -> None:
    validate(params, 10)
    row = probabilities(logits_of(1, 1, 10, dtype=torch.float32), params, 10, History([1, 2], [2]))[0]
    assert torch.isfinite(row).all()
    assert float(row.sum()) == pytest.approx(1.0, abs=1e-5)


# --- history --------------------------------------------------------------------------------------------------------


@REPEATABLE
@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_a_history_after_a_run_is_what_advancing_would_make_of_it_and_changes_nothing(
    prompt: list[int], out: list[int], run: list[int]
) -> None:
    history = History(prompt, out)
    before, later = copy.deepcopy(history.seen), history.after(run).seen
    assert history.seen == before
    history.advance(run)
    assert history.seen == later
    assert dict(zip(*later, strict=True)) == {token: (out + run).count(token) for token in {*prompt, *out, *run}}


# --- logits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    "params", [PLAIN, SamplingParams(top_k=4), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)]
)
def test_padding_is_cut_off_however_large_its_logits(mode: Mode, params: SamplingParams) -> None:
    logits = logits_of(2, 3, 8)
    padded = torch.cat([logits, torch.full((3, 5), 1e9, dtype=torch.float64)], dim=1)
    assert torch.equal(target_rows(padded, mode, params, 8), target_rows(logits, mode, params, 8))


@pytest.mark.parametrize(
    ("given_dtype", "result"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_half_precision_is_widened_and_double_kept(given_dtype: torch.dtype, result: torch.dtype) -> None:
    assert probabilities(logits_of(3, 2, 8).to(given_dtype), PLAIN, 8).dtype is result


def test_parameters_are_applied_in_the_order_of_their_fields() -> None:
    params = SamplingParams(((0, 1.0), (1, -3.0)), 2.0, 0.5, 0.25, 0.5)
    row = processed_logits(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), params, 4, History([0, 1], [1, 1, 2]))[0]
    expected = [
        (1.0 + 1.0) / 2.0,  # in the prompt only: the bias first, then the repetition penalty
        (2.0 - 3.0) * 2.0 - 0.5 - 2 * 0.25,  # the bias made it negative: multiplied
        3.0 / 2.0 - 0.5 - 0.25,
        4.0,
    ]
    assert row.tolist() == pytest.approx([value / 0.5 for value in expected])


def test_row_i_counts_the_i_drafts_before_it() -> None:
    logits = logits_of(4, 4, 6)
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.3)
    rows = processed_logits(logits, params, 6, History([0], [3]), [3, 5, 3])
    for i, run in enumerate(([], [3], [3, 5], [3, 5, 3])):
        alone = processed_logits(logits[i : i + 1], params, 6, History([0], [3, *run]))
        assert torch.equal(rows[i], alone[0])


def test_penalties_without_a_history_are_an_error() -> None:
    with pytest.raises(ValueError, match="history"):
        processed_logits(logits_of(1, 1, 4), SamplingParams(presence_penalty=1.0), 4)


def test_the_models_logits_are_left_alone() -> None:
    logits = logits_of(5, 2, 6)
    before = logits.clone()
    params = SamplingParams(((1, 2.0),), 1.5, 0.5, 0.5, 0.7, 3, 0.8, 0.1)
    processed_logits(logits, params, 6, History([1], [2]), [3])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6, 1.0, 2.0])
@pytest.mark.parametrize("bias", [-100.0, -1000.0])
def test_a_banned_token_has_no_mass_at_any_temperature(mode: Mode, temperature: float, bias: float) -> None:
    params = SamplingParams(((2, bias),), temperature=temperature, repetition_penalty=1.2, presence_penalty=-2.0)
    logits = torch.tensor([[0.0, 1.0, 300.0, 2.0]])
    row = target_rows(logits, mode, params, 4, History([2], [2]))[0]
    assert row[2] == (-math.inf if mode is Mode.GREEDY else 0.0)
    assert not torch.isnan(row).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6, 1e-3])
def test_a_tiny_temperature_gives_a_distribution_on_the_likeliest(temperature: float, dtype: torch.dtype) -> None:
    row = probabilities(
        torch.tensor([[-70.0, 1.0, 90.0, 89.0]], dtype=dtype), SamplingParams(temperature=temperature), 4
    )
    assert row[0].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_temperature_zero_has_all_mass_on_the_lowest_of_equal_maxima() -> None:
    row = probabilities(torch.tensor([[1.0, 5.0, 5.0]]), SamplingParams(temperature=0.0, top_k=2), 3)
    assert row.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("num_equal", [2, 50, 40_000])
def test_greedy_ties_go_to_the_lowest_id(num_equal: int) -> None:
    row = torch.zeros(49_152)
    row[torch.randperm(49_152, generator=torch.Generator().manual_seed(1))[:num_equal]] = 1.0
    assert greedy_token(row) == int(torch.nonzero(row)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=40),
        SamplingParams(top_p=0.95),
        SamplingParams(temperature=1.5, top_k=500, top_p=0.9, min_p=0.01),
    ],
)
def test_a_row_does_not_depend_on_the_rows_beside_it(params: SamplingParams, dtype: torch.dtype) -> None:
    logits = logits_of(6, 9, 5_003, dtype=dtype)
    rows = probabilities(logits, params, 5_000)
    for i in range(9):
        assert torch.equal(rows[i], probabilities(logits[i : i + 1], params, 5_000)[0])
        assert torch.equal(rows[i], probabilities(logits[i:], params, 5_000)[0])


# --- filters --------------------------------------------------------------------------------------------------------


def test_top_k_keeps_the_k_likeliest_and_the_lowest_ids_of_a_tie() -> None:
    assert kept([0.0, 3.0, 1.0, 2.0], SamplingParams(top_k=2)) == [1, 3]
    assert kept([1.0, 0.0, 1.0, 1.0], SamplingParams(top_k=2)) == [0, 2]
    assert kept([1.0, 0.0], SamplingParams(top_k=5)) == [0, 1]


def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert kept(logits, SamplingParams(top_p=0.45)) == [1]
    assert kept(logits, SamplingParams(top_p=0.6)) == [1, 3]
    assert kept(logits, SamplingParams(top_p=0.8)) == [1, 2, 3]
    assert kept(logits, SamplingParams(top_p=1e-9)) == [1]
    assert kept([0.0] * 4, SamplingParams(top_p=0.5)) == [0, 1]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert kept(logits, SamplingParams(top_p=0.6)) == [1, 3]
    assert kept(logits, SamplingParams(top_k=2, top_p=0.55)) == [1]


def test_min_p_compares_with_the_likeliest() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert kept(logits, SamplingParams(min_p=0.5)) == [0, 1]
    assert kept(logits, SamplingParams(min_p=1.0)) == [0]
    assert kept(logits, SamplingParams(min_p=0.2, top_p=0.7)) == [0, 1]


def reference_filter(logits: list[float], params: SamplingParams) -> list[int]:
    """Sort everything, then apply the definitions one after the other."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: params.top_k] if params.top_k else order
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    if params.top_p < 1.0:
        goal, mass = params.top_p * math.fsum(weights), np.cumsum(weights)
        order = order[: int(np.argmax(mass >= goal * (1 - 1e-15))) + 1]
    return sorted(i for i in order if math.exp(logits[i] - logits[order[0]]) >= params.min_p)


@REPEATABLE
@given(
    st.lists(st.sampled_from([-5.0, -1.0, 0.0, 0.5, 1.0, 1.7, 4.0]), min_size=1, max_size=40),
    st.integers(0, 12),
    st.sampled_from([0.013, 0.31, 0.57, 0.871, 0.99, 1.0]),
    st.sampled_from([0.0, 0.11, 0.57, 1.0]),
)
def test_filters_equal_their_definition(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept(logits, params) == reference_filter(logits, params)


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.9999])
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(spread: float, top_p: float) -> None:
    row = torch.tensor(np.random.default_rng(8).normal(size=20_000).round(2) * spread)
    weights, ids = torch.sort(torch.exp(row - row.max()), descending=True, stable=True)
    num = int((torch.cumsum(weights, 0) < top_p * weights.sum()).sum()) + 1
    assert kept(row.tolist(), SamplingParams(top_p=top_p)) == sorted(ids[:num].tolist())


# --- rows on the wire -----------------------------------------------------------------------------------------------

rows_of_weights = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-12, 1.0), st.sampled_from([0.25, 1e-30])), min_size=1, max_size=300
).filter(lambda weights: sum(weights) > 1e-20)


@REPEATABLE
@given(rows_of_weights)
def test_a_sparse_row_is_a_valid_distribution_on_the_likeliest_tokens(weights: list[float]) -> None:
    probs = torch.tensor(weights, dtype=torch.float64) / math.fsum(weights)
    row = sparse_row(probs)
    assert row_problem(row, row.token_ids[-1], len(weights)) == ""
    values = probs[list(row.token_ids)]
    assert (values > 0).all()
    left_out = probs.clone()
    left_out[list(row.token_ids)] = 0.0
    assert float(left_out.max()) <= float(values.min())
    num = len(row.token_ids)
    assert float(values.sum()) > SPARSE_MASS - 1e-9 or num == MAX_SPARSE_TOKENS
    assert num == 1 or float(values[:-1].sum()) < SPARSE_MASS
    assert row == sparse_row(probs)


@REPEATABLE
@given(rows_of_weights)
def test_rounding_moves_less_than_one_count_unless_a_count_would_vanish(weights: list[float]) -> None:
    probs = torch.tensor(weights, dtype=torch.float64)
    row = sparse_row(probs / probs.sum())
    values = probs[list(row.token_ids)].numpy()
    ideal = values / values.sum() * COUNT_TOTAL
    raised = int((ideal < 1.0).sum())
    error = np.abs(np.array(row.counts) - ideal)
    assert error[1:].max(initial=0.0) <= 1.0 + 1e-9
    assert error[0] <= 1.0 + raised + 1e-9


def test_a_flat_row_keeps_128_tokens_of_the_lowest_ids() -> None:
    row = sparse_row(torch.full((1000,), 0.001))
    assert row == SparseRow(tuple(range(128)), (512,) * 128)


def test_a_nearly_certain_row_pays_for_its_unlikely_tokens_from_the_first() -> None:
    probs = torch.full((400,), 1e-9, dtype=torch.float64)
    probs[7] = 0.99
    probs[8:30] = 0.01 / 22
    row = sparse_row(probs)
    assert row.token_ids[0] == 7
    assert sum(row.counts) == COUNT_TOTAL
    tiny = sparse_row(torch.tensor([0.9949999, *[1e-7] * 60], dtype=torch.float64))
    assert tiny.counts[1:] == (1,) * (len(tiny.counts) - 1)
    assert tiny.counts[0] == COUNT_TOTAL - len(tiny.counts) + 1


def test_a_one_hot_row_always_draws_its_token() -> None:
    row = one_hot_row(9)
    assert row_problem(row, 9, 10) == ""
    assert {draw_from_counts(row, word) for word in (0, 2**63, 2**64 - 1)} == {9}


def test_words_draw_every_token_exactly_as_often_as_its_count_says() -> None:
    row = sparse_row(torch.softmax(logits_of(11, 1, 30)[0], 0))
    drawn = [draw_from_counts(row, slot << 48 | 12345) for slot in range(COUNT_TOTAL)]
    assert [drawn.count(token) for token in row.token_ids] == list(row.counts)


@pytest.mark.parametrize(
    ("row", "token", "problem"),
    [
        (SparseRow((), ()), 1, "0 ids"),
        (SparseRow((1, 2), (COUNT_TOTAL,)), 1, "equally many"),
        (SparseRow(tuple(range(129)), (1,) * 129), 1, "129 ids"),
        (SparseRow((1, 1), (1 << 15, 1 << 15)), 1, "distinct"),
        (SparseRow((-1,), (COUNT_TOTAL,)), 1, "0 .. 9"),
        (SparseRow((10,), (COUNT_TOTAL,)), 1, "0 .. 9"),
        (SparseRow((1, 2), (COUNT_TOTAL, 0)), 1, "positive"),
        (SparseRow((1, 2), (1, 2)), 1, "sum"),
        (SparseRow((1,), (COUNT_TOTAL,)), 2, "no mass"),
    ],
)
def test_a_row_that_cannot_be_right_is_named(row: SparseRow, token: int, problem: str) -> None:
    assert problem in row_problem(row, token, 10)


# --- coupled draws --------------------------------------------------------------------------------------------------


def test_coupled_tokens_have_the_law_of_the_row_and_only_its_support() -> None:
    """Chi-square over 20,000 positions, false-alarm rate 1e-4; a row changed by .02 is rejected."""
    probs = torch.tensor([0.3, 0.0, 0.2, 0.05, 0.45, 0.0], dtype=torch.float64)
    counts = np.bincount([coupled_token(probs, FIELD_KEY, 0, i) for i in range(20_000)], minlength=6)
    assert counts[1] == counts[5] == 0
    support = np.array([0, 2, 3, 4])
    expected = probs.numpy()[support] * 20_000
    assert stats.chisquare(counts[support], expected).pvalue > 1e-4
    assert stats.chisquare(counts[support], expected + np.array([400, -400, 0, 0])).pvalue < 1e-4


def test_coupled_draws_of_two_rows_agree_as_often_as_their_overlap_allows() -> None:
    """20,000 positions: the frequency lies within 4.5 standard errors (false-alarm rate 1e-5) of the known bounds."""
    one = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    two = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    agree = np.mean([coupled_token(one, FIELD_KEY, 0, i) == coupled_token(two, FIELD_KEY, 0, i) for i in range(20_000)])
    distance = float((one - two).abs().sum()) / 2
    slack = 4.5 * 0.5 / math.sqrt(20_000)
    assert (1 - distance) / (1 + distance) - slack <= agree <= 1 - distance + slack


def test_a_filtered_row_draws_as_the_same_row_of_a_shorter_vocabulary() -> None:
    long = torch.zeros(5_000, dtype=torch.float64)
    long[:4] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    for i in range(200):
        assert coupled_token(long, FIELD_KEY, 1, i) == coupled_token(long[:4], FIELD_KEY, 1, i)


@pytest.mark.parametrize("values", [[1.0, math.nan, 2.0], [-math.inf, -math.inf], [0.0, math.inf]])
def test_a_row_that_no_sound_model_gives_is_refused_in_greedy_mode(values: list[float]) -> None:
    with pytest.raises(ValueError, match="largest value"):
        greedy_token(torch.tensor(values))


@pytest.mark.parametrize(("values", "words"), [([0.5, math.nan], "largest value"), ([0.0, 0.0], "without mass")])
def test_a_row_that_no_sound_model_gives_is_refused_in_coupled_mode(values: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        coupled_token(torch.tensor(values), bytes(16), 0, 0)


def test_the_likeliest_ids_of_many_rows_are_those_of_each() -> None:
    bad = [float("nan"), float("inf")]
    logits = torch.tensor(
        [[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [1.0, bad[0], 5.0, 0.0], [1.0, bad[1], 5.0, 0.0]]
    )
    assert greedy_ids(logits).tolist() == [1, 0, UNSOUND, UNSOUND]
    assert [greedy_token(row) for row in logits[:2]] == [1, 0]
    assert greedy_ids(torch.full((1, 3), -torch.inf)).tolist() == [UNSOUND]
