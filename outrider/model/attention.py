"""Attention over the block pool, for rows of many sessions at once, under models whose attention can be replaced.

What a row's bits depend on is fixed by its position alone: its keys are those of the positions [0, s), where s is the
end of the block that the position lies in, masked behind the row itself. Rows of one session that end in the same block
form an *item*; items are stacked into one call, in which every item is a matrix product of its own. A call may be wider
than a row's s, and an item may be padded with further rows, only where `outrider.model.probe` found that neither
matters. So neither neighbours, nor the number of rows of a run, nor the length of other sessions can reach a row.

On a CPU decode rows go another way, `outrider.model.row_attention`, where it can take them. Of what remains there, the
keys of a call are first copied side by side and made float32: its 16-bit kernels for a handful of queries are several
times slower than that.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.errors import FailedPrecondition
from outrider.model.kv import KvCache
from outrider.model.row_attention import Runs
from outrider.model.runner import BLOCK_LEN

ATTENTION_NAME = "outrider_block_pool"
"""The name under which the attention is registered with `transformers`."""

_HARMLESS = {"dropout", "is_causal", "output_attentions", "output_router_logits", "position_ids", "use_cache", "cache"}
"""Keyword arguments of models' attention calls that change nothing here."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Size of one attention call."""

    items: int
    """Runs of rows, each with keys of its own."""
    tile: int
    """Rows of an item, padding included."""
    span: int
    """Keys of an item, a multiple of the block length."""
    direct: bool = False
    """Whether its rows are the pass's rows, all of them and in order."""


@dataclass(slots=True)
class Group:
    """Items that share a call."""

    shape: GroupShape
    rows: Tensor
    """[items * tile] int64, index in the pass of each query; padding repeats a row."""
    positions: Tensor
    """[items * tile] int64, of the queries."""
    blocks: Tensor
    """[items * span / 64] int64, pool blocks of each item's keys."""
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask(self, group: int, window: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask, the same for all layers of one kind.

        Args:
            group: Query heads per key head; they are rows of the call too.
            window: Keys a row sees, itself included; 0 is all.
            dtype: That the call computes in.

        Returns:
            [items, 1, tile * group, span]: 0 or minus infinity; row r * group + g belongs to row r.
        """
        mask = self.masks.get((group, window))
        if mask is None:
            shape = self.shape
            keys = torch.arange(shape.span, device=self.positions.device)
            rows = self.positions.view(shape.items, 1, shape.tile, 1)
            unseen = keys > rows if not window else (keys > rows) | (keys <= rows - window)
            small = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)
            wide = small.unsqueeze(3).expand(-1, -1, -1, group, -1)
            mask = wide.reshape(shape.items, 1, shape.tile * group, shape.span)
            self.masks[group, window] = mask
        return mask


class Workspace:
    """Memory for the keys and values of one call, used again by every layer of every pass on a CPU."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return [count] numbers of any value, valid until the next request for this dtype."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[dtype] = torch.empty(count, dtype=dtype)
        return buffer[:count]


@dataclass(slots=True)
class PassPlan:
    """Where the rows of one pass write and read; handed through the model to every layer."""

    kv: KvCache
    write_rows: Tensor
    """[rows] int64, their pool rows; padding writes where nobody reads."""
    groups: list[Group]
    order: Tensor
    """[rows] int64: where each row's result lies in the groups' queries, laid end to end."""
    workspace: Workspace
    runs: Runs | None = None
    """The rows of a decode pass, where `outrider.model.row_attention` attends."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Factors of the rotary embedding, made by the first fused layer of the pass."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of its attention."""

    scale: float
    window: int = 0
    """Sliding window, 0 for none."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 for none."""


def attend(plan: PassPlan, layer: int, query: Tensor, key_value: Tensor, options: AttentionOptions) -> Tensor:
    """Write a pass's keys and values, then attend.

    Args:
        plan: The pass.
        layer: Index of the layer.
        query: [rows, kv_heads, group, head_dim].
        key_value: [rows, 2 * kv_heads, head_dim], keys before values.
        options: Scale, window and cap of the layer.

    Returns:
        [rows, kv_heads * group * head_dim]; rows of padding hold finite numbers without a meaning.
    """
    pool = plan.kv.layers[layer]
    pool.index_copy_(0, plan.write_rows, key_value)
    if plan.runs is not None:
        return plan.runs.attend(query, pool, options.scale, options.window)
    outputs = [_attend_group(plan, group, layer, query, options) for group in plan.groups]
    if plan.groups[0].shape.direct:
        return outputs[0]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).index_select(0, plan.order)


def _attend_group(plan: PassPlan, group: Group, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
    """Return [items * tile, heads * head_dim] in the model's dtype."""
    shape = group.shape
    part = query if shape.direct else query.index_select(0, group.rows)
    _, kv_heads, ways, dim = part.shape
    stacked = part.view(shape.items, shape.tile, kv_heads, ways, dim).transpose(1, 2)
    key_value = _gathered(plan, group, layer)
    tiled = stacked.to(key_value.dtype).reshape(shape.items, kv_heads, shape.tile * ways, dim)
    key, value = key_value[:, :kv_heads], key_value[:, kv_heads:]
    mask = group.mask(ways, options.window, key_value.dtype)
    if options.softcap:
        out = _capped(tiled, key, value, mask, options)
    else:
        out = _scaled_dot_product(tiled, key, value, mask, options.scale)
    unstacked = out.view(shape.items, kv_heads, shape.tile, ways * dim).transpose(1, 2)
    return unstacked.to(query.dtype, memory_format=torch.contiguous_format).reshape(shape.items * shape.tile, -1)


def _gathered(plan: PassPlan, group: Group, layer: int) -> Tensor:
    """Return a call's keys and values, [items, 2 * kv_heads, span, head_dim], float32 on a CPU."""
    pool = plan.kv.layers[layer]
    _, heads, dim = pool.shape
    blocks = pool.view(-1, BLOCK_LEN * heads * dim)
    if pool.device.type == "cpu":
        numbers = plan.workspace.take(len(group.blocks) * blocks.shape[1], pool.dtype).view(-1, blocks.shape[1])
        torch.index_select(blocks, 0, group.blocks, out=numbers)
        if pool.dtype in (torch.bfloat16, torch.float16):
            numbers = plan.workspace.take(numbers.numel(), torch.float32).view_as(numbers).copy_(numbers)
    else:
        numbers = blocks.index_select(0, group.blocks)
    return numbers.view(group.shape.items, group.shape.span, heads, dim).transpose(1, 2)


def _scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of stacked items: [items, kv_heads, rows, head_dim]."""
    return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Attention with capped scores: [items, kv_heads, rows, head_dim]; softmax in float32."""
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
