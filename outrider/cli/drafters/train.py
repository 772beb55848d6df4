"""`outrider drafters train`: a draft of one's own for a target, on text the target wrote."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from outrider.cli.ranges import check_range
from outrider.errors import InvalidRequest
from outrider.model.memory import parse_budget
from outrider.model.names import DEFAULT_MODEL, ModelSpec
from outrider.training.job import Kind, Plan, Watch
from outrider.training.job import train as train_draft
from outrider.training.report import acceptance_rows, shown
from outrider.training.state import Schedule, State
from outrider.training.writing import Wish

console = Console(highlight=False)


@Parameter(name="*")
@dataclass(frozen=True)
class Source:
    """What is trained on."""

    prompts: Path | None = None
    """File of prompts the target answers: .jsonl with a "text" in each line, or a text a line."""
    data: Path | None = None
    """File of texts, .npz with tokens, offsets, prompt_lengths and temperature; unset: the target writes some."""
    tokens: int = 300_000
    """How many tokens the target writes."""
    max_len: int = 512
    """Most tokens of a text; longer ones are cut."""
    disk: str = "20GiB"
    """Most disk the hidden states may take."""


@Parameter(name="*")
@dataclass(frozen=True)
class Network:
    """How large the draft is."""

    draft_vocab: int = 7680
    """Ids a feature draft or Medusa heads know: the likeliest ones."""
    depth: int = 3
    """Steps of a chain a feature draft is trained on; how many Medusa heads."""
    intermediate: int = 0
    """Width of a feature draft's MLP; 0: the target's."""
    layers: int = 2
    """Layers of a small-lm."""
    hidden: int = 256
    """Width of a small-lm, a multiple of 64."""
    start: Path | None = None
    """Folder of a feature draft or Medusa heads to go on from, with its sizes and ids."""


@Parameter(name="*")
@dataclass(frozen=True)
class Course:
    """How it is trained."""

    steps: int = 0
    """Steps; 0: as many as fit into --minutes."""
    minutes: float = 10.0
    """Time for the steps, after texts and hidden states; the number of steps is fixed once their pace is known."""
    batch_tokens: int = 2048
    """Most tokens of a step."""
    learning_rate: float = 2.5e-3
    """Highest; it rises at first and falls to nearly nothing."""
    seed: int = 1
    """Of texts, weights, order and all other chance."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the products; weights are kept in float32."""


@Parameter(name="*")
@dataclass(frozen=True)
class Machine:
    """Where it is trained."""

    device: str = "cpu"
    """As torch names it."""
    threads: int = 0
    """Threads on the CPU; 0: all cores."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of the target's weights: the one it is served with."""


@Parameter(name="*")
@dataclass(frozen=True)
class Job:
    """Which training."""

    kind: Kind
    """feature, medusa or small-lm."""
    target: str = DEFAULT_MODEL
    """The packaged model's name, a folder, a .gguf file, or a hub id."""
    out: Path = Path("draft-training")
    """Folder of texts, hidden states, checkpoint and report."""
    resume: Annotated[bool, Parameter(negative="")] = False
    """Go on with the training in that folder."""


ANY_SOURCE, USUAL_NETWORK, USUAL_COURSE, THIS_MACHINE = Source(), Network(), Course(), Machine()


def train(
    *,
    job: Job,
    source: Source = ANY_SOURCE,
    network: Network = USUAL_NETWORK,
    course: Course = USUAL_COURSE,
    machine: Machine = THIS_MACHINE,
) -> None:
    """Train a draft for a target; Ctrl-C keeps what there is, to be taken up with --resume.

    Args:
        job: Which training.
        source: What is trained on.
        network: How large the draft is.
        course: How it is trained.
        machine: Where it is trained.
    """
    spec = ModelSpec(job.target, machine.dtype, device=machine.device)
    plan, schedule = _plan(spec, job, source, network, course.seed), _schedule(course)
    _check_device(machine.device)
    if machine.threads:
        torch.set_num_threads(machine.threads)
    with _Shown() as shown_progress:
        state, finished = train_draft(plan, schedule, shown_progress)
    console.print(_table(state))
    console.print(f"draft: {job.out / 'draft'}\nreport: {job.out / 'report.html'}", soft_wrap=True)
    if not finished:
        console.print(f"stopped at step {state.step} of {state.total_steps}; go on with --resume", soft_wrap=True)
        sys.exit(130)


