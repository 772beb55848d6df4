"""The block rule: the tokens of one proposal are tested together, which accepts at least as many as the token rule.

With P the target's and Q the draft's distribution at each position, and survival probabilities
p_0 = 1, p_i = min(p_(i-1) * P(x_i) / Q(x_i), 1), a prefix of length i passes with probability

    h_i = Z_i / (Z_i + 1 - p_i)  for i < gamma,  where Z_i is the mass of (p_i P - Q)+ after x_i;   h_gamma = p_gamma.

The *longest* prefix that passes is accepted, and the residual after it is (p_i P - Q)+. One call judges one block,
whose length was fixed before it was drawn; it must be complete. After a block that is accepted whole, the next one
starts with p_0 = 1 again.

Source: Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2.
"""

from collections.abc import Sequence

from torch import Tensor

from outrider.messages import SparseRow
from outrider.noise import Purpose
from outrider.verification.rejection import draft_prob, probs_of, recover, residual
from outrider.verification.rule import Draws, Judgement


class BlockRule:
    """Rejection mode, block by block. Rows are probabilities."""

    def judge(
        self,
        rows: Tensor,
        tokens: Sequence[int],
        draft_rows: Sequence[SparseRow],
        base_len: int,
        draws: Draws,
    ) -> Judgement:
        """Find the longest prefix of one whole block that passes; see `Rule.judge`."""
        survival = survival_probs(rows, tokens, draft_rows)
        thresholds = pass_probs(rows, draft_rows, survival)
        num_accepted = self.longest_pass(thresholds, base_len, draws)
        if num_accepted == len(tokens):
            return Judgement(num_accepted, num_accepted, None)
        replacement = recover(
            rows[num_accepted], draft_rows[num_accepted], survival[num_accepted], draws, base_len + num_accepted
        )
        return Judgement(num_accepted, num_accepted + 1, replacement)

    def longest_pass(self, thresholds: Sequence[float], base_len: int, draws: Draws) -> int:
        """Return the length of the longest prefix that passes, 0 if none does.

        The coins are independent, so tossing them from the last to the first and stopping at the first that passes
        is the same law.
        """
        for length in range(len(thresholds), 0, -1):
            if draws.accept(thresholds[length - 1], 1.0, base_len + length - 1):
                return length
        return 0

    def draw(self, row: Tensor, draws: Draws, position: int) -> int:
        """Draw from the target's row; see `Rule.draw`."""
        return draws.pick(row, Purpose.TARGET, position)


def survival_probs(rows: Tensor, tokens: Sequence[int], draft_rows: Sequence[SparseRow]) -> list[float]:
    """Return p_0 .. p_gamma."""
    survival = [1.0]
    for target, token, draft_row in zip(probs_of(rows, tokens), tokens, draft_rows, strict=True):
        survival.append(min(survival[-1] * target / draft_prob(draft_row, token), 1.0))
    return survival


def pass_probs(rows: Tensor, draft_rows: Sequence[SparseRow], survival: Sequence[float]) -> list[float]:
    """Return h_1 .. h_gamma."""
    passing = []
    for index in range(1, len(draft_rows)):
        mass = float(residual(rows[index], draft_rows[index], survival[index]).sum())
        rest = mass + (1.0 - survival[index])
        # Nothing left over and nothing lost: target and draft agree at the next token, and the prefix surely survives.
        passing.append(mass / rest if rest > 0.0 else 1.0)
    return [*passing, survival[-1]]
