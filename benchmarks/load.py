"""Many sessions at once: `python -m benchmarks.load`.

1 to 32 sessions through a cluster, plain, with a fixed plan and with what the policy chooses, beside `transformers`
decoding as many prompts as one batch. Nothing that was computed before is used again, so every arm reads its prompts.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import median

from rich.console import Console

from benchmarks.drafts import PROMPT_LOOKUP
from benchmarks.machine import facts
from benchmarks.one_process import OneProcess, Steps
from benchmarks.prompt_set import load_prompts
from benchmarks.results import facts_list, table, write
from benchmarks.serving import Cores, pinned, real_specs
from benchmarks.watching import Watched, percentiles, times_per_token, watch
from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.generation import ChatPrompt, GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams

DTYPE = "bfloat16"
LEVELS = (1, 2, 4, 8, 16, 32)
QUICK_LEVELS = (1, 4)
NUM_TOKENS = 48
KINDS = ("chat", "edit", "prose", "summarise", "translate", "answer", "code")
GREEDY = SamplingParams(temperature=0.0)
OFF = SpeculationChoice(off=True)
FIXED = SpeculationChoice(gamma=4, restart_gamma=3, window=8)
AUTOMATIC = SpeculationChoice()

HOW = """Every level starts so many sessions at the same moment and waits for the last; {tokens} tokens each, greedy,
{dtype}; prompts of these kinds in turn: {kinds}; the same in every arm; no KV is
reused. tokens/s: all tokens by all the time, reading the prompts included; median of {repetitions} repetitions
in turn, lowest and highest in brackets. Time to the first token and time per later token (a chunk's time shared by its
tokens) over all sessions and repetitions. The verifier has core {verify}, one thread; draft worker (prompt lookup),
orchestrator, store and client share core {draft}. "both cores": two threads on both, and nothing drafts. fixed: first
proposal 3 tokens, later ones 4. `transformers`: one process, the prompts padded to one batch, on the verifier's core or
on both; it has no store, no streams and no clients."""

console = Console(highlight=False, width=200)


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition of one level."""

    seconds: float
    num_tokens: int
    first_s: list[float]
    per_token_s: list[float]
    num_rounds: int = 0
    num_tested: int = 0
    num_accepted: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second over all sessions."""
        return self.num_tokens / self.seconds


@dataclass(slots=True)
class LoadArm:
    """A way of decoding."""

    name: str
    run: Callable[[int], Awaitable[Run]]
    """Decodes for so many sessions."""
    runs: dict[int, list[Run]] = field(default_factory=dict)
    """By level."""

    def rate(self, level: int) -> float:
        """Median tokens per second."""
        return median(run.rate for run in self.runs[level])


async def measure(levels: Sequence[int], kinds: Sequence[str], repetitions: int, cores: Cores) -> list[LoadArm]:
    """Run all arms in turn, level by level, after a round that warms up."""
    async with AsyncExitStack() as stack:
        console.print("starting clusters and processes")
        narrow = await _cluster(stack, real_specs(DTYPE, (PROMPT_LOOKUP,), cores=cores))
        wide_cores = Cores(cores.both, "", cores.orchestrate)
        wide = await _cluster(stack, real_specs(DTYPE, (), threads=2, cores=wide_cores))
        one_core = await stack.enter_async_context(OneProcess(cores.verify, 1))
        two_cores = await stack.enter_async_context(OneProcess(cores.both, 2))
        arms = [
            LoadArm("plain", _served(narrow, OFF, kinds)),
            LoadArm("fixed", _served(narrow, FIXED, kinds)),
            LoadArm("automatic", _served(narrow, AUTOMATIC, kinds)),
            LoadArm("plain, both cores", _served(wide, OFF, kinds)),
            LoadArm("transformers", _batched(one_core, kinds)),
            LoadArm("transformers, both cores", _batched(two_cores, kinds)),
        ]
        for arm in arms:
            await arm.run(2)
        for number in range(repetitions):
            for level in levels:
                console.print(f"repetition {number + 1} of {repetitions}, {level} sessions")
                for arm in arms:
                    arm.runs.setdefault(level, []).append(await arm.run(level))
        return arms


async def _cluster(stack: AsyncExitStack, specs: Sequence[ServiceSpec]) -> Client:
    cold = [_without_reuse(spec) for spec in specs]
    cluster = await stack.enter_async_context(LocalCluster(cold))
    return await stack.enter_async_context(Client(cluster.address))


def _without_reuse(spec: ServiceSpec) -> ServiceSpec:
    names = {"verify": "OUTRIDER_VERIFY_PREFIX_REUSE", "draft": "OUTRIDER_DRAFT_PREFIX_REUSE"}
    if spec.role not in names:
        return spec
    return replace(spec, settings={**spec.settings, names[spec.role]: "false"})


def _served(client: Client, choice: SpeculationChoice, kinds: Sequence[str]) -> Callable[[int], Awaitable[Run]]:
    async def run(level: int) -> Run:
        requests = [
            GenerationRequest(
                prompt, max_tokens=NUM_TOKENS, sampling=GREEDY, speculation=choice, drafter=PROMPT_LOOKUP,
                ignore_eos=True,
            )
            for prompt in _prompts(level, kinds)
        ]  # fmt: skip
        started_s = time.perf_counter()
        seen = await asyncio.gather(*(watch(client, request) for request in requests))
        return _run_of(seen, time.perf_counter() - started_s)

    return run


def _run_of(seen: Sequence[Watched], seconds: float) -> Run:
    totals = [
        sum(getattr(each.figures, name) for each in seen) for name in ("num_rounds", "num_tested", "num_accepted")
    ]
    per_token_s = [share for each in seen for share in times_per_token(each.times_s, each.counts)]
    num_tokens = sum(sum(each.counts) for each in seen)
    return Run(seconds, num_tokens, [each.first_s for each in seen], per_token_s, *totals)


def _batched(process: OneProcess, kinds: Sequence[str]) -> Callable[[int], Awaitable[Run]]:
    async def run(level: int) -> Run:
        steps: Steps = await process.generate(_prompts(level, kinds), NUM_TOKENS)
        first_s = [steps.times_s[0] - steps.started_s] * level
        per_token_s = times_per_token(steps.times_s, steps.counts) * level
        return Run(steps.times_s[-1] - steps.started_s, level * sum(steps.counts), first_s, per_token_s)

    return run


def _prompts(level: int, kinds: Sequence[str]) -> list[TextPrompt | ChatPrompt]:
    """Return as many prompts, the kinds in turn; from the start again where there are too few."""
    prompts = [prompt.asked for prompt in load_prompts() if prompt.kind in kinds]
    return list(islice(cycle(prompts), level))


HEADER = ("sessions", "arm", "tokens/s", "to plain", "first token, ms: p50, p95, p99", "per token, ms: p50, p95, p99",
          "tokens per round", "accepted")  # fmt: skip


def cells(arms: Sequence[LoadArm], levels: Sequence[int]) -> list[list[str]]:
    """Return the table's rows."""
    plain = arms[0]
    return [_row(arm, level, arm.rate(level) / plain.rate(level)) for level in levels for arm in arms]