def _plan(spec: ModelSpec, job: Job, source: Source, network: Network, seed: int) -> Plan:
    """Turn options into a plan.

    Raises:
        InvalidRequest: An option is out of its range.
    """
    if source.prompts is not None and source.data is not None:
        raise InvalidRequest("data", str(source.data), "not there beside --prompts: texts are written or read")
    check_range("tokens", source.tokens, 1000, 1 << 34)
    check_range("max_len", source.max_len, 16, 1 << 20)
    check_range("draft_vocab", network.draft_vocab, 16, 1 << 24)
    check_range("depth", network.depth, 1, 16)
    check_range("intermediate", network.intermediate, 0, 1 << 20)
    check_range("layers", network.layers, 1, 256)
    check_range("hidden", network.hidden, 64, 1 << 16)
    return Plan(
        target=spec,
        kind=job.kind,
        folder=job.out,
        prompts=source.prompts,
        data=source.data,
        wish=Wish(source.tokens, seed=seed),
        max_len=source.max_len,
        disk_limit=_bytes(source.disk),
        draft_vocab=network.draft_vocab,
        depth=network.depth,
        intermediate=network.intermediate,
        layers=network.layers,
        hidden=network.hidden,
        start=network.start,
        resume=job.resume,
    )


def _schedule(course: Course) -> Schedule:
    """Turn options into a schedule.

    Raises:
        InvalidRequest: An option is out of its range.
    """
    check_range("steps", course.steps, 0, 1 << 31)
    check_range("minutes", course.minutes, 0.01, 1e6)
    check_range("batch_tokens", course.batch_tokens, 16, 1 << 24)
    check_range("learning_rate", course.learning_rate, 1e-7, 1.0)
    check_range("seed", course.seed, 0, 1 << 31)
    return Schedule(
        steps=course.steps,
        minutes=course.minutes,
        batch_tokens=course.batch_tokens,
        learning_rate=course.learning_rate,
        seed=course.seed,
        bfloat16=course.precision == "bfloat16",
    )


def _check_device(name: str) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequest("device", name, f"a device of this machine ({str(error).splitlines()[0]})") from error


def _bytes(text: str) -> int:
    """Read a size of disk."""
    try:
        num_bytes = parse_budget(text).num_bytes
    except ValueError as error:
        raise InvalidRequest("disk", text, 'a size such as "20GiB"') from error
    if not num_bytes:
        raise InvalidRequest("disk", text, 'a size such as "20GiB"')
    return num_bytes


class _Shown(Watch):
    """Shows a training on the terminal, and ends it between two steps on Ctrl-C and SIGTERM."""

    def __init__(self) -> None:
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._bar = self._bars.add_task("", total=None)
        self._points = 0
        self._ended = False
        self._training = False

    def __enter__(self) -> "_Shown":
        self._before = {each: signal.signal(each, self._end) for each in (signal.SIGINT, signal.SIGTERM)}
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        for each, before in self._before.items():
            signal.signal(each, before)

    def stage(self, name: str, total: int) -> None:
        self._training = name == "training"
        self._bars.reset(self._bar, description=name, total=total or None)

    def done(self, amount: int) -> None:
        self._bars.update(self._bar, completed=amount)

    def step(self, state: State) -> bool:
        self._bars.update(
            self._bar, completed=state.step, total=state.total_steps or None,
            description=f"training, loss {shown(state.loss)}",
        )  # fmt: skip
        for point in state.curve[self._points :]:
            alpha = f"acceptance {shown(point.alpha)}, at temperature 1 {shown(point.sampled[-1])}"
            console.print(f"step {point.step}, {point.seconds / 60:.1f} min: loss {shown(point.loss)}, {alpha}")
        self._points = len(state.curve)
        return self._ended

    def _end(self, number: int, frame: FrameType | None) -> None:
        """End at once while texts and hidden states are made, which keep what they have; else after the step."""
        del number, frame
        self._ended = True
        if not self._training:
            raise KeyboardInterrupt


def _table(state: State) -> Table:
    """Return what was reached."""
    table = Table("held-out texts", "", box=None)
    for name, value in acceptance_rows(state.curve[-1]):
        table.add_row(name, value)
    return table
