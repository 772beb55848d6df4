"""The policy against plain decoding and against fixed proposals, by load: `python -m benchmarks.control`.

All arms take turns at every level, in another order each time, so that what the machine does meanwhile hits all alike.
It ends within `BUDGET_S`, with as many repetitions as fit.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median

from rich.console import Console

from benchmarks.drafts import PROMPT_LOOKUP
from benchmarks.machine import facts
from benchmarks.prompt_set import load_prompts
from benchmarks.results import facts_list, table, write
from benchmarks.serving import Cores, Reply, ask_all, pinned, real_specs
from outrider.client import Client
from outrider.cluster import LocalCluster
from outrider.generation import GenerationRequest, SpeculationChoice
from outrider.messages import SamplingParams

DTYPE = "bfloat16"
LEVELS, QUICK_LEVELS = (1, 4, 8, 16, 32), (1, 4)
GAMMAS = (1, 2, 3, 4, 6)
NUM_TOKENS, QUICK_TOKENS = 48, 24
KINDS = ("chat", "edit", "prose", "summarise", "translate", "answer", "code")
BUDGET_S = 800.0
"""No repetition begins after so long; the one under way ends within three minutes."""
TO_PLAIN, TO_BEST = 0.97, 0.95

HOW = """Every level starts so many sessions at the same moment and waits for the last; with fewer sessions than kinds
of prompts the next one begins when one ends, until there were {prompts} at least; {tokens} tokens each, greedy,
{dtype}; prompts of these kinds in turn: {kinds}; the same in every arm.
tokens/s: all tokens by all the time, reading the prompts included; median of {repetitions} repetitions,
lowest and highest in brackets. plain: nothing is drafted.
fixed N: proposals of N tokens, and up to 2 N ahead. automatic: what the policy chooses, which knows of earlier sessions
what it has seen of them: those of this run. The verifier has core {verify}, one thread; the draft worker ({drafter}),
orchestrator, store and client share core {draft}. To reach: automatic at least {to_plain} of plain, and {to_best} of
the best fixed arm, at every level; "short" says where it is not. off: sessions of the automatic arm that drafted
nothing at their end, by reason (docs/control.md)."""

HEADER = ("sessions", "arm", "tokens/s", "to plain", "to best fixed", "tokens per round", "accepted", "off")

console = Console(highlight=False, width=200)


@dataclass(slots=True)
class Arm:
    """A way of choosing how far to draft, and what it came to."""

    name: str
    choice: SpeculationChoice
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Tokens per second by level."""
    replies: dict[int, list[Reply]] = field(default_factory=dict)

    def rate(self, level: int) -> float:
        """Median tokens per second."""
        return median(self.rates[level])


def arms_of() -> list[Arm]:
    """Return plain, automatic, then the fixed ones."""
    fixed = [Arm(f"fixed {gamma}", SpeculationChoice(gamma=gamma)) for gamma in GAMMAS]
    return [Arm("plain", SpeculationChoice(off=True)), Arm("automatic", SpeculationChoice()), *fixed]


async def measure(arms: Sequence[Arm], levels: Sequence[int], repetitions: int, setup: "Setup") -> int:
    """Run all arms in turn, level by level; return how many repetitions there was time for."""
    began_s = time.perf_counter()
    async with AsyncExitStack() as stack:
        specs = real_specs(DTYPE, (setup.drafter,), cores=setup.cores)
        cluster = await stack.enter_async_context(LocalCluster(specs))
        client = await stack.enter_async_context(Client(cluster.address))
        for arm in arms[:2]:
            await ask_all(client, _requests(arm.choice, 2, setup), 2)
        for number in range(repetitions):
            if number and time.perf_counter() - began_s > BUDGET_S:
                return number
            for level in levels:
                console.print(f"repetition {number + 1} of {repetitions}, {level} sessions")
                turn = number % len(arms)
                for arm in [*arms[turn:], *arms[:turn]]:
                    await _run(client, arm, level, setup)
    return repetitions


@dataclass(frozen=True, slots=True)
class Setup:
    """What all arms share."""

    drafter: str
    cores: Cores
    num_tokens: int
    """Of an answer."""
    num_prompts: int
    """At least, at every level."""