def _row(arm: LoadArm, level: int, ratio: float) -> list[str]:
    runs = arm.runs[level]
    rates = [run.rate for run in runs]
    first_s = percentiles(value for run in runs for value in run.first_s)
    per_token_s = percentiles(value for run in runs for value in run.per_token_s)
    tokens, rounds, tested, accepted = (
        sum(getattr(run, name) for run in runs) for name in ("num_tokens", "num_rounds", "num_tested", "num_accepted")
    )
    return [
        str(level),
        arm.name,
        f"{median(rates):.1f} ({min(rates):.1f} … {max(rates):.1f})",
        f"{ratio:.2f}",
        ", ".join(f"{1000 * value:.0f}" for value in first_s),
        ", ".join(f"{1000 * value:.0f}" for value in per_token_s),
        f"{tokens / rounds:.2f}" if rounds else "",
        f"{accepted / tested:.2f}" if tested else "",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(prog="benchmarks.load", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few sessions, once; written under another name")
    parser.add_argument("--name", default="load", help="name of the result files")
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS, help="numbers of sessions")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of prompts")
    asked = parser.parse_args(argv)
    levels, repetitions = (QUICK_LEVELS, 1) if asked.quick else (asked.levels, asked.repetitions)
    machine, cores = facts(), pinned()
    arms = asyncio.run(measure(levels, asked.kinds, repetitions, cores))
    how = HOW.format(tokens=NUM_TOKENS, dtype=DTYPE, repetitions=repetitions, verify=cores.verify, draft=cores.draft,
                     kinds=", ".join(asked.kinds))  # fmt: skip
    rows = cells(arms, levels)
    page = "\n\n".join(["# Many sessions at once", facts_list(machine), how, table(HEADER, rows)]) + "\n"
    console.print(page)
    data = {"machine": machine, "how": how, "rows": [dict(zip(HEADER, row, strict=True)) for row in rows]}
    write(f"{asked.name}_quick" if asked.quick else asked.name, data, page)


if __name__ == "__main__":
    main()
