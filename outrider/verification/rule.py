"""What a verification rule is: the small interfaces that every rule, its callers and the tests share.

A rule decides which tokens of a run are accepted and what replaces the first one that is not. It never sees a
model, a message or a clock. All of its randomness comes from a `Draws`, so that a test can run the real code
through every possible outcome.

Rows are what `sampling.target_rows` returns for the rule's mode: row i is the target's distribution for tokens[i],
given the tokens before it. A rule needs one row per token and ignores any row after them (the held row, from which
`draw` makes the bonus).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from outrider.ids import Epoch
from outrider.messages import SparseRow
from outrider.noise import Purpose, derive_key, uniform


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a run."""

    num_accepted: int
    """Tokens that are committed as they are, from the start of the run."""
    num_tested: int
    """num_accepted, plus the rejected token if there is one."""
    replacement: int | None
    """The target's own token in place of the first rejected one; None where every token was accepted."""


class Draws(Protocol):
    """Where a rule's randomness comes from. Nothing here blocks; equal calls need not give equal answers."""

    def accept(self, target_prob: float, draft_prob: float, position: int) -> bool:
        """Toss a fresh coin: yes with probability min(1, target_prob / draft_prob), never if target_prob is 0."""
        ...

    def pick(self, weights: Tensor, purpose: Purpose, position: int) -> int:
        """Draw an index with probability weights / sum(weights); the weights [vocab] are >= 0, with a positive sum."""
        ...


class Rule(Protocol):
    """One way to verify."""

    def judge(
        self,
        rows: Tensor,
        tokens: Sequence[int],
        draft_rows: Sequence[SparseRow],
        base_len: int,
        draws: Draws,
    ) -> Judgement:
        """Test a run of draft tokens.

        Args:
            rows: [>= len(tokens), vocab], from `sampling.target_rows`.
            tokens: at least one; all in the vocabulary.
            draft_rows: the row each token was drawn from (`sampling.row_problem` found none); ignored where the
                mode needs no rows.
            base_len: absolute position of tokens[0].
            draws: the session's randomness.
        """
        ...

    def draw(self, row: Tensor, draws: Draws, position: int) -> int:
        """Draw a token of the target's own, plain or bonus, at an absolute position from its row [vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class KeyedDraws:
    """The draws of one session in one epoch, keyed and counted by (position, epoch): repeating one gives the same."""

    session_key: bytes
    """Of `noise.KEY_BYTES` bytes; may be empty where the rule never draws (greedy mode)."""
    epoch: Epoch
    """The chain that is being judged."""

    def accept(self, target_prob: float, draft_prob: float, position: int) -> bool:
        """Toss the coin of this position and epoch."""
        return passes(self._uniform(Purpose.COIN, position), target_prob, draft_prob)

    def pick(self, weights: Tensor, purpose: Purpose, position: int) -> int:
        """Draw an index from the stream of `purpose`."""
        return index_at(self._uniform(purpose, position), weights)

    def _uniform(self, purpose: Purpose, position: int) -> float:
        return uniform(derive_key(self.session_key, purpose), position, self.epoch)


def passes(u: float, target_prob: float, draft_prob: float) -> bool:
    """Say whether a coin u in [0, 1) accepts; strictly, so that u = 0 accepts no token that the target never says."""
    return u * draft_prob < target_prob


def index_at(u: float, weights: Tensor) -> int:
    """Return the index in which the fraction u in [0, 1) of all weight falls; never one of weight 0.

    Args:
        u: how far along the cumulated weights.
        weights: [vocab], >= 0, with a positive sum.

    Raises:
        ValueError: the sum is 0 or not finite, as when a model returned NaN; any index would be made up.
    """
    # On the host, because a parallel prefix sum of floats need not rise monotonically.
    ends = np.cumsum(weights.detach().cpu().double().numpy())
    if not 0.0 < ends[-1] < np.inf:
        raise ValueError(f"nothing to draw from: the weights sum to {ends[-1]}")
    return int(np.searchsorted(ends, u * ends[-1], side="right"))
