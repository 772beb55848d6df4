"""From logits to the distribution that is sampled from, and from a draft distribution to the row that is sent.

Decides what `SamplingParams` mean: one order of operations (`docs/parameters.md`), ties at every border resolved
towards the lowest token id, ids at or past the vocabulary's length (padding) cut off first. Target and drafters use
the same code, so their distributions differ by their models only.

Invariants: a row depends on its own logits, the parameters and the tokens before it, never on the rows beside it; a
banned or filtered token has probability exactly 0; a sparse row is the very distribution its token is drawn from.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.history import GrammarState, History
from outrider.ids import Mode
from outrider.messages import COUNT_TOTAL, SamplingParams, SparseRow
from outrider.noise import gumbel_field_at
from outrider.parameters import BAN_BIAS

MAX_SPARSE_TOKENS = 128
"""Most tokens of a row on the wire."""
SPARSE_MASS = 0.995
"""A row on the wire keeps the fewest tokens that reach this mass."""

UNSOUND = -1
"""In place of a likeliest id: the row's largest value is not finite, so it is no output of a sound model."""

_MIN_TEMPERATURE = 1e-30
"""Keeps logits / temperature finite in float32; far below it only ties of the largest logit have any mass."""
_SORT_SHARE = 8
"""Selecting more than this share of a row costs more than sorting all of it."""
_FIRST_PREFIX = 256
"""Tokens looked at first for top-p; nearly always enough, and ten times cheaper than sorting a vocabulary of 49,152."""


def processed_logits(
    logits: Tensor, params: SamplingParams, vocab_len: int, history: History | None = None, run: Sequence[int] = ()
) -> Tensor:
    """Apply bans, bias, penalties, temperature and filters.

    Args:
        logits: [num_rows, >= vocab_len] floats of consecutive positions; half precision is widened to float32.
        params: validated parameters. At temperature 0 neither temperature nor filters change the likeliest token,
            so both are left out.
        vocab_len: length of the tokenizer's id range; later ids are padding.
        history: the tokens before the first row; needed where `params.uses_history`.
        run: the tokens fed between the rows: row i comes after run[:i]. May be longer than needed.

    Returns:
        [num_rows, vocab_len] logits of the distribution, -inf where it has no mass. May share memory with `logits`
        where nothing had to be changed.

    Raises:
        ValueError: the parameters need a history and none is given.
    """
    rows = logits[:, :vocab_len]
    if rows.dtype not in (torch.float32, torch.float64):
        rows = rows.float()
    if params.allowed_token_ids:
        rows = _only(rows, params.allowed_token_ids)
    if params.logit_bias:
        rows = _biased(rows, params.logit_bias)
    if params.uses_history:
        if history is None:
            raise ValueError("these parameters need the history of the session")
        rows = _told_by(history, rows, params, run)
    if params.temperature == 0.0:
        return rows
    if params.temperature != 1.0:
        rows = rows / max(params.temperature, _MIN_TEMPERATURE)
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return rows
    return torch.stack([_filtered(row, params) for row in rows]) if len(rows) else rows


def probabilities(
    logits: Tensor, params: SamplingParams, vocab_len: int, history: History | None = None, run: Sequence[int] = ()
) -> Tensor:
    """Return the distributions that tokens are drawn from.

    Args and errors are those of `processed_logits`.

    Returns:
        [num_rows, vocab_len] probabilities, float64 for float64 logits, else float32. At temperature 0 all mass is
        on the likeliest token.
    """
    rows = processed_logits(logits, params, vocab_len, history, run)
    if params.temperature > 0.0:
        return torch.softmax(rows, dim=-1)
    one_hot = torch.zeros_like(rows)
    for index, row in enumerate(rows):
        one_hot[index, greedy_token(row)] = 1.0
    return one_hot


def target_rows(
    logits: Tensor,
    mode: Mode,
    params: SamplingParams,
    vocab_len: int,
    history: History | None = None,
    run: Sequence[int] = (),
) -> Tensor:
    """Return the rows that the verification rule of `mode` works on.

    Greedy mode compares processed logits, which spares the softmax; every other mode takes probabilities.

    Returns:
        [num_rows, vocab_len] processed logits or probabilities.
    """
    prepare = processed_logits if mode is Mode.GREEDY else probabilities
    return prepare(logits, params, vocab_len, history, run)


def greedy_token(row: Tensor) -> int:
    """Return the id of the largest value of a row [vocab]; the lowest id where several are equal.

    Raises:
        ValueError: the largest value is not a finite number: the row is no output of a sound model.
    """
    values = _as_numpy(row)
    # NumPy promises the first of equal maxima, torch does not; among NaNs it finds the first of them.
    return _finite(values, int(values.argmax()))


