"""Runs any `transformers` causal LM over the block pool, in passes of fixed shapes.

A pass is one batch row holding tokens of many sessions side by side; position ids and the pass plan tell the layers
which is which. Decode passes are padded up to a row class; a prompt pass always has 64 rows, row i holding position i
of its block. Which classes may be mixed is not decided here: `outrider.model.probe` finds out and hands them in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import FailedPrecondition
from outrider.ids import TokenClass
from outrider.model.attention import ATTENTION_NAME, PassPlan, Segment
from outrider.model.fused import fuse
from outrider.model.kv import BlockPool, BlockSlot, KvCache, block_slot, pool_rows
from outrider.model.memory import KvBudget
from outrider.model.packed import packed, unmap
from outrider.model.runner import BLOCK_LEN, Feed, InvalidFeed, KvSlot, KvUsage, ModelInfo, Rows, check_feeds


@dataclass(frozen=True, slots=True)
class RowClasses:
    """Shapes that passes may have; rising numbers each."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Rows of a decode pass and of its head product."""
    tiles: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Rows of one session in one attention call of a decode pass."""
    exactness: str = "bitwise"
    classes_differ: bool = True


@dataclass(slots=True)
class _Row:
    """One token on its way through a pass."""

    feed: int
    slot: BlockSlot
    position: int
    token_id: int
    wanted: bool


class TransformersRunner:
    """The runner protocol over a `transformers` causal LM."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        num_blocks: int | KvBudget = 256,
        context_len: int = 0,
        fused: bool = True,
    ) -> None:
        """Take over a model; its attention (and, fused, its layers) are replaced.

        Rows are guaranteed only after `outrider.model.probe.calibrate` has set the classes.

        Args:
            model: In its final dtype and on its final device.
            name: The model's name.
            num_blocks: Size of the KV pool in blocks of 64 tokens, or memory to fill with it.
            context_len: Most tokens of a slot; 0 takes the model's own limit.
            fused: Use fused layers where the model has some.

        Raises:
            FailedPrecondition: The model cannot run over a block pool; names the feature. Or the memory is too small.
        """
        shapes = kv_shapes(model)
        self.model = model.train(False)
        self.fused = fused and fuse(model)
        model.set_attn_implementation(ATTENTION_NAME)
        head = head_of(model)
        weight = cast(Tensor, head.weight)
        self._device, self._dtype = weight.device, weight.dtype
        self._classes = RowClasses()
        self._head_input: Tensor | None = None
        head = packed(head)
        cast(Any, model).set_output_embeddings(head)
        head.register_forward_pre_hook(self._keep_head_input)
        unmap(model)
        token_bytes = sum(2 * heads * dim * self._dtype.itemsize for heads, dim in shapes)
        if isinstance(num_blocks, KvBudget):
            num_blocks = num_blocks.num_blocks(token_bytes * BLOCK_LEN, self._device)
        self._kv = KvCache(shapes, num_blocks, self._dtype, self._device)
        self._pool = BlockPool(num_blocks, self._kv.copy)
        self._base_info = ModelInfo(
            name=name,
            vocab_size=weight.shape[0],
            context_len=_context_len(model, context_len),
            dtype=str(self._dtype).removeprefix("torch."),
            hidden_size=weight.shape[1],
            row_classes=(),
            max_rows=0,
            exactness="",
            fingerprint="",
            kv_bytes_per_token=token_bytes,
            num_blocks=num_blocks,
        )
        self.set_classes(self._classes, "")

    @property
    def info(self) -> ModelInfo:
        """What is fixed about this runner."""
        return self._info

    @property
    def classes(self) -> RowClasses:
        """Shapes in use."""
        return self._classes

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._device

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken."""
        return self._pool.num_free

    @property
    def kv_usage(self) -> KvUsage:
        """How the pool is used."""
        return self._pool.usage

    def set_classes(self, classes: RowClasses, fingerprint: str) -> None:
        """Use these shapes from now on; slots fed before must be fed again.

        Args:
            classes: What the probe found.
            fingerprint: Of the engine, with these classes.
        """
        self._classes = classes
        self._info = replace(
            self._base_info,
            row_classes=classes.rows,
            max_rows=classes.rows[-1],
            exactness=classes.exactness,
            classes_differ=classes.classes_differ,
            fingerprint=fingerprint,
        )
        self._pool.set_roots(fingerprint, classes_differ=classes.classes_differ)

    def new_slot(self, *, by_class: bool = True) -> BlockSlot:
        """Return an empty slot."""
        return self._pool.new_slot(by_class=by_class)

    def free_slot(self, slot: KvSlot, *, forget: bool = False) -> None:
        """Give a slot's blocks back; idempotent."""
        own = block_slot(slot, self._pool)
        if own is not None:
            own.release(forget=forget)

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        """Run feeds; see `ModelRunner.forward`."""
        check_feeds(feeds, self._info)
        slots = [self._own_slot(feed.slot) for feed in feeds]
        ends = [slot.length + len(feed.token_ids) for slot, feed in zip(slots, feeds, strict=True)]
        self._pool.reserve(list(zip(slots, ends, strict=True)))
        try:
            pieces = self._run_passes(feeds, slots)
        except BaseException:
            for slot in slots:
                slot.drop_spare()
            raise
        for slot, feed in zip(slots, feeds, strict=True):
            slot.advance(feed.token_ids, feed.token_class)
        return [self._gather(feed, piece) for feed, piece in zip(feeds, pieces, strict=True)]

    def _own_slot(self, slot: KvSlot) -> BlockSlot:
        own = block_slot(slot, self._pool)
        if own is None:
            raise InvalidFeed("the slot is freed or belongs to another runner")
        return own

    @torch.inference_mode()
    def _run_passes(self, feeds: Sequence[Feed], slots: list[BlockSlot]) -> list[list[tuple[Tensor, Tensor]]]:
        """Run all passes; per feed, pieces of (logits, hidden) in the order of its positions."""
        pieces: list[list[tuple[Tensor, Tensor]]] = [[] for _ in feeds]
        decode: list[_Row] = []
        for number, (feed, slot) in enumerate(zip(feeds, slots, strict=True)):
            silent = len(feed.token_ids) - feed.num_rows
            rows = [
                _Row(number, slot, slot.length + index, token, index >= silent)
                for index, token in enumerate(feed.token_ids)
            ]
            if feed.token_class is TokenClass.PROMPT:
                self._run_pass(rows, feed.token_class, pieces)
            else:
                decode += rows
        for start in range(0, len(decode), self._info.max_rows):
            rows = decode[start : start + self._info.max_rows]
            self._run_pass(rows, TokenClass.DECODE, pieces)
        return pieces

    def _run_pass(self, rows: list[_Row], token_class: TokenClass, pieces: list[list[tuple[Tensor, Tensor]]]) -> None:
        """Run one pass over these rows, padded as their class demands, and hand its output to `pieces`."""
        is_prompt = token_class is TokenClass.PROMPT
        size = BLOCK_LEN if is_prompt else _class_for(len(rows), self._classes.rows)
        first = rows[0].position % BLOCK_LEN if is_prompt else 0
        token_ids, positions = [0] * size, [0] * size
        for index, row in enumerate(rows, first):
            token_ids[index], positions[index] = row.token_id, row.position
        segments = [self._prompt_segment(rows[0])] if is_prompt else self._segments(rows)
        write = [where for row in rows for where in pool_rows(row.slot, row.position, row.position + 1)]
        plan = PassPlan(self._kv, first, len(rows), self._tensor(write), segments)
        wanted = [index for index, row in enumerate(rows, first) if row.wanted]
        kwargs = {"position_ids": self._tensor([positions]), "use_cache": False, "outrider_pass": plan}
        if not wanted:
            self.model.base_model(self._tensor([token_ids]), **kwargs)
            return
        # The head runs in the same classes as the layers; a whole prompt pass is a class of its own.
        head_rows = size if is_prompt else _class_for(len(wanted), self._classes.rows)
        keep = wanted + [wanted[-1]] * (head_rows - len(wanted))
        output = cast(Any, self.model)(self._tensor([token_ids]), logits_to_keep=self._tensor(keep), **kwargs)
        self._hand_out(rows, len(wanted), output.logits[0], pieces)

    def _hand_out(
        self, rows: list[_Row], count: int, logits: Tensor, pieces: list[list[tuple[Tensor, Tensor]]]
    ) -> None:
        """Cut a pass's output by feeds; the wanted rows of a feed lie side by side."""
        hidden = cast(Tensor, self._head_input)[0]
        owners = [row.feed for row in rows if row.wanted]
        start = 0
        while start < count:
            end = start
            while end < count and owners[end] == owners[start]:
                end += 1
            pieces[owners[start]].append((logits[start:end], hidden[start:end]))
            start = end

    def _segments(self, rows: list[_Row]) -> list[Segment]:
        """Group a decode pass's rows by session and block of their position, in tiles."""
        segments: list[Segment] = []
        start = 0
        while start < len(rows):
            head, end = rows[start], start + 1
            while end < len(rows) and end - start < self._classes.tiles[-1] and _share_keys(head, rows[end]):
                end += 1
            tile = _class_for(end - start, self._classes.tiles)
            last = rows[end - 1].position
            positions = [row.position for row in rows[start:end]] + [last] * (tile - (end - start))
            segments.append(self._segment(head, start, end - start, positions))
            start = end
        return segments

    def _prompt_segment(self, row: _Row) -> Segment:
        """Return the one segment of a prompt pass: all 64 rows of a block, padding included."""
        start = row.position - row.position % BLOCK_LEN
        return self._segment(row, 0, BLOCK_LEN, list(range(start, start + BLOCK_LEN)))

    def _segment(self, row: _Row, first: int, count: int, positions: list[int]) -> Segment:
        """Return a segment of `row`'s session whose keys end with `row`'s block."""
        blocks = row.slot.blocks[: row.position // BLOCK_LEN + 1]
        span = len(blocks) * BLOCK_LEN
        where: slice | Tensor
        if row.slot.contiguous:
            where = slice(blocks[0] * BLOCK_LEN, blocks[0] * BLOCK_LEN + span)
        else:
            where = self._tensor(pool_rows(row.slot, 0, span))
        return Segment(first, count, len(positions), where, self._tensor(positions), span)

    def _gather(self, feed: Feed, pieces: list[tuple[Tensor, Tensor]]) -> Rows:
        """Join a feed's pieces, one per pass, as ordinary tensors that may be changed in place."""
        info = self._info
        empty = (
            torch.empty(0, info.vocab_size, device=self._device),
            torch.empty(0, info.hidden_size, dtype=self._dtype),
        )
        logits, hidden = zip(*(pieces or [empty]), strict=True)
        joined = logits[0] if len(logits) == 1 else torch.cat(logits)
        kept = torch.cat(hidden).clone() if feed.want_hidden else None
        return Rows(joined.to(torch.float32, copy=True), kept)

    def _keep_head_input(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._head_input = args[0]

    def _tensor(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def kv_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return (kv_heads, head_dim) of every layer's attention.

    Raises:
        FailedPrecondition: The model is not a decoder whose attention can be replaced.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise FailedPrecondition(f"{type(model).__name__} is not a decoder-only causal language model")
    if not getattr(model, "_supports_attention_backend", False):
        raise FailedPrecondition(f"{type(model).__name__} does not let its attention be replaced (for instance ALiBi)")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise FailedPrecondition(f"{type(model).__name__} has layers that are not plain attention: {sorted(kinds)}")
    moving = _rope_types(getattr(config, "rope_parameters", None)) & {"dynamic", "longrope"}
    if moving:
        # Their rotation depends on the longest position of the pass, so on the neighbours.
        raise FailedPrecondition(
            f"{type(model).__name__}: rotary embedding of type {sorted(moving)[0]} is not supported"
        )
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return [(heads, dim)] * int(config.num_hidden_layers)


def head_of(model: PreTrainedModel) -> nn.Module:
    """Return the module that turns hidden states into logits.

    Raises:
        FailedPrecondition: There is none: not a causal language model.
    """
    head = cast(Any, model).get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise FailedPrecondition(f"{type(model).__name__} has no language-model head")
    return head


def _context_len(model: PreTrainedModel, wanted: int) -> int:
    """Return the most tokens of a slot: the model's limit, or fewer when asked for.

    Raises:
        FailedPrecondition: The model states no limit and none was asked for.
    """
    limit = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    if not limit and not wanted:
        raise FailedPrecondition(f"{type(model).__name__} does not state its context length; set one")
    return min(wanted or limit, limit or wanted)


def _rope_types(parameters: object) -> set[str]:
    """Return the types of rotary embedding in a configuration, which may have one per kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    own = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return own.union(*(_rope_types(value) for value in parameters.values()))


def _class_for(count: int, classes: tuple[int, ...]) -> int:
    """Return the smallest class with room for `count`."""
    return next(size for size in classes if size >= count)


def _share_keys(row: _Row, other: _Row) -> bool:
    """Whether two rows attend over the same keys: same session, same block."""
    return row.slot is other.slot and row.position // BLOCK_LEN == other.position // BLOCK_LEN
