"""Decoder layers of the Llama family with fewer, larger operations than `transformers` issues.

A pass over few rows spends much of its time between matrix products. The fused layer computes the same function with
one product for query, key and value, one for gate and up, and one rotation for all heads. It is put in place of the
stock layers of models whose layer is known to be exactly this; every other model runs its stock layers.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.model.attention import AttentionOptions, PassPlan, attend
from outrider.model.packed import packed

FUSABLE = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}
"""Stock layers that `FusedLayer` computes; names in `transformers`."""


class FusedLayer(nn.Module):
    """One decoder layer: norm, attention, norm, gated MLP; takes over the stock layer's weights."""

    def __init__(self, layer: nn.Module) -> None:
        """Take a stock layer apart.

        Args:
            layer: One of `FUSABLE`; not to be used afterwards.
        """
        super().__init__()
        attention, mlp = cast(Any, layer).self_attn, cast(Any, layer).mlp
        self.layer_idx = int(attention.layer_idx)
        self.head_dim = int(attention.head_dim)
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.options = AttentionOptions(float(attention.scaling), _window(layer))
        self.qkv = packed(_joined(attention.q_proj, attention.k_proj, attention.v_proj))
        self.out = packed(attention.o_proj)
        self.gate_up = packed(_joined(mlp.gate_proj, mlp.up_proj))
        self.down = packed(mlp.down_proj)
        self.norm_in, self.norm_mid = cast(Any, layer).input_layernorm, cast(Any, layer).post_attention_layernorm
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], outrider_pass: PassPlan, **_: Any
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: [1, rows, hidden].
            position_embeddings: Cosines and sines, [1, rows, head_dim] each.
            outrider_pass: The pass.
            **_: What stock layers take besides.

        Returns:
            [1, rows, hidden].
        """
        hidden = hidden_states[0]
        normed = _rms_norm(hidden, self.norm_in)
        projected = self.qkv(normed).view(hidden.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        rotated = self._rotate(projected, position_embeddings, outrider_pass)
        query = rotated[:, : self.heads].view(hidden.shape[0], self.kv_heads, -1, self.head_dim)
        attended = attend(outrider_pass, self.layer_idx, query, rotated[:, self.heads :], self.options)
        hidden = hidden + self.out(attended)
        gate, up = self.gate_up(_rms_norm(hidden, self.norm_mid)).chunk(2, dim=-1)
        hidden = hidden + self.down(nn.functional.silu(gate) * up)
        return cast(Tensor, hidden[None])

    def _rotate(self, heads: Tensor, embeddings: tuple[Tensor, Tensor], plan: PassPlan) -> Tensor:
        """Turn queries and keys by their position and leave values as they are.

        Values are multiplied by cosine 1 and get sine 0 times something added, which is exact, so that all heads go in
        one operation. The factors are made once per pass.

        Args:
            heads: [rows, heads + 2 * kv_heads, head_dim].
            embeddings: Cosines and sines of the pass.
            plan: Keeps the factors for the pass's other layers.
        """
        if plan.rotation is None:
            cos, sin = embeddings[0][0][:, None], embeddings[1][0][:, None]
            half = self.head_dim // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
            turned = self.heads + self.kv_heads
            full_cos, full_sin = torch.ones_like(heads), torch.zeros_like(heads)
            full_cos[:, :turned], full_sin[:, :turned] = cos, signed
            plan.rotation = (full_cos, full_sin)
        cos, sin = plan.rotation
        return torch.addcmul(heads * cos, heads.roll(self.head_dim // 2, -1), sin)


def fuse(model: PreTrainedModel) -> bool:
    """Replace the model's layers by fused ones where that is known to be the same function.

    Args:
        model: A causal LM, in evaluation mode; changed in place.

    Returns:
        Whether the layers were replaced: all or none.
    """
    base = cast(Any, model.base_model)
    layers = list(getattr(base, "layers", []))
    if not layers or any(type(layer).__name__ not in FUSABLE for layer in layers):
        return False
    if getattr(model.config, "hidden_act", "") != "silu":
        return False
    base.layers = nn.ModuleList(FusedLayer(layer) for layer in layers)
    return True


def _window(layer: nn.Module) -> int:
    """Return a stock layer's sliding window, 0 for none; Mistral keeps it in the configuration alone."""
    attention = cast(Any, layer).self_attn
    holder = attention.config if type(layer).__name__ == "MistralDecoderLayer" else attention
    return int(getattr(holder, "sliding_window", None) or 0)


def _joined(*parts: nn.Linear) -> nn.Linear:
    """Return one projection whose output is the parts' outputs side by side."""
    joined = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), bias=parts[0].bias is not None,
                       device="meta")  # fmt: skip
    joined.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    if parts[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return joined


def _rms_norm(hidden: Tensor, norm: nn.Module) -> Tensor:
    """Scale rows to unit root mean square, then by the norm's weight; statistics in float32."""
    weight = cast(Tensor, norm.weight)
    return nn.functional.rms_norm(hidden, weight.shape, weight, cast(float, norm.variance_epsilon))
