"""`outrider drafters compare`: drafters beside plain decoding, on prompts of one's own and on real local clusters."""

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from outrider.cli.drafters.asking import MOST_GAMMA, Asking, ask_all
from outrider.cli.drafters.comparison import Setting, facts, report, tables
from outrider.cli.drafters.tally import Measured, measured
from outrider.cli.local import PROMPT_LOOKUP, TOY, LocalSettings, Stages, stages
from outrider.cli.ranges import check_range
from outrider.cli.running import go
from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.errors import InvalidRequest, OutriderError
from outrider.model.names import DEFAULT_MODEL, locate
from outrider.prompts import Prompt, read_prompts
from outrider.redaction import redacted
from outrider.report.page import check_writable, save

console = Console(highlight=False)


@Parameter(name="*")
@dataclass(frozen=True)
class Served:
    """What is served."""

    target: str = DEFAULT_MODEL
    """Target: the packaged model's name, a folder, a .gguf file, a hub id, or toy."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of weights and KV."""
    threads: int = 0
    """Threads per model; 0: half of the cores each."""


@Parameter(name="*")
@dataclass(frozen=True)
class Questions:
    """How prompts are asked."""

    tokens: int = 64
    """Most tokens of an answer."""
    temperature: float = 0.0
    """Above 0 every prompt has a seed, so that all ways answer with the same text."""
    seed: int = 11
    """Seed of the first prompt; the next has the next."""
    gamma: str = "auto"
    """Ways to measure: auto (the policy decides), a number of tokens per proposal, or several, with commas."""
    trial_gamma: int = 7
    """Tokens per proposal of the trial that acceptance and costs are taken from."""
    max_gamma: int = 16
    """Longest proposal that the best plan may have."""
    num_prompts: int = 0
    """Use the file's first so many prompts; 0: all."""

    def asking(self) -> Asking:
        """Return what is asked.

        Raises:
            InvalidRequest: an option is out of its range.
        """
        check_range("tokens", self.tokens, 2, 1 << 20)
        check_range("trial_gamma", self.trial_gamma, 1, MOST_GAMMA)
        check_range("max_gamma", self.max_gamma, 1, MOST_GAMMA)
        check_range("num_prompts", self.num_prompts, 0, 1 << 20)
        check_range("seed", self.seed, 0, 1 << 63)
        check_range("temperature", self.temperature, 0, 100)
        gammas = tuple(_gamma(part.strip()) for part in self.gamma.split(","))
        return Asking(self.tokens, self.temperature, self.seed, self.trial_gamma, gammas)


NOTHING_SAID = Served()
USUAL = Questions()


def compare(
    *,
    prompts: Path,
    drafters: Annotated[str, Parameter(negative="")] = PROMPT_LOOKUP,
    served: Served = NOTHING_SAID,
    questions: Questions = USUAL,
    report_file: Annotated[Path, Parameter(name="--report")] = Path("drafters.html"),
) -> None:
    """Measure drafters beside plain decoding: acceptance, costs, speed, and the best gamma.

    Args:
        prompts: File of prompts: .jsonl with a "text" in each line, or a text a line.
        drafters: With commas between them: what --draft of `outrider run` takes, such as prompt-lookup,layers:0,1,29.
        served: What is served.
        questions: How prompts are asked.
        report_file: HTML file that the report is written to.
    """
    asking, asked = questions.asking(), read_prompts(prompts)
    asked = asked[: questions.num_prompts or None]
    names = split_drafters(drafters)
    settings = [LocalSettings(served.target, name, served.dtype, served.threads) for name in names]
    specs = [placed(each.specs(), each.threads_each) for each in settings]
    check_writable(report_file)
    setting = Setting(prompts.name, len(asked), served.target, served.dtype, settings[0].threads_each, asking)
    results, failures = go(_measure(settings, specs, asked, setting, questions.max_gamma))
    if results:
        for table in tables(results):
            console.print(table)
        save(report_file, report(results, setting, facts(setting)))
        console.print(f"report: {report_file}", soft_wrap=True)
    _end(results, failures)


def split_drafters(text: str) -> list[str]:
    """Return the drafters of a list; numbers after "layers:" belong to it.

    Raises:
        InvalidRequest: there is none, one twice, or "off".
    """
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if part.isdigit() and names and names[-1].startswith("layers:"):
            names[-1] += f",{part}"
        else:
            names.append(part)
    if not all(names) or len(set(names)) != len(names) or "off" in names:
        raise InvalidRequest("drafters", text, "names with commas between, each once; plain decoding is always there")
    return names


def placed(specs: Sequence[ServiceSpec], threads: int) -> list[ServiceSpec]:
    """Give verifier and draft worker cores of their own where there are enough; the others share the latter's."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2 * threads or shutil.which("taskset") is None:
        return list(specs)
    verify, rest = available[:threads], available[threads : 2 * threads]
    cores = {role: ",".join(map(str, rest)) for role in ("draft", "orchestrate")}
    cores["verify"] = ",".join(map(str, verify))
    return [replace(spec, cores=cores[spec.role]) for spec in specs]


def _gamma(text: str) -> int | None:
    if text == "auto":
        return None
    if text.isdigit() and 1 <= int(text) <= MOST_GAMMA:
        return int(text)
    raise InvalidRequest("gamma", text, f"auto, or 1 to {MOST_GAMMA}; several with commas between")


async def _measure(
    settings: Sequence[LocalSettings],
    specs: Sequence[list[ServiceSpec]],
    prompts: Sequence[Prompt],
    setting: Setting,
    max_gamma: int,
) -> tuple[list[Measured], list[str]]:
    """Measure one drafter after the other, each in a cluster of its own; return results, and what went wrong."""
    results: list[Measured] = []
    failures: list[str] = []
    with stages(console) as shown:
        if settings[0].target != TOY:
            await asyncio.to_thread(locate, settings[0].target, shown.update)
        for each, services in zip(settings, specs, strict=True):
            try:
                results.append(await _one(each.draft, services, prompts, (setting.asking, max_gamma), shown))
            except OutriderError as error:
                failures.append(f"{each.draft}: {redacted(error.message)}")
    return results, failures


async def _one(
    draft: str, specs: list[ServiceSpec], prompts: Sequence[Prompt], how: tuple[Asking, int], shown: Stages
) -> Measured:
    asking, max_gamma = how
    async with LocalCluster(specs) as cluster, Client(cluster.address) as client:
        asked = await ask_all(client, prompts, asking, lambda done: shown.update(draft, done / len(prompts)))
    return measured(draft, asked, asking.trial_gamma, max_gamma)


def _end(results: Sequence[Measured], failures: Sequence[str]) -> None:
    """Say what went wrong, and end with status 1 if something did."""
    differing = [each.drafter for each in results if any(way.num_equal < way.num_answers for way in each.ways)]
    for failure in failures:
        console.print(f"[red]not measured:[/red] {failure}", soft_wrap=True)
    if differing:
        console.print(f"[red]texts differ from plain decoding:[/red] {', '.join(differing)}", soft_wrap=True)
    if failures or differing:
        sys.exit(1)
