"""Greedy mode: tokens are committed while they are the target's likeliest, ties going to the lowest id.

It is coupled mode without noise, and works on logits, so that no softmax is needed or could disturb a tie.
"""

from collections.abc import Sequence

from torch import Tensor

from outrider.messages import SparseRow
from outrider.sampling import greedy_token
from outrider.verification.rule import Draws, Judgement


class GreedyRule:
    """Agreement with the target's likeliest token. Rows are processed logits; draws are not used."""

    def judge(
        self,
        rows: Tensor,
        tokens: Sequence[int],
        draft_rows: Sequence[SparseRow],
        base_len: int,
        draws: Draws,
    ) -> Judgement:
        """Compare tokens in order; see `Rule.judge`."""
        for index, token in enumerate(tokens):
            own = greedy_token(rows[index])
            if own != token:
                return Judgement(index, index + 1, own)
        return Judgement(len(tokens), len(tokens), None)

    def draw(self, row: Tensor, draws: Draws, position: int) -> int:
        """Return the likeliest token; see `Rule.draw`."""
        return greedy_token(row)
