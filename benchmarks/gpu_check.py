"""Checks the GPU path where there is a GPU, and prints what passes cost there: `python -m benchmarks.gpu_check`.

Builds a Llama of several billion random parameters on the device from a configuration, so that no weights travel, and

1. compares its rows with the model's own forward, and probes row classes;
2. runs every pass of a random schedule from its recording and anew, and compares bits;
3. compares greedy texts under random grouping with those of sessions that ran alone, token by token;
4. prints the seconds of a pass by rows and by sessions.

`--device cpu --tiny` does the same with a model of a few kilobytes in seconds; there a recording runs the operations
again over its buffers instead of replaying a graph.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import facts
from benchmarks.results import facts_list, table, write
from outrider.ids import TokenClass
from outrider.model.decoders import PassOutput
from outrider.model.loader import DTYPES
from outrider.model.planning import Layout, PassShape
from outrider.model.probe import ProbeReport, StockCheck, calibrate
from outrider.model.recording import RecordedPasses
from outrider.model.runner import Feed, KvSlot, prefill_plan
from outrider.model.tiny import random_model
from outrider.model.transformers_runner import TransformersRunner

LARGE = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Eight billion parameters in the shape of a common model."""

SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 1), (4, 1), (8, 1), (8, 4), (16, 1), (16, 2), (32, 1))
"""(sessions, rows of each) of the passes that are timed."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is checked."""

    num_sessions: int
    num_tokens: int
    prompt_len: int
    timed_len: int
    """KV length of the sessions whose passes are timed."""
    repetitions: int


@dataclass(slots=True)
class Comparing:
    """Runs every pass from its recording and anew."""

    recorded: RecordedPasses
    num_passes: int = 0
    differing: list[PassShape] = field(default_factory=list)

    def run(self, shape: PassShape, numbers: list[int]) -> PassOutput | None:
        """Run a pass twice; what it writes is the same both times."""
        anew = self.recorded.anew.run(shape, numbers)
        output = self.recorded.run(shape, numbers)
        self.num_passes += 1
        if anew is not None and output is not None and not _equal(anew, output):
            self.differing.append(shape)
        return output


