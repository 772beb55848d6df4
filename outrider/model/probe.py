"""Finds out, on this machine, which shapes of passes give bit-identical rows, and sets a runner up with them.

Matrix kernels choose their inner loops by the number of rows, so a row may come out with other bits in a pass of 1 than
in a pass of 8. The probe computes the same rows in passes of every candidate size, groups the sizes whose rows agree
bit for bit, and takes the largest group: small passes stay cheap, and nobody can tell which one was used. Attention is
probed by itself, over all key lengths its kernel treats differently. The choice is then checked under mixed sessions.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
import transformers
from torch import Tensor

from outrider.errors import FailedPrecondition
from outrider.ids import TokenClass
from outrider.model.attention import AttentionOptions, Group, GroupShape, PassPlan, Workspace, attend
from outrider.model.kv import KvCache
from outrider.model.planning import Layout, RowClasses
from outrider.model.runner import BLOCK_LEN, Feed, KvSlot, prefill_plan
from outrider.model.sharding import num_shards
from outrider.model.transformers_runner import TransformersRunner, kv_shapes

log = logging.getLogger(__name__)

CANDIDATES = (1, 2, 4, 8, 16, 32)
"""Row counts that are tried."""

ENGINE_VERSION = 7
"""Part of the fingerprint; raised whenever a change of this package's operations may change the bits of a row."""

_PROMPT_LEN = 40
_NUM_ROWS = 32
_NUM_FEW = 8
"""Rows tried in passes of one and two: more would cost a second and find nothing else."""
_FALLBACK = 16
"""The one row count used when no two agree."""
_WIDER = (BLOCK_LEN, 5 * BLOCK_LEN)
"""Keys by which attention calls are made wider than needed."""
_MAX_SPAN = 9 * BLOCK_LEN
"""Most keys of the attention probe."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What was found."""

    classes: RowClasses
    fingerprint: str
    """Of the engine: machine, libraries, dtype, threads, model shape, classes."""
    cached: bool
    """Whether an earlier run's result was used."""


def calibrate(runner: TransformersRunner, cache_dir: Path | None = None) -> ProbeReport:
    """Find the row classes of this machine and model and set the runner to them.

    Blocks for a second or two the first time; needs four free blocks and leaves no slot behind.

    Args:
        runner: Its slots, if any, must be fed again afterwards.
        cache_dir: Where results are kept between runs; None keeps nothing.

    Returns:
        The classes, which are also set.
    """
    key = engine_key(runner)
    path = cache_dir / "probe" / f"{key}.json" if cache_dir else None
    known = _read(path) if path else None
    classes = known or _find_classes(runner)
    fingerprint = _digest([key, asdict(classes)])
    runner.set_classes(classes, fingerprint)
    if path and not known:
        _write(path, classes)
    return ProbeReport(classes, fingerprint, known is not None)


def engine_key(runner: TransformersRunner) -> str:
    """Return a digest of everything but the classes that the bits of a row may depend on, weights excepted."""
    config = runner.model.config
    shape = {name: value for name, value in config.to_dict().items() if isinstance(value, int | float | str | list)}
    # Sums over ranks have another order than those of one.
    ranks = [num_shards(runner.model)] if num_shards(runner.model) > 1 else []
    return _digest([ENGINE_VERSION, _machine(runner), torch.__version__, transformers.__version__, runner.info.dtype,
                    torch.get_num_threads(), runner.fused, runner.layout.name, type(runner.model).__name__,
                    shape, *ranks])  # fmt: skip


def _machine(runner: TransformersRunner) -> list[str]:
    """Name the instruction set, or the GPU, that the model runs on."""
    if runner.device.type == "cuda":
        return [torch.cuda.get_device_name(runner.device)]
    flags = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(flags.split())]


def _find_classes(runner: TransformersRunner) -> RowClasses:
    """Probe attention, then row counts, then the prompt class; verify."""
    # Rows that are attended to one by one know no tiles.
    by_rows = runner.layout is Layout.RUNS
    tiles, items_mix, spans_mix = (CANDIDATES, True, True) if by_rows else _probe_attention(runner)
    found = RowClasses((_FALLBACK,), tiles, items_mix, spans_mix)
    rows = _agreeing(lambda count: _rows_by(runner, replace(found, rows=(count,)), count))
    alone = RowClasses((_FALLBACK,), (_FALLBACK,), items_mix=False, spans_mix=False)
    for choice in (replace(found, rows=rows), found, alone):
        if _is_invariant(runner, choice):
            # Attention by rows sums in another order than a prompt pass does: a few rows that agree prove nothing.
            return replace(choice, classes_differ=by_rows or _prompt_differs(runner, choice))
    return replace(alone, exactness="distribution")


