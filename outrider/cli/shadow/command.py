"""The command `outrider shadow`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from outrider.cli.drafters.asking import MOST_GAMMA
from outrider.cli.local import LocalSettings, stages
from outrider.cli.ranges import check_range
from outrider.cli.running import go
from outrider.cli.shadow.child import Heard, run
from outrider.cli.shadow.sources import Source
from outrider.cli.shadow.summary import Summary, lines, report, tables
from outrider.errors import InvalidRequest
from outrider.gamma import Costs
from outrider.model.names import DEFAULT_MODEL
from outrider.report.page import check_writable, save
from outrider.shadowing import Logged

console = Console(highlight=False)


@Parameter(name="*")
@dataclass(frozen=True)
class Rounds:
    """What is replayed, and what it is compared with."""

    gamma: int = 7
    """Tokens per proposal."""
    max_gamma: int = 16
    """Longest proposal that the best plan may have."""
    max_tokens: int = 256
    """Most tokens of each session."""
    verify_ms: float | None = None
    """Milliseconds of a pass of the target, for the prediction; unset: measured where --target is given."""
    rtt: float = 0.0
    """Milliseconds of a round that are neither drafting nor the pass."""

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            InvalidRequest: an option is out of its range.
        """
        check_range("gamma", self.gamma, 1, MOST_GAMMA)
        check_range("max_gamma", self.max_gamma, 1, MOST_GAMMA)
        check_range("max_tokens", self.max_tokens, 1, 1 << 20)
        if self.verify_ms is not None and not 0.0 < self.verify_ms < math.inf:
            raise InvalidRequest("verify_ms", self.verify_ms, "more than 0 ms, and finite")
        if not 0.0 <= self.rtt < math.inf:
            raise InvalidRequest("rtt", self.rtt, "0 ms or more, and finite")


@Parameter(name="*")
@dataclass(frozen=True)
class Runs:
    """How models run."""

    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of weights and KV."""
    threads: int = 0
    """Threads of the drafter's model, and of the target's; 0: half of the cores."""


NO_SOURCE = Source()
USUAL_ROUNDS = Rounds()
USUAL_RUNS = Runs()


def shadow(
    *,
    drafter: str,
    target: str = "",
    source: Source = NO_SOURCE,
    rounds: Rounds = USUAL_ROUNDS,
    runs: Runs = USUAL_RUNS,
    report_file: Annotated[Path | None, Parameter(name="--report")] = None,
) -> None:
    """Measure a candidate drafter on sessions that are over: acceptance by position, cost, predicted speed-up.

    Args:
        drafter: As --draft of `outrider run`.
        target: Target to run over the texts, for drafters that need its hidden states and for the time of its passes;
            unset: none is run, and the drafter is loaded for the packaged model.
        source: Where the sessions are.
        rounds: What is replayed.
        runs: How models run.
        report_file: HTML file that a report is written to; unset: none.
    """
    rounds.check()
    if report_file is not None:
        check_writable(report_file)
    settings = LocalSettings(target or DEFAULT_MODEL, drafter, runs.dtype, runs.threads)
    go(_shadow(settings, target, source, rounds, report_file))


async def _shadow(
    settings: LocalSettings, target: str, source: Source, rounds: Rounds, report_file: Path | None
) -> None:
    draft = [spec.settings for spec in settings.specs() if spec.role == "draft"]
    if not draft:
        raise InvalidRequest("drafter", settings.draft, "something that drafts")
    sessions = await source.read()
    options = ["--gamma", str(rounds.gamma), "--max-tokens", str(rounds.max_tokens)]
    options += ["--target", target] if target else []
    with stages(console) as shown:
        shown.update("loading")
        heard = await run(draft[0], options, sessions, lambda done: shown.update("sessions", done / len(sessions)))
        shown.done()
    summary = _summary(sessions, heard, rounds)
    for table in tables(summary):
        console.print(table)
    for line in lines(summary):
        console.print(line, soft_wrap=True)
    if report_file is not None:
        save(report_file, report(summary))
        console.print(f"report: {report_file}", soft_wrap=True)


def _summary(sessions: list[Logged], heard: Heard, rounds: Rounds) -> Summary:
    passes = heard.passes
    one_s = passes.one_s if rounds.verify_ms is None else rounds.verify_ms / 1000.0
    many_s = max(one_s, passes.many_s) if rounds.verify_ms is None else one_s
    drafted = sum(each.num_drafted for each in heard.results)
    draft_s = sum(each.draft_s for each in heard.results) / drafted if drafted else 0.0
    by_rows = (one_s, *([many_s] * rounds.gamma))
    costs = Costs(draft_s, one_s, rounds.rtt / 1000.0, by_rows) if one_s else None
    return Summary(heard.drafter, heard.features, rounds.gamma, rounds.max_gamma, draft_s, costs,
                   tuple(zip(sessions, heard.results, strict=True)))  # fmt: skip
