"""The feature draft's network at work: rows of many sessions in one pass, on the CPU.

Row t of a session's text takes the embedding of token t + 1 and the target's feature of position t, and gives a guess
of the feature of position t + 1 and, through the head, the law of token t + 2. So a text of n tokens has rows 0 .. n
- 2.

Rows are laid out, stored and attended like the decode rows of a model: a pool of KV blocks, runs of a session, passes
of few fixed sizes. Which sizes give bit-identical rows is found out at the start; a row depends on its session alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draft_service.drafters.products import joining, product
from outrider.drafting.feature import FeatureDraft
from outrider.model.attention import AttentionOptions, PassPlan, Workspace, attend
from outrider.model.fused import RmsNorm
from outrider.model.kv import BlockPool, BlockSlot, KvCache
from outrider.model.memory import KvBudget
from outrider.model.planning import Layout, Planner, Row, RowClasses, read
from outrider.model.runner import BLOCK_LEN

MAX_ROWS = 32
"""Rows of a pass."""
FULL_TEXTS = 64
"""Texts of full length that a pool has room for at most: one row is small, and a budget made for models is large."""
_SIZES = (1, 2, 4, 8, 16, MAX_ROWS)
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class NetRow:
    """One row on its way through a pass."""

    slot: BlockSlot
    position: int
    token_id: int
    """Of the position behind it."""
    feature: Tensor
    """[hidden_size]"""
    wanted: bool = False
    """Whether its law is wanted."""


@dataclass(frozen=True, slots=True)
class NetOutput:
    """What a pass gives."""

    guesses: Tensor
    """[rows, hidden_size]: of each row, its guess of the next position's feature."""
    logits: Tensor
    """[wanted rows, draft_vocab_size] float32"""


class FeatureNet:
    """The network and its KV; see the module's head. Owned by one thread."""

    def __init__(
        self,
        draft: FeatureDraft,
        embedding: Tensor,
        *,
        dtype: torch.dtype,
        num_blocks: int | KvBudget,
        context_len: int,
    ) -> None:
        """Pack the weights, find the sizes of passes, and run one.

        Args:
            draft: the network; not changed.
            embedding: [vocab_size, hidden_size], the target's.
            dtype: that is computed in, bfloat16 or float32.
            num_blocks: size of the KV pool in blocks of 64 rows, or memory to fill with it.
            context_len: most tokens of a text.

        Raises:
            FailedPrecondition: the memory is too small.
        """
        shape = draft.shape
        self.hidden_size, self.dtype = shape.hidden_size, dtype
        self.stand_in = draft.stand_in.detach().to(dtype)
        self._embedding = embedding.to(dtype)
        self._layer = _Layer(draft, dtype)
        row_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        if isinstance(num_blocks, KvBudget):
            most = FULL_TEXTS * -(-context_len // BLOCK_LEN)
            num_blocks = min(most, num_blocks.num_blocks(row_bytes * BLOCK_LEN, _CPU))
        # One block more than the pool gives away: padding is written there.
        self._kv = KvCache([(shape.num_kv_heads, shape.head_dim)], num_blocks + 1, dtype, _CPU)
        self.pool = BlockPool(num_blocks, self._kv.copy)
        cos, sin = draft.rotation(torch.arange(context_len))
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)
        self._workspace = Workspace()
        self._planner = Planner(RowClasses(self._agreeing_sizes()), num_blocks, Layout.RUNS)
        self._warm_up()

    def run(self, rows: Sequence[NetRow]) -> NetOutput:
        """Run one pass and write its KV; slots have room for it, and are advanced by the caller.

        Args:
            rows: at most `MAX_ROWS`; those of a session side by side, rising.
        """
        planned = [Row(0, row.slot, row.position, row.token_id, row.wanted) for row in rows]
        with torch.inference_mode():
            shape, numbers = self._planner.decode(planned)
            given = read(shape, torch.tensor(numbers), self._kv, self._workspace)
            inputs = torch.zeros(shape.rows, 2 * self.hidden_size, dtype=self.dtype)
            torch.index_select(self._embedding, 0, given.token_ids, out=inputs[:, : self.hidden_size])
            torch.stack([row.feature for row in rows], out=inputs[: len(rows), self.hidden_size :])
            cos, sin = self._cos.index_select(0, given.positions), self._sin.index_select(0, given.positions)
            guesses = self._layer.run(inputs, (cos, sin), given.plan)
            wanted = guesses.index_select(0, given.kept) if len(given.kept) else guesses[:0]
            logits = self._layer.head(wanted) if len(wanted) else wanted
        return NetOutput(guesses[: len(rows)], logits[: sum(row.wanted for row in rows)].float())

    def _warm_up(self) -> None:
        """Run a pass: compiling its attention takes seconds the first time, which no session should wait for."""
        slot = self.pool.new_slot()
        self.pool.reserve([(slot, 1)])
        self.run([NetRow(slot, 0, 0, self.stand_in, wanted=True)])
        slot.release()

    def _agreeing_sizes(self) -> tuple[int, ...]:
        """Return the sizes of passes whose rows agree bit for bit with those of the largest."""
        generator = torch.Generator().manual_seed(23)
        inputs = torch.randn(MAX_ROWS, 2 * self.hidden_size, generator=generator).to(self.dtype)
        parts = {size: [self._layer.products(part) for part in torch.split(inputs, size)] for size in _SIZES}
        [whole] = parts[MAX_ROWS]
        return tuple(size for size in _SIZES if torch.equal(torch.cat(parts[size]), whole))


