"""`outrider drafters search-layers`: which layers of a target make the best draft of it, if any do."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.cli.drafters.layer_costs import MAX_GAMMA, POOL, best_speed, draft_times, pass_times, setting
from outrider.cli.drafters.layer_costs import write_samples as written
from outrider.cli.ranges import check_range
from outrider.gamma import Costs
from outrider.model.layer_search import LayerAgreement, Subset, search
from outrider.model.loader import load
from outrider.model.names import DEFAULT_MODEL, ModelSpec
from outrider.model.opening import open_model
from outrider.prompts import read_prompts

console = Console(highlight=False)
SHOWN = 12
"""Subsets that are shown."""


@Parameter(name="*")
@dataclass(frozen=True)
class Searched:
    """What is searched."""

    target: str = DEFAULT_MODEL
    """Target: the packaged model's name, a folder, a .gguf file, or a hub id."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of weights and KV."""
    threads: int = 1
    """Threads of the model."""


@Parameter(name="*")
@dataclass(frozen=True)
class How:
    """How it is searched."""

    keep: int = 0
    """Layers of the smallest subset; 0: a third of all."""
    beam: int = 1
    """Subsets of each size that are gone on with."""
    tokens: int = 512
    """Tokens that subsets are tried on."""
    minutes: float = 10.0
    """Time for the search itself; what it has found by then is shown."""
    round_trip_ms: float = 1.0
    """Round trip between draft worker and verifier, for the predicted speed."""

    def check(self) -> None:
        """Check the ranges that hold for every target.

        Raises:
            InvalidRequest: an option is out of its range.
        """
        check_range("beam", self.beam, 1, 64)
        check_range("tokens", self.tokens, 2, 1 << 16)
        check_range("minutes", self.minutes, 0, 1e5)
        check_range("round_trip_ms", self.round_trip_ms, 0, 1e5)


DEFAULT_SEARCHED, DEFAULT_HOW = Searched(), How()


def search_layers(
    *,
    prompts: Annotated[Path, Parameter(help="File of prompts: .jsonl with a text in each line, or a text a line.")],
    searched: Searched = DEFAULT_SEARCHED,
    how: How = DEFAULT_HOW,
) -> None:
    """Search for the layers of a target that make the best draft of it, by what they get right and what they cost.

    Args:
        prompts: What the target answers; its answers are what subsets are tried on.
        searched: What is searched.
        how: How.
    """
    how.check()
    asked = read_prompts(prompts)
    torch.set_num_threads(max(1, searched.threads))
    spec = ModelSpec(searched.target, searched.dtype)
    model, _ = load(spec)
    num_layers = model.config.num_hidden_layers
    check_range("keep", how.keep, 0, num_layers - 1)
    opened = open_model(spec, num_blocks=POOL)
    agreement = LayerAgreement(model, written(opened, asked, how.tokens))
    passes_s = pass_times(opened, MAX_GAMMA + 1)
    drafts_s = draft_times(spec, num_layers, passes_s[0])
    found = _search(agreement, how)
    _show(found, how, passes_s, drafts_s, agreement.num_positions)


def _search(agreement: LayerAgreement, how: How) -> list[Subset]:
    """Search with a progress bar, until the time is over."""
    num = len(agreement.all_layers)
    keep, over_s = how.keep or max(1, num // 3), time.monotonic() + 60.0 * how.minutes
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tries = sum(size * (1 if size == num else how.beam) for size in range(keep + 1, num + 1))
        task = bar.add_task(f"{num} layers", total=tries)

        def told(tried: Subset) -> bool:
            bar.update(task, advance=1, description=f"{len(tried.layers)} layers, {tried.alpha:.2f} right")
            return time.monotonic() < over_s

        return search(agreement, keep, how.beam, told)


def _show(found: Sequence[Subset], how: How, passes_s: list[float], drafts_s: list[float], positions: int) -> None:
    """Print the subsets, fastest first, and what to do with the first."""
    rows = []
    for subset in found:
        draft_s = drafts_s[len(subset.layers)]
        costs = Costs(draft_s, passes_s[0], how.round_trip_ms / 1e3, tuple(passes_s))
        rows.append((best_speed(subset.alpha, costs), draft_s, subset))
    if not rows:
        console.print(
            "the time was over before every layer had been left out once: allow more --minutes, or fewer --tokens"
        )
        return
    rows.sort(key=lambda row: row[0], reverse=True)
    table = Table(title=f"{positions} positions; a pass takes {1e3 * passes_s[0]:.1f} ms")
    for name in ("speed", "layers", "alpha", "t_d, ms", "t_d / t_v", "gamma", "kept"):
        table.add_column(name, justify="left" if name == "kept" else "right", overflow="fold")
    for (speed, gamma, pipelined), draft_s, subset in rows[:SHOWN]:
        way = f"{gamma} {'pipelined' if pipelined else 'sequential'}"
        figures = (f"{speed:.2f}", str(len(subset.layers)), f"{subset.alpha:.3f}", f"{1e3 * draft_s:.1f}")
        table.add_row(*figures, f"{draft_s / passes_s[0]:.2f}", way, setting(subset.layers))
    console.print(table)
    (speed, _, _), _, best = rows[0]
    if speed > 1.0:
        console.print(f'outrider run --draft layers:{setting(best.layers)} "PROMPT"', soft_wrap=True)
    else:
        console.print("No subset is predicted to be faster than plain decoding: leave layers off for this target.")