def greedy_ids(logits: Tensor) -> Tensor:
    """Return the id of the largest value of each row, the lowest where several are equal.

    Args:
        logits: [rows, vocab] on any device, on which the result is too.

    Returns:
        [rows] int64; `UNSOUND` for a row whose largest value is not finite.
    """
    # On a CPU argmax keeps the first; on a GPU it need not, so the lowest is asked for.
    if logits.device.type == "cpu":
        best = logits.argmax(-1)
        largest = logits.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    else:
        largest = logits.amax(-1)
        ids = torch.arange(logits.shape[1], device=logits.device)
        best = torch.where(logits == largest.unsqueeze(-1), ids, logits.shape[1]).amin(-1)
    return torch.where(largest.isfinite(), best, UNSOUND)


def coupled_token(
    row: Tensor, key: bytes, sample_index: int, position: int, token_ids: npt.NDArray[np.int64] | None = None
) -> int:
    """Draw a token with the shared noise field: argmax of ln p + G over the support of p.

    Args:
        row: [vocab] probabilities.
        key: the field's key.
        sample_index: which of several samples of one prompt.
        position: absolute position of the token.
        token_ids: [vocab] ids that the row's probabilities are of, rising; None: 0, 1, 2 and so on.

    Returns:
        A token with probability > 0, distributed as `row` over random keys, and the same for equal arguments.

    Raises:
        ValueError: the row has no mass, or holds something that is not a finite number.

    Source: Daliri, Musco, Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding".
    """
    probs = _as_numpy(row)
    support = np.flatnonzero(probs)
    ids = support if token_ids is None else token_ids[support]
    scores = np.log(probs[support].astype(np.float64))
    scores += gumbel_field_at(key, sample_index, position, ids)
    if not support.size:
        raise ValueError("a row without mass")
    return int(ids[_finite(scores, int(scores.argmax()))])


def sparse_row(row: Tensor) -> SparseRow:
    """Round a draft distribution to the row that is sent and drawn from.

    Keeps the fewest likeliest tokens that reach `SPARSE_MASS`, at most `MAX_SPARSE_TOKENS`, and rounds their
    renormalised probabilities to positive integers by largest remainder.

    Args:
        row: [vocab] probabilities, at least one of them positive.

    Returns:
        The likeliest first; tokens of probability 0 never appear.
    """
    ids = likeliest(row, min(MAX_SPARSE_TOKENS, len(row)))
    probs = _as_numpy(row[ids]).astype(np.float64)
    mass = np.cumsum(probs)
    num = int(np.searchsorted(mass, SPARSE_MASS * float(row.sum(dtype=torch.float64)))) + 1
    num = min(num, int(np.count_nonzero(probs)))
    return SparseRow(tuple(ids[:num].tolist()), tuple(_rounded_counts(probs[:num]).tolist()))


def one_hot_row(token: int) -> SparseRow:
    """Return the row of a token that was proposed without drawing it."""
    return SparseRow((token,), (COUNT_TOTAL,))


def draw_from_counts(row: SparseRow, word: int) -> int:
    """Draw a token by integer arithmetic: over uniform 64-bit words its probability is exactly count / 2**16.

    Args:
        row: the row that is sent with the token.
        word: a 64-bit word, from `noise.word64`.

    Returns:
        A token id of the row.
    """
    slot = word >> 48
    return next(token for token, end in zip(row.token_ids, accumulate(row.counts), strict=True) if slot < end)


def row_problem(row: SparseRow, token: int, vocab_len: int) -> str:
    """Say why a received row cannot be the one its token was drawn from; an empty string if it can.

    Args:
        row: as received, unchecked.
        token: the token proposed with it.
        vocab_len: length of the tokenizer's id range.
    """
    ids, counts = row.token_ids, row.counts
    if not 1 <= len(ids) <= MAX_SPARSE_TOKENS or len(ids) != len(counts):
        return f"{len(ids)} ids and {len(counts)} counts: must be equally many, 1 .. {MAX_SPARSE_TOKENS}"
    if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= vocab_len:
        return f"ids must be distinct and in 0 .. {vocab_len - 1}"
    if min(counts) < 1 or sum(counts) != COUNT_TOTAL:
        return f"counts must be positive and sum to {COUNT_TOTAL}, not {sum(counts)}"
    return "" if token in ids else f"token {token} has no mass in its row"


def _only(rows: Tensor, allowed: Sequence[int]) -> Tensor:
    """Ban all tokens but these in a copy of the rows."""
    ids = torch.tensor(allowed, device=rows.device)
    return torch.full_like(rows, -torch.inf).index_copy_(1, ids, rows[:, ids])


def _biased(rows: Tensor, logit_bias: Sequence[tuple[int, float]]) -> Tensor:
    """Add biases in a copy of the rows."""
    rows = rows.clone()
    ids = torch.tensor([token for token, _ in logit_bias], device=rows.device)
    bias = torch.tensor([value for _, value in logit_bias], dtype=rows.dtype, device=rows.device)
    rows[:, ids] += bias.masked_fill(bias <= BAN_BIAS, -torch.inf)
    return rows