def _equal(one: PassOutput, other: PassOutput) -> bool:
    return torch.equal(one.logits, other.logits) and torch.equal(one.hidden, other.hidden)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; return 0 if they hold.

    Args:
        argv: The command line.
    """
    asked = _arguments(argv)
    size = Size(4, 24, 20, 150, 2) if asked.tiny else Size(8, 96, 100, 1000, 20)
    runner, error = _open(asked, size)
    report = calibrate(runner)
    passes = cast(RecordedPasses, runner.passes)
    print(f"rows over the pool differ from the model's own by {error:.2g} of their spread")
    print(f"classes: {report.classes}")
    texts = _alone(runner, size)
    comparing = Comparing(passes)
    runner.passes = comparing
    wrong = _grouped(runner, texts, size)
    runner.passes = passes
    print(f"recording against anew: {comparing.num_passes} passes, {len(comparing.differing)} differ")
    print(f"grouped at random against alone: {len(texts)} texts, {wrong} differ")
    rows = _times(runner, size)
    print(table(HEADER, rows))
    if asked.write:
        checks = {"passes": comparing.num_passes, "differ": len(comparing.differing), "texts": len(texts),
                  "texts_differ": wrong, "difference": error}  # fmt: skip
        _write(asked.write, runner, report, checks, rows)
    return int(bool(comparing.differing or wrong or report.classes.exactness != "bitwise"))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes")
    parser.add_argument("--layers", type=int, default=0, help="of the large model; 0: all 32")
    parser.add_argument("--write", default="", help="name of the result files; empty: print only")
    return parser.parse_args(argv)


def _open(asked: argparse.Namespace, size: Size) -> tuple[TransformersRunner, float]:
    """Return a runner of recorded passes over a random model, and its difference from the stock forward."""
    model: Any
    if asked.tiny:
        model = random_model(dtype=DTYPES[asked.dtype]).to(asked.device)
    else:
        fields = LARGE | ({"num_hidden_layers": asked.layers} if asked.layers else {})
        torch.set_default_dtype(DTYPES[asked.dtype])
        try:
            with torch.device(asked.device):
                model = LlamaForCausalLM(LlamaConfig(**cast(Any, fields)))
        finally:
            torch.set_default_dtype(torch.float32)
    model.requires_grad_(False).train(False)
    stock = StockCheck(model)
    blocks = 2 * max(32, size.num_sessions) * (size.timed_len // 64 + 2)
    runner = TransformersRunner(model, name="random", num_blocks=blocks, layout=Layout.FIXED)
    return runner, stock.verify(runner)


def _alone(runner: TransformersRunner, size: Size) -> list[list[int]]:
    """Return prompts followed by greedy texts of sessions that run alone, token by token."""
    chooser = random.Random(7)
    texts = []
    for _ in range(size.num_sessions):
        length = chooser.randrange(2, 2 * size.prompt_len)
        ids = [chooser.randrange(runner.info.vocab_size) for _ in range(length)]
        slot = _prefilled(runner, ids[:-1])
        for _ in range(size.num_tokens):
            ids += _best(runner, [(slot, ids[-1:])])[0]
        runner.free_slot(slot)
        texts.append([length, *ids])
    return texts


def _grouped(runner: TransformersRunner, texts: list[list[int]], size: Size) -> int:
    """Decode the same texts under a random schedule of sessions and runs; return how many differ.

    Runs are guesses that are right as often as not; what is right up to the first mistake stays.
    """
    chooser = random.Random(8)
    expected = [text[1:] for text in texts]
    ids = [text[1 : 1 + text[0]] for text in texts]
    slots = [_prefilled(runner, own[:-1]) for own in ids]
    ends = [text[0] + size.num_tokens for text in texts]
    while going := [at for at in range(len(texts)) if len(ids[at]) < ends[at]]:
        chosen = chooser.sample(going, chooser.randint(1, len(going)))
        runs = {at: _guesses(chooser, expected[at], len(ids[at])) for at in chosen}
        found = _best(runner, [(slots[at], [ids[at][-1], *runs[at]]) for at in chosen])
        for at, best in zip(chosen, found, strict=True):
            right = next((n for n, guess in enumerate(runs[at]) if guess != best[n]), len(runs[at]))
            ids[at] += best[: right + 1]
            slots[at].truncate(len(ids[at]) - 1)
    for slot in slots:
        runner.free_slot(slot)
    return sum(own[:end] != text[:end] for own, text, end in zip(ids, expected, ends, strict=True))


def _guesses(chooser: random.Random, text: list[int], start: int) -> list[int]:
    """Return up to seven guesses of what follows, some of them wrong."""
    count = chooser.randint(0, 7)
    return [token if chooser.random() < 0.8 else (token + 1) % 500 for token in text[start : start + count]]


def _best(runner: TransformersRunner, runs: Sequence[tuple[KvSlot, Sequence[int]]]) -> list[list[int]]:
    """Feed runs; return the likeliest next ids of all their tokens."""
    bound = runner.info.vocab_size
    feeds = [Feed(slot, tuple(ids), TokenClass.DECODE, len(ids), best_below=bound) for slot, ids in runs]
    return [cast(torch.Tensor, rows.best).tolist() for rows in runner.forward(feeds)]


def _prefilled(runner: TransformersRunner, ids: Sequence[int]) -> KvSlot:
    slot = runner.new_slot()
    for start, end in prefill_plan(0, len(ids)):
        runner.forward([Feed(slot, tuple(ids[start:end]), TokenClass.PROMPT, 0)])
    return slot


HEADER = ("sessions", "rows each", "greedy: ms", "with all logits: ms")


def _times(runner: TransformersRunner, size: Size) -> list[list[object]]:
    """Return medians of passes, from feeds to tokens on the CPU."""
    chooser = random.Random(9)
    ids = [chooser.randrange(runner.info.vocab_size) for _ in range(size.timed_len)]
    slots = [_prefilled(runner, ids) for _ in range(max(sessions for sessions, _ in SHAPES))]
    rows: list[list[object]] = []
    for sessions, each in SHAPES:
        cells: list[object] = [sessions, each]
        for bound in (runner.info.vocab_size, 0):
            run = tuple(ids[:each])
            feeds = [Feed(slot, run, TokenClass.DECODE, each, best_below=bound) for slot in slots[:sessions]]
            cells.append(f"{1000 * _median_s(runner, feeds, size):.2f}")
        rows.append(cells)
    for slot in slots:
        runner.free_slot(slot)
    return rows


def _median_s(runner: TransformersRunner, feeds: Sequence[Feed], size: Size) -> float:
    """Return the median seconds of one call; what it fetches waits for the device."""
    taken = []
    for number in range(size.repetitions + 2):
        start_s = time.perf_counter()
        runner.forward(feeds)
        # The first calls record.
        if number >= 2:
            taken.append(time.perf_counter() - start_s)
        for feed in feeds:
            feed.slot.truncate(size.timed_len)
    return statistics.median(taken)


def _write(
    name: str, runner: TransformersRunner, report: ProbeReport, checks: dict[str, Any], rows: list[list[object]]
) -> None:
    """Write the result files."""
    machine = facts() | {"device": str(runner.device)}
    if runner.device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(runner.device)
    data = {"machine": machine, "classes": str(report.classes), "checks": checks, "header": HEADER, "passes": rows}
    lines = [f"- {key}: {value}" for key, value in checks.items()]
    page = "\n\n".join(
        ["# The GPU path, checked", facts_list(machine), f"{report.classes}", "\n".join(lines), table(HEADER, rows)]
    )
    write(name, data, page + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