def _probe_attention(runner: TransformersRunner) -> tuple[tuple[int, ...], bool, bool]:
    """Return the tiles that agree, whether items may share a call, and whether a call may be wider than needed."""
    layer = _AttentionProbe(runner)
    tiles = _agreeing(layer.rows)
    ends = [(tile, layer.rows(tile)) for tile in {tiles[0], tiles[-1]}]
    items_mix = all(torch.equal(rows, layer.rows(tile, stacked=True)) for tile, rows in ends)
    spans_mix = all(torch.equal(rows, layer.rows(tile, wider=extra)) for tile, rows in ends for extra in _WIDER)
    return tiles, items_mix, spans_mix


class _AttentionProbe:
    """Attention of the first layer's shape over random keys.

    Lengths go past 512 keys, where the CPU's flash kernel starts another block, so that every width of a last block and
    both counts of blocks occur.
    """

    def __init__(self, runner: TransformersRunner) -> None:
        config = runner.model.config
        kv_heads, dim = kv_shapes(runner.model)[0]
        generator = torch.Generator().manual_seed(22)
        self._device = runner.device
        self._kv = KvCache([(kv_heads, dim)], _MAX_SPAN // BLOCK_LEN, runner.dtype, runner.device)
        self._kv.layers[0].copy_(torch.randn(self._kv.layers[0].shape, generator=generator))
        ways = int(config.num_attention_heads) // num_shards(runner.model) // kv_heads
        query = torch.randn(_NUM_ROWS, kv_heads, ways, dim, generator=generator)
        self._query = query.to(runner.device, runner.dtype)
        softcap = float(getattr(config, "attn_logit_softcapping", None) or 0.0)
        self._options = AttentionOptions(dim**-0.5, 0, softcap)

    @torch.inference_mode()
    def rows(self, tile: int, *, stacked: bool = False, wider: int = 0) -> Tensor:
        """Return outputs of the last 32 positions of every length: [rows, width].

        Args:
            tile: Rows of an item.
            stacked: Whether all items share a call, among keys that are not theirs; else each has its own.
            wider: Keys of a call beyond those needed.
        """
        outputs = []
        for span in range(BLOCK_LEN, _MAX_SPAN + 1, BLOCK_LEN):
            items = _NUM_ROWS // tile if stacked else 1
            groups = [
                self._group(first, GroupShape(items, tile, span + wider), span)
                for first in range(0, _NUM_ROWS, items * tile)
            ]
            plan = PassPlan(self._kv, self._empty(), groups, self._numbers(range(_NUM_ROWS)), Workspace())
            outputs.append(attend(plan, 0, self._query, self._kv.layers[0][:0], self._options))
        return torch.cat(outputs)

    def _group(self, first: int, shape: GroupShape, span: int) -> Group:
        """Return a call for the rows from `first` on, the last 32 positions of a span."""
        rows = range(first, first + shape.items * shape.tile)
        positions = [span - _NUM_ROWS + row for row in rows]
        own = list(range(span // BLOCK_LEN))
        blocks = own + own[-1:] * ((shape.span - span) // BLOCK_LEN)
        return Group(shape, self._numbers(rows), self._numbers(positions), self._numbers(blocks * shape.items))

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)

    def _empty(self) -> Tensor:
        return self._numbers(())


def _agreeing(rows_of: Callable[[int], Tensor]) -> tuple[int, ...]:
    """Return the largest group of candidates whose rows agree; of equal groups the one with the larger sizes."""
    results = {size: rows_of(size) for size in CANDIDATES}
    groups = [
        tuple(size for size in CANDIDATES if _same(results[size], results[leader])) for leader in reversed(CANDIDATES)
    ]
    best = max(groups, key=len)
    return best if len(best) > 1 else (_FALLBACK,)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the rows that both have are bit-identical."""
    count = min(len(ours), len(theirs))
    return torch.equal(ours[:count], theirs[:count])


def _rows_by(runner: TransformersRunner, classes: RowClasses, run: int) -> Tensor:
    """Return rows of one session fed in runs of `run` tokens, across a block border: [rows, vocab]."""
    runner.set_classes(classes, "")
    total = _NUM_FEW if run < 4 else _NUM_ROWS
    ids = _token_ids(runner, _PROMPT_LEN + total)
    slot = _prefilled(runner, ids[:_PROMPT_LEN])
    rows = [_decode(runner, slot, ids[start : start + run]) for start in range(_PROMPT_LEN, len(ids), run)]
    runner.free_slot(slot)
    return torch.cat(rows)


def _is_invariant(runner: TransformersRunner, classes: RowClasses) -> bool:
    """Whether rows stay the same with odd run lengths and with neighbours before and behind them in the pass."""
    whole = _rows_by(runner, classes, _NUM_ROWS)
    odd = _rows_by(runner, classes, 5)
    return _same(whole, odd) and _same(whole, _rows_beside_neighbours(runner, classes))


def _rows_beside_neighbours(runner: TransformersRunner, classes: RowClasses) -> Tensor:
    """Return the same rows as `_rows_by`, fed three at a time between rows of a shorter and of a longer session."""
    runner.set_classes(classes, "")
    ids = _token_ids(runner, BLOCK_LEN + _NUM_FEW)
    mine = ids[: _PROMPT_LEN + _NUM_FEW + 1]
    slot, short, long = (_prefilled(runner, part) for part in (ids[:_PROMPT_LEN], ids[1:5], ids))
    rows = []
    for start in range(_PROMPT_LEN, len(mine), 3):
        run = mine[start : start + 3]
        feeds = [
            Feed(short, ids[:2], TokenClass.DECODE, 2),
            Feed(slot, run, TokenClass.DECODE, len(run)),
            Feed(long, ids[:1], TokenClass.DECODE, 1),
        ]
        rows.append(runner.forward(feeds)[1].logits)
    for each in (slot, short, long):
        runner.free_slot(each)
    return torch.cat(rows)


def _prompt_differs(runner: TransformersRunner, classes: RowClasses) -> bool:
    """Whether a token fed as PROMPT may leave other bits than the same token fed as DECODE."""
    runner.set_classes(classes, "")
    ids = _token_ids(runner, _PROMPT_LEN + _NUM_FEW)
    slot = runner.new_slot()
    prompt = runner.forward([Feed(slot, ids, TokenClass.PROMPT, len(ids))])[0].logits
    slot.truncate(0)
    decode = _decode(runner, slot, ids)
    runner.free_slot(slot)
    return not torch.equal(prompt, decode)


def _prefilled(runner: TransformersRunner, ids: Sequence[int]) -> KvSlot:
    slot = runner.new_slot()
    for start, end in prefill_plan(0, len(ids)):
        runner.forward([Feed(slot, tuple(ids[start:end]), TokenClass.PROMPT, 0)])
    return slot


def _decode(runner: TransformersRunner, slot: KvSlot, ids: Sequence[int]) -> Tensor:
    return runner.forward([Feed(slot, tuple(ids), TokenClass.DECODE, len(ids))])[0].logits


def _token_ids(runner: TransformersRunner, count: int) -> tuple[int, ...]:
    """Return the first `count` of a fixed sequence of ids."""
    generator = torch.Generator().manual_seed(20)
    return tuple(torch.randint(0, runner.info.vocab_size, (4 * BLOCK_LEN,), generator=generator)[:count].tolist())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> RowClasses | None:
    """Return a kept result, or None when there is none that can be read."""
    try:
        data = json.loads(path.read_text())
        rows, tiles = tuple(map(int, data["rows"])), tuple(map(int, data["tiles"]))
        mixes = bool(data["items_mix"]), bool(data["spans_mix"])
        return RowClasses(rows, tiles, *mixes, str(data["exactness"]), bool(data["classes_differ"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, classes: RowClasses) -> None:
    """Keep a result, where there is a place for it; readers see all of it or nothing."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(classes)))
        part.replace(path)
    except OSError as error:  # a volume of models may be read-only; probing again takes seconds
        log.info("what the probe found is not kept: %s", error)


class StockCheck:
    """Guards against computing another function than the model's own: compares with its stock forward."""

    _LIMITS: ClassVar = {torch.float32: 1e-3, torch.float64: 1e-6}
    """Root mean square of the difference over the standard deviation of the logits; 16-bit types: 0.15."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        """Run the stock forward; before a runner takes the model over.

        Args:
            model: As loaded.
        """
        count = min(BLOCK_LEN + 16, int(getattr(model.config, "max_position_embeddings", 0) or BLOCK_LEN + 16))
        generator = torch.Generator().manual_seed(21)
        self._ids = torch.randint(0, int(model.config.vocab_size), (count,), generator=generator)
        with torch.inference_mode():
            device = next(model.parameters()).device
            self._stock = model(self._ids[None].to(device), use_cache=False).logits[0].float().cpu()
        self._limit = self._LIMITS.get(next(model.parameters()).dtype, 0.15)

    def verify(self, runner: TransformersRunner) -> float:
        """Compare.

        Args:
            runner: Of the same model.

        Returns:
            The relative difference found.

        Raises:
            FailedPrecondition: It is more than rounding explains.
        """
        slot, rows = runner.new_slot(), []
        for start, end in prefill_plan(0, len(self._ids)):
            ids = tuple(self._ids[start:end].tolist())
            rows.append(runner.forward([Feed(slot, ids, TokenClass.PROMPT, len(ids))])[0].logits)
        runner.free_slot(slot)
        error = float((torch.cat(rows) - self._stock).pow(2).mean().sqrt() / self._stock.std())
        if not error < self._limit:
            raise FailedPrecondition(
                f"{runner.info.name}: rows over the block pool differ from the model's own by {error:.3g} of their "
                f"spread (at most {self._limit:g} is rounding): the model has a feature that is not supported"
            )
        return error
