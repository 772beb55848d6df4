"""A decoder of the Llama family with fewer, larger operations than `transformers` issues.

A pass over few rows spends much of its time between matrix products. The fused layer computes the same function with
one product for query, key and value, one for gate and up, and one rotation for all heads; the decoder around it does
nothing but embed, run the layers and norm. It is used for models whose layer and frame are known to be exactly this;
every other model runs its stock layers.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.model.attention import AttentionOptions, PassPlan, attend
from outrider.model.packed import packed

FUSABLE = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}
"""Stock layers that `FusedLayer` computes; names in `transformers`."""

FRAMES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"}
"""Stock models that do nothing around their layers but what `FusedDecoder` does; names in `transformers`."""


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
        self.norm_in = RmsNorm(cast(Any, layer).input_layernorm)
        self.norm_mid = RmsNorm(cast(Any, layer).post_attention_layernorm)
        # Calling a module costs microseconds, which four products in each of thirty layers make worth sparing.
        self._products: tuple[Callable[[Tensor], Tensor], ...] = tuple(
            module.forward for module in (self.qkv, self.out, self.gate_up, self.down)
        )

    def run(self, hidden: Tensor, plan: PassPlan) -> Tensor:
        """Run the layer.

        Args:
            hidden: [rows, hidden].
            plan: The pass, its rotation set.

        Returns:
            [rows, hidden].
        """
        qkv, out, gate_up, down = self._products
        projected = qkv(self.norm_in(hidden)).view(hidden.shape[0], -1, self.head_dim)
        rotated = self._rotate(projected, plan)
        query = rotated[:, : self.heads].view(hidden.shape[0], self.kv_heads, -1, self.head_dim)
        attended = attend(plan, self.layer_idx, query, rotated[:, self.heads :], self.options)
        hidden = hidden + out(attended)
        gate, up = gate_up(self.norm_mid(hidden)).chunk(2, dim=-1)
        return hidden + down(nn.functional.silu(gate) * up)

    def _rotate(self, heads: Tensor, plan: PassPlan) -> Tensor:
        """Turn queries and keys by their position and leave values as they are.

        Args:
            heads: [rows, heads + 2 * kv_heads, head_dim].
            plan: Has the factors.
        """
        cos, sin = cast(tuple[Tensor, Tensor], plan.rotation)
        return torch.addcmul(heads * cos, heads.roll(self.head_dim // 2, -1), sin)


class FusedDecoder:
    """A causal LM without its head: embedding, fused layers, final norm."""

    def __init__(self, model: PreTrainedModel, context_len: int) -> None:
        """Replace the model's layers; see `can_fuse`.

        Args:
            model: In evaluation mode; changed in place.
            context_len: Positions that are fed at most.
        """
        base = cast(Any, model.base_model)
        base.layers = nn.ModuleList(FusedLayer(layer) for layer in base.layers)
        self._embed: nn.Module = base.embed_tokens
        self._norm = RmsNorm(base.norm)
        self._layers: list[FusedLayer] = list(base.layers)
        weight = cast(Tensor, base.embed_tokens.weight)
        with torch.inference_mode():
            positions = torch.arange(context_len, device=weight.device)[None]
            cos, sin = base.rotary_emb(weight[:1, None], positions)
        self._cos, self._sin = cos[0], sin[0]

    def run(self, token_ids: Tensor, positions: Tensor, plan: PassPlan) -> Tensor:
        """Return the normed hidden states of a pass, [rows, hidden].

        Args:
            token_ids: [rows] int64.
            positions: [rows] int64.
            plan: The pass.
        """
        hidden = cast(Tensor, self._embed(token_ids))
        plan.rotation = self._rotation(positions)
        for layer in self._layers:
            hidden = layer.run(hidden, plan)
        return self._norm(hidden)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors of all heads of a pass: [rows, heads + 2 * kv_heads, head_dim] each.

        Values are multiplied by cosine 1 and get sine 0 times something added, which is exact, so that all heads go in
        one operation. The sine carries the sign that turning the lower half of a head needs.
        """
        layer = self._layers[0]
        turned, half = layer.heads + layer.kv_heads, layer.head_dim // 2
        shape = (len(positions), turned + layer.kv_heads, layer.head_dim)
        cos, sin = self._cos.new_ones(shape), self._sin.new_zeros(shape)
        cos[:, :turned] = self._cos.index_select(0, positions)[:, None]
        sin[:, :turned] = self._sin.index_select(0, positions)[:, None]
        sin[..., :half].neg_()
        return cos, sin


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether the fused decoder is known to compute the same function as this model."""
    if type(model).__name__ not in FRAMES or getattr(model.config, "hidden_act", "") != "silu":
        return False
    layers = list(getattr(model.base_model, "layers", []))
    return bool(layers) and all(type(layer).__name__ in FUSABLE for layer in layers)


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


class RmsNorm:
    """Scales rows to unit root mean square, then by a weight; statistics in float32.

    On a CPU torch issues nine operations for it where five do; with two norms a layer their overhead counts.
    """

    def __init__(self, norm: nn.Module) -> None:
        """Take over a stock norm's weight.

        Args:
            norm: With `weight` [hidden] and `variance_epsilon`.
        """
        self._weight = cast(Tensor, norm.weight).detach()
        self._epsilon = float(cast(float, norm.variance_epsilon))
        self._by_parts = self._weight.device.type == "cpu" and self._weight.dtype is not torch.float64
        self._wide_weight = self._weight.float()
        self._wide_epsilon = torch.full((1, 1), self._epsilon)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the normed rows, [rows, hidden]."""
        if not self._by_parts:
            return nn.functional.rms_norm(hidden, self._weight.shape, self._weight, self._epsilon)
        wide = hidden.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._wide_epsilon, length, length, value=1 / hidden.shape[-1]).rsqrt_()
        return (wide * scale).mul_(self._wide_weight).to(hidden.dtype)
