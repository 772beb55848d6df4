"""The token rule: each draft token is tested by itself, the first rejection draws from the residual.

Exact when each token was drawn from the row that is passed with it, and whether it is tested was decided without
looking at it. A one-hot row is the special case of a token that was not drawn at all: it is accepted with its
target probability.

Source: Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding", algorithm 1;
Chen et al. 2023, "Accelerating large language model decoding with speculative sampling".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.messages import COUNT_TOTAL, SparseRow
from outrider.noise import Purpose
from outrider.verification.rule import Draws, Judgement


class TokenRule:
    """Rejection mode, token by token. Rows are probabilities."""

    def judge(
        self,
        rows: Tensor,
        tokens: Sequence[int],
        draft_rows: Sequence[SparseRow],
        base_len: int,
        draws: Draws,
    ) -> Judgement:
        """Test tokens in order; see `Rule.judge`."""
        target_probs = probs_of(rows, tokens)
        for index, (token, draft_row) in enumerate(zip(tokens, draft_rows, strict=True)):
            if draws.accept(target_probs[index], draft_prob(draft_row, token), base_len + index):
                continue
            replacement = recover(rows[index], draft_row, 1.0, draws, base_len + index)
            return Judgement(index, index + 1, replacement)
        return Judgement(len(tokens), len(tokens), None)

    def draw(self, row: Tensor, draws: Draws, position: int) -> int:
        """Draw from the target's row; see `Rule.draw`."""
        return draws.pick(row, Purpose.TARGET, position)


def probs_of(rows: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return rows[i, tokens[i]] for every i, in one transfer from the rows' device."""
    ids = torch.tensor(tokens, device=rows.device)
    probs: list[float] = rows[: len(tokens)].gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
    return probs


def draft_prob(draft_row: SparseRow, token: int) -> float:
    """Return a token's probability in a draft row, exactly: a multiple of 2**-16."""
    return draft_row.counts[draft_row.token_ids.index(token)] / COUNT_TOTAL


def residual(row: Tensor, draft_row: SparseRow, scale: float) -> Tensor:
    """Return (scale * target - draft) cut off at 0, not normalised.

    Args:
        row: [vocab] target probabilities.
        draft_row: the draft distribution.
        scale: 1 in the token rule; the block rule's survival probability.

    Returns:
        [vocab] float64 weights.
    """
    weights = row.double() * scale
    ids = torch.tensor(draft_row.token_ids, device=row.device)
    counts = torch.tensor(draft_row.counts, dtype=torch.float64, device=row.device)
    weights[ids] = (weights[ids] - counts / COUNT_TOTAL).clamp_(min=0.0)
    return weights


def recover(row: Tensor, draft_row: SparseRow, scale: float, draws: Draws, position: int) -> int:
    """Draw the token that replaces a rejected one from the residual."""
    weights = residual(row, draft_row, scale)
    if not float(weights.sum()) > 0.0:
        # Equal distributions reject nothing, except where a float32 row sums to a little less than 1: then the whole
        # residual is rounding, and the target's own row is the nearest law that has mass only where the target has.
        weights = row.double()
    return draws.pick(weights, Purpose.REPLACEMENT, position)
