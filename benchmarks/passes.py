"""What a pass of the model costs, and how far that is from the limit: `python -m benchmarks.passes`.

Everything runs on one thread. The first figure is that thread's CPU time, which does not count what other programs on
the machine take away; the clock's time is given beside it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.machine import facts
from benchmarks.results import facts_list, table, write
from outrider.ids import TokenClass
from outrider.model.fused import FusedLayer
from outrider.model.loader import load
from outrider.model.names import DEFAULT_MODEL, ModelSpec
from outrider.model.opening import open_model
from outrider.model.packed import PackedLinear
from outrider.model.runner import Feed, KvSlot, prefill_plan
from outrider.model.transformers_runner import TransformersRunner

KV_LEN = 200
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (4, 4), (8, 4))
"""(sessions, rows of each)"""
DRAFTS = ((0, 1, 28, 29), (0, 1, 2, 3, 26, 27, 28, 29))
"""Layers of the drafts that are timed: what matters is how many."""
BATCH = 8


@dataclass(slots=True)
class Timing:
    """Repetitions of one thing."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def add(self, work: Callable[[], object]) -> None:
        """Run and time once."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        work()
        self.cpu_s.append(time.thread_time() - cpu_s)
        self.wall_s.append(time.perf_counter() - wall_s)

    @property
    def ms(self) -> float:
        """Median milliseconds of CPU time."""
        return 1000 * statistics.median(self.cpu_s)

    @property
    def cell(self) -> str:
        """Median and quartiles of CPU time, and the median by the clock, in milliseconds."""
        low, _, high = statistics.quantiles(self.cpu_s, n=4)
        return f"{self.ms:.1f} ({1000 * low:.1f}-{1000 * high:.1f}; clock {1000 * statistics.median(self.wall_s):.1f})"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do on one thread."""

    bytes_per_s: float
    flops_per_s: float

    def pass_ms(self, weight_bytes: int, num_weights: int, rows: int) -> float:
        """Return the least time of a pass: all weights read once, or all products done."""
        return 1000 * max(weight_bytes / self.bytes_per_s, 2 * num_weights * rows / self.flops_per_s)


class Bench:
    """A runner with sessions of one length."""

    def __init__(self, runner: TransformersRunner, kv_len: int) -> None:
        self.runner = runner
        self.kv_len = kv_len
        self.slots = [self._filled(shift) for shift in range(max(sessions for sessions, _ in SHAPES))]

    def _filled(self, shift: int) -> KvSlot:
        slot = self.runner.new_slot()
        for start, end in prefill_plan(0, self.kv_len):
            ids = tuple((shift + place) * 37 % self.runner.info.vocab_size for place in range(start, end))
            self.runner.forward([Feed(slot, ids, TokenClass.PROMPT, 0)])
        return slot

    def run(self, sessions: int, rows: int) -> None:
        """Run one pass and roll it back."""
        run = tuple(range(5, 5 + rows))
        self.runner.forward([Feed(slot, run, TokenClass.DECODE, rows) for slot in self.slots[:sessions]])
        for slot in self.slots[:sessions]:
            slot.truncate(self.kv_len)

    def decode(self, sessions: int, steps: int) -> None:
        """Decode greedily, all sessions in every pass, and roll back."""
        last = [5] * sessions
        bound = self.runner.info.vocab_size
        for _ in range(steps):
            feeds = [
                Feed(slot, (token,), TokenClass.DECODE, 1, best_below=bound)
                for slot, token in zip(self.slots, last, strict=False)
            ]
            last = [int(cast(Tensor, rows.best)[0]) for rows in self.runner.forward(feeds)]
        for slot in self.slots[:sessions]:
            slot.truncate(self.kv_len)


