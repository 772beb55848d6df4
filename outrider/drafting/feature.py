"""A draft that continues the target's own hidden states: one decoder layer over token and feature.

A *feature* is the target's last hidden state after its final norm, the tensor its head reads. The input at position t
joins the embedding of token t + 1 with the feature of position t; the output is a guess of the feature of t + 1, and a
head over the likeliest ids turns it into the law of token t + 2. A chain feeds its own guess where the target's feature
is not known yet; a learned stand-in takes the place of a feature that nobody can supply.

The head reads the guess itself, without a norm of its own: the target's head reads true features the same way, so that
its rows are a good start.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as fn


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """Sizes of a feature draft; those of the target wherever the target has them."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    draft_vocab_size: int
    """How many ids the head knows."""
    rms_eps: float = 1e-5
    rope_theta: float = 10_000.0
    embedding_scale: float = 1.0
    """Factor of embeddings before they are joined with features, which are several times larger."""


class FeatureDraft(nn.Module):
    """The network. Rows are positions; a batch has one more dimension in front."""

    draft_ids: Tensor

    def __init__(self, shape: FeatureShape) -> None:
        """Make a network with random weights.

        Args:
            shape: Its sizes.
        """
        super().__init__()
        self.shape = shape
        hidden, width = shape.hidden_size, shape.head_dim
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.stand_in = nn.Parameter(torch.zeros(hidden))
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.norm_in = nn.RMSNorm(hidden, eps=shape.rms_eps)
        self.qkv = nn.Linear(hidden, heads * width, bias=False)
        self.out = nn.Linear(shape.num_heads * width, hidden, bias=False)
        self.norm_mid = nn.RMSNorm(hidden, eps=shape.rms_eps)
        self.gate_up = nn.Linear(hidden, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, hidden, bias=False)
        self.norm_out = nn.RMSNorm(hidden, eps=shape.rms_eps)
        self.head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        self.register_buffer("draft_ids", torch.zeros(shape.draft_vocab_size, dtype=torch.int32))

    def enter(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Join embeddings of the tokens at t + 1 with the features of t.

        Args:
            embedded: [..., hidden], from the target's embedding.
            features: [..., hidden].

        Returns:
            [..., hidden], the layer's input.
        """
        return cast(Tensor, self.join(torch.cat([embedded * self.shape.embedding_scale, features], dim=-1)))

    def project(self, entered: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of rows, queries and keys turned by their positions.

        Args:
            entered: [..., hidden].
            rotation: Cosine and signed sine, as `rotation` returns, [..., 1, head_dim] each.

        Returns:
            [..., num_heads, head_dim], and twice [..., num_kv_heads, head_dim].
        """
        shape = self.shape
        joined = self.qkv(self.norm_in(entered)).unflatten(-1, (-1, shape.head_dim))
        turned, values = joined.split([shape.num_heads + shape.num_kv_heads, shape.num_kv_heads], dim=-2)
        cos, sin = rotation
        turned = turned * cos + turned.roll(shape.head_dim // 2, -1) * sin
        queries, keys = turned.split([shape.num_heads, shape.num_kv_heads], dim=-2)
        return queries, keys, values

    def leave(self, entered: Tensor, attended: Tensor) -> Tensor:
        """Return the guessed features.

        Args:
            entered: [..., hidden], the layer's input.
            attended: [..., num_heads * head_dim].

        Returns:
            [..., hidden]: of t + 1 for the rows of t.
        """
        mixed = entered + self.out(attended)
        gate, up = self.gate_up(self.norm_mid(mixed)).chunk(2, dim=-1)
        return cast(Tensor, self.norm_out(mixed + self.down(fn.silu(gate) * up)))

    def logits(self, guesses: Tensor) -> Tensor:
        """Return the law of token t + 2 over `draft_ids`, as logits.

        Args:
            guesses: [..., hidden], from `leave`.

        Returns:
            [..., draft_vocab_size].
        """
        return cast(Tensor, self.head(guesses))

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors that turn heads at positions.

        Args:
            positions: [...] int64.

        Returns:
            Cosine and sine with its sign, [..., 1, head_dim] each, in the weights' dtype.
        """
        half = self.shape.head_dim // 2
        exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / half
        angles = positions[..., None].float() * self.shape.rope_theta**-exponents
        cos, sin = angles.cos(), angles.sin()
        dtype = self.join.weight.dtype
        return torch.cat([cos, cos], -1)[..., None, :].to(dtype), torch.cat([-sin, sin], -1)[..., None, :].to(dtype)
