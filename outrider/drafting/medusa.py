"""Heads that guess several tokens at once from one of the target's hidden states.

All heads read the same input, the feature of position t joined with the embedding of the token at t + 1, which is
known by then; head k gives the law of token t + 2 + k. They do not see each other's guesses: their laws are
independent given the input. A residual block of its own tells the heads apart; the rows over the likeliest ids are
shared, as all of them start from the target's head.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as fn


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Sizes of a set of heads."""

    hidden_size: int
    num_medusa_heads: int
    """Tokens guessed from one feature."""
    draft_vocab_size: int
    """How many ids the heads know."""
    rms_eps: float = 1e-5
    embedding_scale: float = 1.0
    """Factor of embeddings before they are joined with features."""


class MedusaHeads(nn.Module):
    """The heads. Rows are positions."""

    draft_ids: Tensor

    def __init__(self, shape: MedusaShape) -> None:
        """Make heads with random weights.

        Args:
            shape: Their sizes.
        """
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.stand_in = nn.Parameter(torch.zeros(hidden))
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(shape.num_medusa_heads))
        self.norm_out = nn.RMSNorm(hidden, eps=shape.rms_eps)
        self.head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        self.register_buffer("draft_ids", torch.zeros(shape.draft_vocab_size, dtype=torch.int32))

    def guesses(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Return what each head would have the target's feature be.

        Args:
            embedded: [..., hidden], of the tokens at t + 1, from the target's embedding.
            features: [..., hidden], of t, or the stand-in.

        Returns:
            [..., num_medusa_heads, hidden].
        """
        joined = self.join(torch.cat([embedded * self.shape.embedding_scale, features], dim=-1))
        outputs = [joined + fn.silu(block(joined)) for block in self.blocks]
        return cast(Tensor, self.norm_out(torch.stack(outputs, dim=-2)))

    def logits(self, guesses: Tensor) -> Tensor:
        """Return laws over `draft_ids`, as logits.

        Args:
            guesses: [..., hidden], from `guesses`.

        Returns:
            [..., draft_vocab_size].
        """
        return cast(Tensor, self.head(guesses))