@torch.inference_mode()
def products(runner: TransformersRunner, rows: int) -> Callable[[], None]:
    """Return all matrix products of a pass of `rows` rows, and nothing else."""
    base = cast(Any, runner.model.base_model)
    linears: list[nn.Module] = []
    for layer in cast("list[FusedLayer]", list(base.layers)):
        linears += [layer.qkv, layer.out, layer.gate_up, layer.down]
    linears.append(cast(Any, runner.model).get_output_embeddings())
    given = [torch.randn(rows, cast(int, linear.in_features)).to(runner.dtype) for linear in linears]

    def work() -> None:
        with torch.inference_mode():
            for linear, numbers in zip(linears, given, strict=True):
                linear(numbers)

    return work


def num_weights(runner: TransformersRunner) -> int:
    """Return how many weights the products of a pass read."""
    base, head = cast(Any, runner.model.base_model), cast(Any, runner.model).get_output_embeddings()
    linears = [module for module in base.modules() if isinstance(module, nn.Linear | PackedLinear)]
    return sum(linear.in_features * linear.out_features for linear in [*linears, head])


@torch.inference_mode()
def machine_limits(dtype: torch.dtype) -> Limits:
    """Measure the best of some large products, and of reading a matrix too large for the caches."""
    large = nn.Linear(4096, 32_768, bias=False).to(dtype).requires_grad_(False)
    wide = nn.Linear(1024, 1024, bias=False).to(dtype).requires_grad_(False)
    reading, working = PackedLinear(large), PackedLinear(wide)
    one, many = torch.randn(1, 4096).to(dtype), torch.randn(512, 1024).to(dtype)
    read_s, work_s = Timing(), Timing()
    for _ in range(9):
        read_s.add(lambda: reading(one))
        work_s.add(lambda: working(many))
    size = large.weight.numel()
    return Limits(size * dtype.itemsize / min(read_s.cpu_s), 2 * 512 * wide.weight.numel() / min(work_s.cpu_s))


def pass_table(bench: Bench, limits: Limits, repetitions: int) -> list[list[object]]:
    """Time passes of all shapes and their products in turn."""
    runner = bench.runner
    sizes = {shape: next(size for size in runner.info.row_classes if size >= shape[0] * shape[1]) for shape in SHAPES}
    works = {size: products(runner, size) for size in set(sizes.values())}
    passes = {shape: Timing() for shape in SHAPES}
    bare = {size: Timing() for size in works}
    for _ in range(repetitions):
        for shape, timing in passes.items():
            timing.add(lambda shape=shape: bench.run(*shape))  # type: ignore[misc]
        for size, timing in bare.items():
            timing.add(works[size])
    weights = num_weights(runner)
    rows: list[list[object]] = []
    for shape, timing in passes.items():
        inner = bare[sizes[shape]].ms
        least = limits.pass_ms(weights * runner.dtype.itemsize, weights, sizes[shape])
        rows.append([*shape, timing.cell, f"{timing.ms / passes[1, 1].ms:.2f}", f"{inner:.1f}",
                     f"{inner / timing.ms:.0%}", f"{least:.1f}", f"{least / timing.ms:.0%}"])  # fmt: skip
    return rows


def speed_table(bench: Bench, dtype: str, repetitions: int, steps: int) -> list[list[object]]:
    """Compare plain decoding with `transformers`' generate, one session and several, in turn."""
    model, _ = load(ModelSpec(DEFAULT_MODEL, dtype))
    arms = {
        "ours, 1 session": (1, lambda: bench.decode(1, steps)),
        "generate, 1 session": (1, lambda: _generate(model, bench.kv_len, 1, steps)),
        f"ours, {BATCH} sessions": (BATCH, lambda: bench.decode(BATCH, steps)),
        f"generate, batch of {BATCH}": (BATCH, lambda: _generate(model, bench.kv_len, BATCH, steps)),
    }
    prefills = {1: Timing(), BATCH: Timing()}
    timings = {name: Timing() for name in arms}
    for _ in range(repetitions):
        for name, (_, work) in arms.items():
            timings[name].add(work)
        for batch, timing in prefills.items():
            timing.add(lambda batch=batch: _generate(model, bench.kv_len, batch, 1))  # type: ignore[misc]
    rates = {}
    for name, (batch, _) in arms.items():
        # generate begins with a pass over the prompt that gives the first token: it is taken off.
        own = name.startswith("ours")
        spent_ms = timings[name].ms - (0.0 if own else prefills[batch].ms)
        rates[name] = 1000 * batch * (steps if own else steps - 1) / spent_ms
    first = next(iter(rates.values()))
    return [[name, f"{rate:.1f}", f"{rate / first:.2f}", timings[name].cell] for name, rate in rates.items()]


