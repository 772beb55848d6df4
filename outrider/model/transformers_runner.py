"""Runs any `transformers` causal LM over the block pool, in passes of fixed shapes.

A pass is one batch row holding tokens of many sessions side by side; position ids and the pass plan tell the layers
which is which. Decode passes are padded up to a row class; a prompt pass always has 64 rows, row i holding position i
of its block. Which classes may be mixed is not decided here: `outrider.model.probe` finds out and hands them in.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import FailedPrecondition
from outrider.ids import TokenClass
from outrider.model.block_access import PoolAccess
from outrider.model.decoders import Decoder, FusedModel, StockModel, device_of
from outrider.model.fetching import Piece, Want, fetch
from outrider.model.fused import can_fuse
from outrider.model.kv import BlockPool, BlockSlot, KvCache
from outrider.model.memory import KvBudget
from outrider.model.packed import packed, unmap
from outrider.model.parallel import CopyBlock, Dismissed, LeadingPasses, MoveRows, Ranks, RunPass
from outrider.model.planning import Branch, Layout, PassShape, Planner, Row, RowClasses
from outrider.model.pooled import PooledRunner
from outrider.model.recording import AnewPasses, Passes, RecordedPasses
from outrider.model.row_attention import is_supported
from outrider.model.runner import BLOCK_LEN, Feed, ModelInfo, Rows, check_feeds
from outrider.model.sharding import num_shards
from outrider.verification.tree import Tree


class TransformersRunner(PooledRunner):
    """The runner protocol over a `transformers` causal LM."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        num_blocks: int | KvBudget = 256,
        context_len: int = 0,
        fused: bool = True,
        layout: Layout | None = None,
    ) -> None:
        """Take over a model; its attention (and, fused, its layers) are replaced.

        Rows are guaranteed only after `outrider.model.probe.calibrate` has set the classes.

        Args:
            model: In its final dtype and on its final device.
            name: The model's name.
            num_blocks: Size of the KV pool in blocks of 64 tokens, or memory to fill with it.
            context_len: Most tokens of a slot; 0 takes the model's own limit.
            fused: Use fused layers where the model has some.
            layout: Of decode passes; FIXED ones are run from recordings. None takes what is fastest here.

        Raises:
            FailedPrecondition: The model cannot run over a block pool; names the feature. Or the memory is too small.
        """
        shapes = kv_shapes(model)
        self.model = model.train(False)
        head = head_of(model)
        vocab_size, hidden_size = cast(Tensor, head.weight).shape
        self._device, self._dtype = device_of(head)
        context_len = _context_len(model, context_len)
        # Layers that are split over ranks compute as `transformers` has split them.
        self.fused = fused and num_shards(model) == 1 and can_fuse(model)
        decoder = _decoder(model, head, context_len, fused=self.fused)
        token_bytes = sum(2 * heads * dim * self._dtype.itemsize for heads, dim in shapes)
        if isinstance(num_blocks, KvBudget):
            num_blocks = num_blocks.num_blocks(token_bytes * BLOCK_LEN, self._device)
        # One block more than the pool gives away: padding is written there.
        self._kv = KvCache(shapes, num_blocks + 1, self._dtype, self._device)
        super().__init__(BlockPool(num_blocks, self._kv.copy, self._kv.move))
        self.layout = layout or _fastest_layout(model, self._dtype, self._device, fused=self.fused)
        passes = RecordedPasses if self.layout is Layout.FIXED else AnewPasses
        self.passes: Passes = passes(decoder, self._kv, self._device)
        self._classes = RowClasses()
        self._base_info = ModelInfo(
            name=name, vocab_size=vocab_size, context_len=context_len, dtype=str(self._dtype).removeprefix("torch."),
            hidden_size=hidden_size, row_classes=(), max_rows=0, exactness="", fingerprint="",
            kv_bytes_per_token=token_bytes, num_blocks=num_blocks, trees=self.layout is Layout.RUNS,
        )  # fmt: skip
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
    def block_access(self) -> PoolAccess:
        """The pool's blocks as bytes."""
        return PoolAccess(self._pool, self._kv)

    def lead(self, ranks: Ranks) -> None:
        """Have other ranks do all that is done here from now on.

        Args:
            ranks: Whose others follow.
        """
        self.passes = LeadingPasses(self.passes, ranks)
        self._kv.on_copy = lambda source, target: ranks.tell(CopyBlock(source, target))
        self._kv.on_move = lambda sources, targets: ranks.tell(MoveRows(sources, targets))

    def follow(self, ranks: Ranks) -> None:
        """Do what the leader does, until it dismisses this rank; blocks.

        Args:
            ranks: Whose leader leads.

        Raises:
            RunnerBroken: The leader is gone, or a pass failed.
        """
        while True:
            match ranks.hear():
                case RunPass(shape, numbers):
                    with torch.inference_mode():
                        LeadingPasses.together(self.passes, shape, numbers)
                case CopyBlock(source, target):
                    self._kv.copy(source, target)
                case MoveRows(sources, targets):
                    self._kv.move(sources, targets)
                case Dismissed():
                    return

    def set_classes(self, classes: RowClasses, fingerprint: str) -> None:
        """Use these shapes from now on; slots fed before must be fed again.

        Args:
            classes: What the probe found.
            fingerprint: Of the engine, with these classes.
        """
        self._classes = classes
        # Recordings know nothing of classes: those of shapes that are not planned any more are just not used.
        self._planner = Planner(classes, self._base_info.num_blocks, self.layout)
        self._info = replace(
            self._base_info,
            row_classes=classes.rows,
            max_rows=classes.rows[-1],
            exactness=classes.exactness,
            classes_differ=classes.classes_differ,
            fingerprint=fingerprint,
        )
        self._pool.set_roots(fingerprint, classes_differ=classes.classes_differ)

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        """Run feeds; see `ModelRunner.forward`."""
        check_feeds(feeds, self._info)
        slots = self._reserved(feeds)
        try:
            pieces = self._run_passes(feeds, slots)
        except BaseException:
            for slot in slots:
                slot.drop_spare()
            raise
        for slot, feed in zip(slots, feeds, strict=True):
            if feed.parents:
                slot.spread(Tree(feed.token_ids, feed.parents))
            else:
                slot.advance(feed.token_ids, feed.token_class)
        return [self._gather(feed, piece) for feed, piece in zip(feeds, pieces, strict=True)]

    def _run_passes(self, feeds: Sequence[Feed], slots: list[BlockSlot]) -> list[list[Piece]]:
        """Run all passes; per feed, what is wanted of it in the order of its positions."""
        pieces: list[list[Piece]] = [[] for _ in feeds]
        decode: list[Row] = []
        for number, (feed, slot) in enumerate(zip(feeds, slots, strict=True)):
            rows = _rows_of(number, feed, slot)
            if feed.token_class is TokenClass.PROMPT:
                self._run_pass(rows, self._planner.prompt(rows, head=not feed.hidden_only), feeds, pieces)
            else:
                decode += rows
        for start in range(0, len(decode), self._info.max_rows):
            rows = decode[start : start + self._info.max_rows]
            self._run_pass(rows, self._planner.decode(rows), feeds, pieces)
        return pieces

    def _run_pass(
        self, rows: list[Row], plan: tuple[PassShape, list[int]], feeds: Sequence[Feed], pieces: list[list[Piece]]
    ) -> None:
        """Run one planned pass over these rows and hand what is wanted of it to `pieces`."""
        with torch.inference_mode():
            output = self.passes.run(*plan)
        if output is None:
            return
        wants, first = [], 0
        for number, own in groupby(row.feed for row in rows if row.wanted):
            count = sum(1 for _ in own)
            wants.append(Want(number, first, count, feeds[number].want_hidden, feeds[number].best_below))
            first += count
        # Outside of inference mode, so that what is handed out are ordinary tensors.
        for want, piece in zip(wants, fetch(output, wants), strict=True):
            pieces[want.feed].append(piece)

    def _gather(self, feed: Feed, pieces: list[Piece]) -> Rows:
        """Join a feed's pieces, one per pass."""
        if not pieces:
            pieces = [self._empty_piece()]
        logits = _joined([piece.logits for piece in pieces])
        hidden = _joined([piece.hidden for piece in pieces if piece.hidden is not None]) if feed.want_hidden else None
        best = _joined([piece.best for piece in pieces if piece.best is not None]) if feed.best_below else None
        return Rows(logits, hidden, best)

    def _empty_piece(self) -> Piece:
        info = self._info
        hidden = torch.empty(0, info.hidden_size, dtype=self._dtype)
        return Piece(torch.empty(0, info.vocab_size), hidden, torch.empty(0, dtype=torch.int64))


