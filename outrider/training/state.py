"""How a training is to go, where it stands, and the file that holds both."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a draft is trained."""

    steps: int = 0
    """How many; 0: as many as fit into `minutes`, counted once, at the start."""
    minutes: float = 10.0
    batch_tokens: int = 2048
    """Most tokens of a batch, padding included."""
    learning_rate: float = 2.5e-3
    weight_decay: float = 0.01
    seed: int = 1
    measurements: int = 12
    """How often acceptance is measured and a checkpoint written, the end included."""
    held_out: int = 64
    """Most texts that acceptance is measured on."""
    bfloat16: bool = True
    """Whether products are taken in bfloat16; weights and statistics stay in float32."""


@dataclass(frozen=True, slots=True)
class Point:
    """What was seen at one moment."""

    step: int
    num_tokens: int
    """Trained on so far, repetitions counted."""
    seconds: float
    """Spent on training so far."""
    loss: float
    """Smoothed, mean of all steps of chains."""
    alpha: float | None
    """On held-out greedy texts; None where there is none."""
    by_position: tuple[float, ...]
    sampled: tuple[float | None, ...]
    """Expected acceptance at each of `acceptance.TEMPERATURES`."""
    tokens_per_round: float | None


@dataclass(slots=True)
class State:
    """Where a training stands."""

    step: int = 0
    total_steps: int = 0
    """0: not known yet."""
    num_tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    curve: list[Point] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def write_state(path: Path, schedule: Schedule, state: State, tensors: Mapping[str, Any]) -> None:
    """Write all that a resumed run needs; an unfinished file never has the name.

    Args:
        path: The file.
        schedule: Of the run.
        state: Where it stands.
        tensors: What else it needs: dictionaries of tensors and plain values.
    """
    part = path.with_suffix(".part")
    torch.save({"schedule": asdict(schedule), "state": state.as_dict(), **tensors}, part)
    part.replace(path)


def read_state(path: Path, schedule: Schedule, device: torch.device) -> tuple[State, dict[str, Any]]:
    """Read a run's file.

    Args:
        path: The file.
        schedule: Of the run that is to go on.
        device: Where tensors go.

    Returns:
        Where it stood, and the tensors.

    Raises:
        FailedPrecondition: It is of a run with another schedule.
    """
    kept = torch.load(path, map_location=device, weights_only=True)
    differing = [name for name, value in asdict(schedule).items() if kept["schedule"].get(name) != value]
    if differing:
        raise FailedPrecondition(
            f"{path} is of a run with another schedule ({', '.join(differing)} differ): resume it with the same, or "
            "choose another --out"
        )
    fields = kept.pop("state")
    curve = [_point(each) for each in fields.pop("curve")]
    return State(**fields, curve=curve), kept


def _point(fields: dict[str, Any]) -> Point:
    return Point(**fields | {name: tuple(fields[name]) for name in ("by_position", "sampled")})