@torch.inference_mode()
def _generate(model: Any, prompt_len: int, batch: int, steps: int) -> None:
    ids = torch.arange(batch * prompt_len).view(batch, prompt_len) * 37 % 40_000 + 5
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=steps,
                   min_new_tokens=steps, pad_token_id=0)  # fmt: skip


def draft_table(dtype: str, repetitions: int) -> list[list[object]]:
    """Time a token step of drafts of a few layers."""
    rows: list[list[object]] = []
    for layers in DRAFTS:
        bench = Bench(_runner(dtype, layers), KV_LEN)
        bare = products(bench.runner, bench.runner.info.row_classes[0])
        one, several, inner = Timing(), Timing(), Timing()
        for _ in range(repetitions):
            one.add(lambda bench=bench: bench.run(1, 1))  # type: ignore[misc]
            several.add(lambda bench=bench: bench.run(BATCH, 1))  # type: ignore[misc]
            inner.add(bare)
        rows.append([len(layers), one.cell, f"{inner.ms:.2f}", several.cell])
    return rows


def _runner(dtype: str, layers: tuple[int, ...] | None = None) -> TransformersRunner:
    return cast(TransformersRunner, open_model(ModelSpec(DEFAULT_MODEL, dtype, layers), num_blocks=192).runner)


PASS_HEADER = ("sessions", "rows each", "pass, ms", "to one row", "products, ms", "share", "limit, ms", "reached")
SPEED_HEADER = ("arm", "tokens/s", "to ours, 1 session", "ms of a run")
DRAFT_HEADER = ("layers", "1 session, ms", "its products, ms", f"{BATCH} sessions, ms")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(prog="benchmarks.passes", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24, help="tokens of a run of decoding")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--name", default="passes")
    parser.add_argument("--quick", action="store_true", help="few repetitions; under another name")
    asked = parser.parse_args(argv)
    if asked.quick:
        asked.repetitions, asked.steps, asked.name = 2, 8, f"{asked.name}_quick"
    machine = facts()
    torch.set_num_threads(1)
    limits = machine_limits(getattr(torch, asked.dtype))
    bench = Bench(_runner(asked.dtype), KV_LEN)
    tables = {
        "Passes": (PASS_HEADER, pass_table(bench, limits, asked.repetitions)),
        "Plain decoding": (SPEED_HEADER, speed_table(bench, asked.dtype, max(3, asked.repetitions // 3), asked.steps)),
        "Token steps of drafts": (DRAFT_HEADER, draft_table(asked.dtype, asked.repetitions)),
    }
    how = (
        f"{DEFAULT_MODEL}, {asked.dtype}, one thread, {KV_LEN} tokens of KV, all logits fetched; medians of "
        f"{asked.repetitions} repetitions in turn, CPU time of the thread, quartiles in brackets. Limit: all weights "
        f"read at {limits.bytes_per_s / 1e9:.1f} GB/s or all products at {limits.flops_per_s / 1e9:.0f} GFLOP/s, "
        "the best that large products reach here. Products: those of the pass, padding included, run alone."
    )
    parts = [f"## {name}\n\n{table(header, rows)}" for name, (header, rows) in tables.items()]
    page = "\n\n".join(["# What a pass costs", how, *parts, "## Machine", facts_list(machine)]) + "\n"
    print(page)
    data = {"machine": machine, "how": how} | {
        name: [dict(zip(header, row, strict=True)) for row in rows] for name, (header, rows) in tables.items()
    }
    write(asked.name, data, page)


if __name__ == "__main__":
    main()