async def _run(client: Client, arm: Arm, level: int, setup: Setup) -> None:
    started_s = time.perf_counter()
    requests = _requests(arm.choice, level * -(-setup.num_prompts // level), setup)
    replies = await ask_all(client, requests, level)
    seconds = time.perf_counter() - started_s
    arm.rates.setdefault(level, []).append(sum(len(reply.token_ids) for reply in replies) / seconds)
    arm.replies.setdefault(level, []).extend(replies)


def _requests(choice: SpeculationChoice, num: int, setup: Setup) -> list[GenerationRequest]:
    prompts = islice(cycle([prompt.asked for prompt in load_prompts() if prompt.kind in KINDS]), num)
    sampling = SamplingParams(temperature=0.0)
    return [
        GenerationRequest(
            prompt,
            max_tokens=setup.num_tokens,
            sampling=sampling,
            speculation=choice,
            drafter=setup.drafter,
            ignore_eos=True,
        )
        for prompt in prompts
    ]


def rows_of(arms: Sequence[Arm], levels: Sequence[int]) -> list[list[str]]:
    """Return the table's rows."""
    return [_row(arms, arm, level) for level in levels for arm in arms]


def _row(arms: Sequence[Arm], arm: Arm, level: int) -> list[str]:
    plain, best = arms[0].rate(level), max(other.rate(level) for other in arms[2:])
    rates, figures = arm.rates[level], [reply.finished.figures for reply in arm.replies[level]]
    tested, accepted = sum(each.num_tested for each in figures), sum(each.num_accepted for each in figures)
    tokens, rounds = sum(len(reply.token_ids) for reply in arm.replies[level]), sum(each.num_rounds for each in figures)
    automatic = arm is arms[1]
    return [
        str(level),
        arm.name,
        f"{median(rates):.1f} ({min(rates):.1f} … {max(rates):.1f})",
        _ratio(arm.rate(level) / plain, TO_PLAIN if automatic else 0.0),
        _ratio(arm.rate(level) / best, TO_BEST) if automatic else "",
        f"{tokens / max(1, rounds):.2f}",
        f"{accepted / tested:.2f}" if tested else "",
        _reasons([each.speculation_off for each in figures]) if automatic else "",
    ]


def _ratio(value: float, bound: float) -> str:
    return f"{value:.2f}" if value >= bound else f"{value:.2f}, short"


def _reasons(reasons: Sequence[str]) -> str:
    counted = {reason: reasons.count(reason) for reason in sorted(set(reasons)) if reason}
    return ", ".join(f"{count} {reason}" for reason, count in counted.items())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(prog="benchmarks.control", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few sessions, once; written under another name")
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS, help="sessions at once")
    parser.add_argument("--prompts", type=int, default=len(KINDS), help="at least, at every level")
    parser.add_argument("--drafter", default=PROMPT_LOOKUP, help="kind of drafter, or several with commas")
    parser.add_argument("--name", default="control", help="name of the result files")
    asked = parser.parse_args(argv)
    levels, repetitions = (QUICK_LEVELS, 1) if asked.quick else (asked.levels, asked.repetitions)
    num_tokens = QUICK_TOKENS if asked.quick else NUM_TOKENS
    machine, arms = facts(), arms_of()
    setup = Setup(asked.drafter, pinned(), num_tokens, asked.prompts)
    done = asyncio.run(measure(arms, levels, repetitions, setup))
    how = HOW.format(
        tokens=num_tokens, prompts=asked.prompts, dtype=DTYPE, kinds=", ".join(KINDS), repetitions=done,
        verify=setup.cores.verify, draft=setup.cores.draft, drafter=asked.drafter, to_plain=TO_PLAIN, to_best=TO_BEST,
    )  # fmt: skip
    rows = rows_of(arms, levels)
    page = "\n\n".join(["# Control", facts_list(machine), how, table(HEADER, rows)]) + "\n"
    console.print(page)
    data = {"machine": machine, "how": how, "rows": [dict(zip(HEADER, row, strict=True)) for row in rows]}
    write(f"{asked.name}_quick" if asked.quick else asked.name, data, page)


if __name__ == "__main__":
    main()