def _told_by(history: History, rows: Tensor, params: SamplingParams, run: Sequence[int]) -> Tensor:
    """Apply what depends on earlier tokens, in a copy of the rows; row i also knows run[:i]."""
    rows, later = rows.clone(), history
    for index, row in enumerate(rows):
        if index:
            later = history.after(()) if index == 1 else later
            later.advance(run[index - 1 : index])
        if params.uses_penalties:
            _penalise(row, params, later)
        if later.num_output < params.min_tokens:
            row[torch.tensor(params.end_token_ids, dtype=torch.int64, device=row.device)] = -torch.inf
        if later.grammar is not None:
            _confine(row, later.grammar)
    return rows


def _penalise(row: Tensor, params: SamplingParams, history: History) -> None:
    """Apply penalties in place."""
    seen, counts = history.seen
    ids = torch.tensor(seen, dtype=torch.int64, device=row.device)
    occurrences = torch.tensor(counts, dtype=row.dtype, device=row.device)
    values = row[ids]
    factor = params.repetition_penalty
    values = torch.where(values > 0, values / factor, values * factor)
    values -= params.presence_penalty * (occurrences > 0) + params.frequency_penalty * occurrences
    row[ids] = values


def _confine(row: Tensor, grammar: GrammarState) -> None:
    """Ban in place what the grammar forbids.

    A row that would be left without mass stays as it is: every row has to be a law, also one behind a draft that will
    be rejected, or of a draft model that knows no token the grammar allows. What is drawn from it breaks the grammar,
    which the verifier refuses to commit (`History.grammar.is_broken`).
    """
    allowed = grammar.allowed()
    if allowed is None:
        return
    confined = row.masked_fill(~torch.from_numpy(allowed).to(row.device), -torch.inf)
    if confined.max() > -torch.inf:
        row.copy_(confined)


def _filtered(row: Tensor, params: SamplingParams) -> Tensor:
    """Return the row [vocab] with -inf for tokens that top-k, top-p or min-p removes."""
    weights = torch.exp(row - row.max())
    kept = row
    if 0 < params.top_k < len(row):
        ids = likeliest(row, params.top_k)
        kept = torch.full_like(row, -torch.inf).index_copy_(0, ids, row[ids])
    if params.top_p < 1.0:
        ids = _nucleus(kept, torch.exp(kept - kept.max()), params.top_p)
        kept = torch.full_like(row, -torch.inf).index_copy_(0, ids, row[ids])
    return kept.masked_fill(weights < params.min_p, -torch.inf)


def _nucleus(row: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """Return the fewest likeliest ids whose weights reach the fraction `top_p` of all weights."""
    goal = top_p * float(weights.sum(dtype=torch.float64))
    num = min(_FIRST_PREFIX, len(row))
    while True:
        ids = likeliest(row, num)
        mass = np.cumsum(_as_numpy(weights[ids]).astype(np.float64))
        if mass[-1] >= goal or num == len(row):
            return ids[: int(np.searchsorted(mass, goal)) + 1]
        num = min(num * 16, len(row))


def likeliest(row: Tensor, num: int) -> Tensor:
    """Return the ids of the `num` largest values (1 <= num <= len), largest first, equal values by lowest id."""
    if num * _SORT_SHARE > len(row):
        return torch.sort(row, descending=True, stable=True).indices[:num]
    border = torch.topk(row, num).values[-1]
    candidates = torch.nonzero(row >= border).squeeze(1)
    order = torch.sort(row[candidates], descending=True, stable=True).indices
    return candidates[order[:num]]


def _rounded_counts(probs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Round positive weights, likeliest first, at most 128, to positive integers that sum to `COUNT_TOTAL`."""
    ideal = probs * (COUNT_TOTAL / probs.sum())
    counts: npt.NDArray[np.int64] = np.maximum(np.floor(ideal), 1.0).astype(np.int64)
    missing = COUNT_TOTAL - int(counts.sum())
    if missing > 0:
        counts[np.argsort(counts - ideal, kind="stable")[:missing]] += 1
    else:
        # Raising tiny weights to 1 overdrew by less than 128; the first count is at least 2**16 / 128 = 512.
        counts[0] += missing
    return counts


def _finite(values: npt.NDArray[np.floating[Any]], best: int) -> int:
    """Return the index of the largest value if that is a finite number."""
    if not np.isfinite(values[best]):
        raise ValueError(f"the largest value of a row is {values[best]}")
    return best


def _as_numpy(row: Tensor) -> npt.NDArray[np.floating[Any]]:
    """View a row on the host; values are unchanged."""
    array: npt.NDArray[np.floating[Any]] = row.detach().cpu().numpy()
    return array