class _Layer:
    """The arithmetic, in as few operations as there can be."""

    def __init__(self, draft: FeatureDraft, dtype: torch.dtype) -> None:
        shape = draft.shape
        self._head_dim, self._kv_heads = shape.head_dim, shape.num_kv_heads
        self._heads, self._turned = shape.num_heads, shape.num_heads + shape.num_kv_heads
        self._join = joining(draft, dtype)
        self._qkv, self._out = product(draft.qkv.weight, dtype), product(draft.out.weight, dtype)
        self._gate_up, self._down = product(draft.gate_up.weight, dtype), product(draft.down.weight, dtype)
        self.head = product(draft.head.weight, dtype)
        self._norms = [_Norm(norm, shape.rms_eps, dtype) for norm in (draft.norm_in, draft.norm_mid, draft.norm_out)]
        self._options = AttentionOptions(shape.head_dim**-0.5)

    def run(self, inputs: Tensor, rotation: tuple[Tensor, Tensor], plan: PassPlan) -> Tensor:
        """Return guesses [rows, hidden] for embeddings and features [rows, 2 * hidden]."""
        entered = self._join(inputs)
        projected = self._qkv(self._norms[0](entered)).view(len(inputs), -1, self._head_dim)
        cos, sin = rotation
        moving = projected[:, : self._turned]
        turned = torch.addcmul(moving * cos, moving.roll(self._head_dim // 2, -1), sin)
        query = turned[:, : self._heads].view(len(inputs), self._kv_heads, -1, self._head_dim)
        key_value = torch.cat((turned[:, self._heads :], projected[:, self._turned :]), dim=1)
        return self._leave(entered, attend(plan, 0, query, key_value, self._options))

    def products(self, inputs: Tensor) -> Tensor:
        """Return whatever depends on the number of rows of a pass, for [rows, 2 * hidden]."""
        with torch.inference_mode():
            entered = self._join(inputs)
            projected = self._qkv(self._norms[0](entered))
            guesses = self._leave(entered, projected[:, : self._heads * self._head_dim].contiguous())
            return torch.cat((projected, guesses, self.head(guesses)), dim=1)

    def _leave(self, entered: Tensor, attended: Tensor) -> Tensor:
        mixed = entered + self._out(attended)
        gate, up = self._gate_up(self._norms[1](mixed)).chunk(2, dim=-1)
        return self._norms[2](mixed + self._down(nn.functional.silu(gate) * up))


class _Norm(RmsNorm):
    """The target's way of norming, over a weight of the draft's."""

    def __init__(self, norm: nn.RMSNorm, epsilon: float, dtype: torch.dtype) -> None:
        stock: Any = nn.Module()
        stock.weight = norm.weight.detach().to(dtype)
        stock.variance_epsilon = epsilon
        super().__init__(stock)