def _decoder(model: PreTrainedModel, head: nn.Module, context_len: int, *, fused: bool) -> Decoder:
    """Return what computes passes; the model's weights are packed and its layers replaced where that can be."""
    if num_shards(model) > 1:
        return StockModel(model, head)
    head = packed(head)
    cast(Any, model).set_output_embeddings(head)
    decoder: Decoder = FusedModel(model, head, context_len) if fused else StockModel(model, head)
    unmap(model)
    return decoder


def _rows_of(number: int, feed: Feed, slot: BlockSlot) -> list[Row]:
    """Return the rows of a feed, in the order of its tokens."""
    silent, start = len(feed.token_ids) - feed.num_rows, slot.length
    if not feed.parents:
        return [Row(number, slot, start + index, token, index >= silent) for index, token in enumerate(feed.token_ids)]
    tree, rows = Tree(feed.token_ids, feed.parents), []
    for node, token in enumerate(feed.token_ids):
        places = tuple(start + own for own in tree.path_to(node))
        branch = Branch(start, places)
        rows.append(Row(number, slot, start + len(places) - 1, token, node >= silent, branch))
    return rows


def _fastest_layout(model: PreTrainedModel, dtype: torch.dtype, device: torch.device, *, fused: bool) -> Layout:
    """Return how a model's decode passes are best planned."""
    if fused and device.type == "cuda":
        return Layout.FIXED
    capped = bool(getattr(model.config, "attn_logit_softcapping", None))
    return Layout.RUNS if is_supported(device, dtype) and not capped else Layout.TIGHT


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def kv_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return (kv_heads, head_dim) of every layer's attention, those of this rank.

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
    return [(heads // num_shards(model), dim)] * int(config.num_hidden_layers)


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
