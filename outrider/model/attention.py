"""Attention over the block pool, under any model that `transformers` lets plug its attention.

What a row's bits depend on is fixed by its position alone: its keys are those of the positions [0, s), where s is the
end of the block that the position lies in, masked behind the row itself; its query shares a call only with rows of the
same session and the same s, in a number that `outrider.model.probe` found not to matter. So neither neighbours, nor the
number of rows of a run, nor the length of other sessions can reach it.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.errors import FailedPrecondition
from outrider.model.kv import KvCache

ATTENTION_NAME = "outrider_block_pool"
"""The name under which the attention is registered with `transformers`."""

_HARMLESS = {"dropout", "is_causal", "output_attentions", "output_router_logits", "position_ids", "use_cache", "cache"}
"""Keyword arguments of models' attention calls that change nothing here."""


@dataclass(slots=True)
class Segment:
    """Rows of one session in one pass whose last keys lie in the same block."""

    first: int
    """Index of its first row in the pass."""
    count: int
    """Its rows."""
    tile: int
    """Rows of the attention call, `count` padded."""
    where: slice | Tensor
    """Pool rows of the positions [0, span): a slice where they lie side by side, else [span] int64."""
    positions: Tensor
    """[tile] int64, of its rows; padding repeats the last."""
    span: int
    """Keys of the call, a multiple of the block length."""
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask(self, group: int, window: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask, the same for all layers of one kind.

        Args:
            group: Query heads per key head; they are rows of the call too.
            window: Keys a row sees, itself included; 0 is all.
            dtype: The model's.

        Returns:
            [1, 1, tile * group, span]: 0 or minus infinity; row r * group + g belongs to row r.
        """
        mask = self.masks.get((group, window))
        if mask is None:
            keys = torch.arange(self.span, device=self.positions.device)
            rows = self.positions.repeat_interleave(group)[:, None]
            seen = keys <= rows if not window else (keys <= rows) & (keys > rows - window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[None, None]
            self.masks[group, window] = mask
        return mask


@dataclass(slots=True)
class PassPlan:
    """Where the rows of one pass write and read; handed through the model to every layer."""

    kv: KvCache
    first: int
    """Index of the first row that is not padding."""
    count: int
    """Rows that are not padding; they are consecutive."""
    write_rows: Tensor
    """[count] int64, their pool rows."""
    segments: list[Segment]
    rotation: tuple[Tensor, Tensor] | None = None
    """Factors of the rotary embedding, made by the first fused layer of the pass."""


def attend(plan: PassPlan, layer: int, query: Tensor, key_value: Tensor, options: "AttentionOptions") -> Tensor:
    """Write a pass's keys and values, then attend.

    Args:
        plan: The pass.
        layer: Index of the layer.
        query: [rows, kv_heads, group, head_dim].
        key_value: [rows, 2 * kv_heads, head_dim], keys before values.
        options: Scale, window and cap of the layer.

    Returns:
        [rows, kv_heads * group * head_dim]; zeros in rows of padding.
    """
    last = plan.first + plan.count
    plan.kv.layers[layer].index_copy_(0, plan.write_rows, key_value[plan.first : last])
    outputs = [_attend_segment(plan, segment, layer, query, options) for segment in plan.segments]
    rows, width = query.shape[0], query.shape[1] * query.shape[2] * query.shape[3]
    filled = sum(segment.count for segment in plan.segments)
    if filled < rows:
        outputs.append(query.new_zeros(rows - filled, width))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of its attention."""

    scale: float
    window: int = 0
    """Sliding window, 0 for none."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 for none."""


def _attend_segment(plan: PassPlan, segment: Segment, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
    """Return [segment.count, heads * head_dim]."""
    part = query[segment.first : segment.first + segment.count]
    if segment.count < segment.tile:
        part = torch.cat((part, part[-1:].expand(segment.tile - segment.count, -1, -1, -1)))
    tile, heads, group, dim = part.shape
    key, value = plan.kv.read(layer, segment.where)
    mask = segment.mask(group, options.window, query.dtype)
    tiled = part.transpose(0, 1).reshape(1, heads, tile * group, dim)
    if options.softcap:
        out = _capped(tiled, key[None], value[None], mask, options)
    else:
        out = nn.functional.scaled_dot_product_attention(tiled, key[None], value[None], mask, scale=options.scale)
    return out.view(heads, tile, group, dim).transpose(0, 1).reshape(tile, -1)[: segment.count]


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Attention with capped scores: [1, heads, rows, head_dim]; softmax in float32."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * options.scale
    scores = torch.tanh(scores / options.softcap) * options.softcap + mask
    return torch.matmul(torch.softmax(scores, dim=-1).to(value.dtype), value)


def _pool_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Adapt `attend` to the signature of `transformers`' attention functions (batch of one).

    Args:
        module: The attention layer.
        query: [1, heads, rows, head_dim].
        key: [1, kv_heads, rows, head_dim].
        value: As `key`.
        mask: Always None: the plan has the masks.
        **kwargs: `outrider_pass`, and what the model says about its attention.

    Returns:
        [1, rows, heads, head_dim] and no weights.

    Raises:
        FailedPrecondition: The model asks for something this attention does not compute.
    """
    plan = cast(PassPlan, kwargs.pop("outrider_pass"))
    options = _options(module, kwargs)
    if mask is not None or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise FailedPrecondition("the model's attention uses a mask of its own, or keys and values of different widths")
    _, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query[0].view(kv_heads, heads // kv_heads, rows, dim).permute(2, 0, 1, 3)
    both = torch.cat((key[0], value[0])).transpose(0, 1)
    out = attend(plan, cast(int, module.layer_idx), grouped, both, options)
    return out.view(1, rows, heads, dim), None


def _options(module: nn.Module, kwargs: dict[str, Any]) -> AttentionOptions:
    """Read a layer's wishes; see `_pool_attention`."""
    scale = kwargs.pop("scaling", None)
    window = kwargs.pop("sliding_window", None)
    softcap = kwargs.pop("softcap", None)
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise FailedPrecondition(f"the model's attention needs {', '.join(unknown)}, which the block pool cannot do")
    if scale is None:
        scale = cast(int, module.head_dim) ** -0.5
    return AttentionOptions(float(scale), int(window or 0), float(softcap or 0.0))


AttentionInterface.register(ATTENTION_NAME, _pool_attention)
