"""Kinds of prompts and temperatures: `python -m benchmarks.kinds`.

What the policy makes of a drafter, against plain decoding, one session at a time: where it wins, where it loses.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

from rich.console import Console

from benchmarks.drafts import CAUSAL_LM, FEATURE, LOOKUP_THEN_FEATURE, PROMPT_LOOKUP
from benchmarks.machine import facts
from benchmarks.prompt_set import HELD_OUT, prompts_of
from benchmarks.results import facts_list, table, write
from benchmarks.serving import Cores, pinned, real_specs
from benchmarks.watching import Watched, watch
from outrider.client import Client
from outrider.cluster import LocalCluster
from outrider.generation import GenerationRequest, SpeculationChoice
from outrider.messages import SamplingParams
from outrider.prompts import Prompt

DTYPE = "bfloat16"
KINDS = ("chat", "summarise", "translate", "edit", "code", "answer", "prose")
ALL_KINDS = (*KINDS, HELD_OUT)
TEMPERATURES = (0.0, 0.7, 1.0)
NUM_TOKENS = 96
SEED = 11
OFF = SpeculationChoice(off=True)
AUTOMATIC = SpeculationChoice()

HOW = """One session at a time, {tokens} tokens, {dtype}; {prompts} prompts of each kind. Each prompt is answered plain
and with what the policy chooses ("automatic"), one right after the other, every second prompt in the other order; the
rate counts tokens after the first chunk, and the ratio is that of the two answers to one prompt: median, lowest and
highest. Above temperature 0 requests have a seed, so that both answers are the same text and do the same work ("texts
equal"); a copied token is accepted as often as without one. The verifier has core {verify}, the draft worker
({drafter}), orchestrator, store and client share core {draft}. "plain, both cores": the target with two threads on the
cores that automatic uses, nothing drafting, to plain on one."""

console = Console(highlight=False, width=200)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt answered in three ways."""

    kind: str
    temperature: float
    plain: Watched
    automatic: Watched
    wide: Watched

    @property
    def ratio(self) -> float:
        """Automatic to plain."""
        return self.automatic.rate / self.plain.rate

    @property
    def wide_ratio(self) -> float:
        """Plain on both cores to plain on one."""
        return self.wide.rate / self.plain.rate


async def measure(prompts: Sequence[Prompt], temperatures: Sequence[float], drafter: str, cores: Cores) -> list[Pair]:
    """Answer every prompt at every temperature."""
    pairs: list[Pair] = []
    async with AsyncExitStack() as stack:
        clients = []
        wide_cores = Cores(cores.both, "", cores.orchestrate)
        for specs in (
            real_specs(DTYPE, (drafter,), cores=cores),
            real_specs(DTYPE, (), threads=2, cores=wide_cores),
        ):
            cluster = await stack.enter_async_context(LocalCluster(specs))
            clients.append(await stack.enter_async_context(Client(cluster.address)))
        for number, prompt in enumerate(prompts):
            console.print(f"{prompt.name}, {number + 1} of {len(prompts)}")
            pairs += [await _pair(clients, prompt, each, drafter, swap=number % 2 == 1) for each in temperatures]
    return pairs


async def _pair(clients: Sequence[Client], prompt: Prompt, temperature: float, drafter: str, *, swap: bool) -> Pair:
    narrow, wide = clients
    request = _request(prompt, temperature, OFF, drafter)
    # Whoever comes first reads the prompt for both, which no rate counts.
    first, second = (AUTOMATIC, OFF) if swap else (OFF, AUTOMATIC)
    one = await watch(narrow, _request(prompt, temperature, first, drafter))
    other = await watch(narrow, _request(prompt, temperature, second, drafter))
    both = await watch(wide, request)
    plain, automatic = (other, one) if swap else (one, other)
    return Pair(prompt.kind, temperature, plain, automatic, both)


def _request(prompt: Prompt, temperature: float, choice: SpeculationChoice, drafter: str) -> GenerationRequest:
    return GenerationRequest(
        prompt.asked,
        max_tokens=NUM_TOKENS,
        sampling=SamplingParams(temperature=temperature),
        seed=SEED if temperature else None,
        speculation=choice,
        drafter=drafter,
        ignore_eos=True,
    )


HEADER = ("kind", "temperature", "automatic to plain", "plain, tokens/s", "plain, both cores", "accepted of tested",
          "tokens per round", "undrafted", "off at the end", "texts equal")  # fmt: skip


def cells(pairs: Sequence[Pair]) -> list[list[str]]:
    """Return the table's rows, and one over everything."""
    groups = {(pair.kind, pair.temperature) for pair in pairs}
    order = sorted(groups, key=lambda group: (ALL_KINDS.index(group[0]), group[1]))
    rows = [
        _row(kind, f"{warmth:g}", [each for each in pairs if (each.kind, each.temperature) == (kind, warmth)])
        for kind, warmth in order
    ]
    return [*rows, _row("all", "all", pairs)]


def _row(kind: str, temperature: str, pairs: Sequence[Pair]) -> list[str]:
    ratios = [pair.ratio for pair in pairs]
    figures = [pair.automatic.figures for pair in pairs]
    tested, accepted, rounds, plain = (
        sum(getattr(each, name) for each in figures)
        for name in ("num_tested", "num_accepted", "num_rounds", "num_plain")
    )
    tokens = sum(sum(pair.automatic.counts) for pair in pairs)
    equal = sum(pair.plain.token_ids == pair.automatic.token_ids for pair in pairs)
    return [
        kind,
        temperature,
        f"{median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})",
        f"{median(pair.plain.rate for pair in pairs):.1f}",
        f"{median(pair.wide_ratio for pair in pairs):.2f}",
        f"{accepted / tested:.2f}" if tested else "",
        f"{tokens / max(1, rounds):.2f}",
        f"{plain / max(1, tokens):.2f}",
        f"{sum(bool(each.speculation_off) for each in figures)} of {len(pairs)}",
        f"{equal} of {len(pairs)}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(prog="benchmarks.kinds", description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument(
        "--drafter", default=PROMPT_LOOKUP, choices=[PROMPT_LOOKUP, CAUSAL_LM, FEATURE, LOOKUP_THEN_FEATURE]
    )
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=ALL_KINDS, help="of prompts")
    parser.add_argument(
        "--quick", action="store_true", help="one prompt of each kind at temperature 0, under another name"
    )
    parser.add_argument("--name", default="kinds", help="name of the result files")
    asked = parser.parse_args(argv)
    count, temperatures = (1, TEMPERATURES[:1]) if asked.quick else (asked.prompts, TEMPERATURES)
    machine, cores = facts(), pinned()
    prompts = [each for kind in asked.kinds for each in prompts_of(kind)[:count]]
    pairs = asyncio.run(measure(prompts, temperatures, asked.drafter, cores))
    how = HOW.format(tokens=NUM_TOKENS, dtype=DTYPE, prompts=count, verify=cores.verify, draft=cores.draft,
                     drafter=asked.drafter.replace("_", " "))  # fmt: skip
    rows = cells(pairs)
    page = "\n\n".join(["# Kinds of prompts", facts_list(machine), how, table(HEADER, rows)]) + "\n"
    console.print(page)
    data = {"machine": machine, "how": how, "rows": [dict(zip(HEADER, row, strict=True)) for row in rows]}
    write(f"{asked.name}_quick" if asked.quick else asked.name, data, page)


if __name__ == "__main__":
    main()
