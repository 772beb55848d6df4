"""Coupled mode: drafter and target draw with the same noise field, and tokens are committed while they agree.

The committed text is the target's own draw at every position, whatever was proposed: a function of (target, prompt,
parameters, seed). A proposal decides only how many of those draws one pass yields.

Source: Daliri, Musco, Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.messages import SparseRow
from outrider.sampling import coupled_token
from outrider.verification.rule import Draws, Judgement


@dataclass(frozen=True, slots=True)
class CoupledRule:
    """Agreement with the target's draw from the shared field. Rows are probabilities; draws are not used."""

    field_key: bytes
    """`derive_key(seed's key, Purpose.FIELD)`, known to the drafter too."""
    sample_index: int = 0
    """Which of several samples of one prompt."""

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
            own = self.draw(rows[index], draws, base_len + index)
            if own != token:
                return Judgement(index, index + 1, own)
        return Judgement(len(tokens), len(tokens), None)

    def draw(self, row: Tensor, draws: Draws, position: int) -> int:
        """Draw with the field; see `Rule.draw`."""
        return coupled_token(row, self.field_key, self.sample_index, position)
