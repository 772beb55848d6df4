"""The training loop. Everything random follows from the seed and the step, so that a resumed run is the same run."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.training.acceptance import TEMPERATURES, Acceptance, measure
from outrider.training.batches import Batch, assemble, epoch_batches
from outrider.training.cache import Cache
from outrider.training.kinds.protocol import Trainee
from outrider.training.objective import Objective, StepFigures
from outrider.training.state import Point, Schedule, State, read_state, write_state
from outrider.training.texts import Ints, Split, Texts

WARM_UP_STEPS = 30
"""Steps in which the learning rate rises."""
TIMED_STEPS = 10
"""Steps after which `minutes` is turned into a number of steps; the rate is rising until then whatever the number."""
LAST_RATE = 0.03
"""Share of the learning rate at the end."""
SMOOTHING = 0.95
"""Of the figures that are shown and plotted."""


@dataclass(frozen=True, slots=True)
class Material:
    """What is trained on."""

    texts: Texts
    split: Split
    cache: Cache


Watcher = Callable[[State, Sequence[StepFigures]], bool]
"""Told after every step; true ends the training early, with a checkpoint to resume from."""


class Trainer:
    """Trains one draft."""

    def __init__(self, trainee: Trainee, material: Material, schedule: Schedule, folder: Path) -> None:
        """Prepare, and take up an earlier run if the folder has one.

        Args:
            trainee: The draft as it starts.
            material: Texts whose hidden states are computed.
            schedule: How.
            folder: Where the state is kept.

        Raises:
            FailedPrecondition: The folder's run had another schedule.
        """
        self.trainee, self._material, self.schedule = trainee, material, schedule
        self._path = folder / "state.pt"
        self._objective, self._served = Objective(trainee), _Served(trainee)
        self.state = State(total_steps=schedule.steps)
        self._optimizer = _optimizer(trainee.net, schedule)
        self._device = next(trainee.net.parameters()).device
        if self._path.exists():
            self.state, kept = read_state(self._path, schedule, self._device)
            trainee.net.load_state_dict(kept["net"])
            self._optimizer.load_state_dict(kept["optimizer"])
        self._held_out = self._measured_on()

    def run(self, watch: Watcher) -> bool:
        """Train to the end, or until `watch` ends it; say whether it is the end. Blocks for long.

        Args:
            watch: Told after every step.
        """
        state = self.state
        if not state.curve:
            self._measure()
        for numbers in self._batches():
            started = time.monotonic()
            batch = self._assembled(numbers)
            figures = self._step(batch)
            state.seconds += time.monotonic() - started
            state.num_tokens += batch.num_tokens
            state.step += 1
            self._note(figures)
            stopped, ended = watch(state, figures), state.step == state.total_steps
            if stopped or ended or state.step % self._interval() == 0:
                if not stopped or ended:
                    self._measure()
                self._keep()
            if stopped and not ended:
                return False
        return True

    def _batches(self) -> Iterator[Ints]:
        """Yield the batches that are still to come."""
        state, schedule, passed, epoch = self.state, self.schedule, 0, 0
        while state.step < state.total_steps or not state.total_steps:
            seed = schedule.seed * 100_003 + epoch
            batches = epoch_batches(self._material.texts, self._material.split.training, schedule.batch_tokens, seed)
            for numbers in batches[max(0, state.step - passed) :]:
                if state.total_steps and state.step >= state.total_steps:
                    return
                yield numbers
            passed, epoch = passed + len(batches), epoch + 1

    def _assembled(self, numbers: Ints) -> Batch:
        return assemble(self._material.cache, self._material.texts, numbers).to(self._device)

    def _step(self, batch: Batch) -> list[StepFigures]:
        """Take one step."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        chance = torch.Generator().manual_seed(self.schedule.seed * 1_000_003 + self.state.step)
        loss, figures = torch.func.functional_call(self._objective, self._weights(), (batch, chance))
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.trainee.net.parameters(), 1.0)
        self._optimizer.step()
        return list(figures)

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights as products take them."""
        named: dict[str, Tensor] = dict(self._objective.named_parameters())
        if not self.schedule.bfloat16:
            return named
        return {name: weight.to(torch.bfloat16) for name, weight in named.items()}

    def _rate(self) -> float:
        """Return the learning rate of the coming step: a rise, then half a cosine."""
        state, schedule = self.state, self.schedule
        share = state.step / state.total_steps if state.total_steps else 0.0
        fallen = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
        return schedule.learning_rate * min(1.0, (state.step + 1) / WARM_UP_STEPS) * fallen

    def _note(self, figures: Sequence[StepFigures]) -> None:
        """Smooth the loss, and turn minutes into steps once their pace is known."""
        state = self.state
        loss = float(np.mean([each.loss for each in figures]))
        state.loss = loss if math.isnan(state.loss) else SMOOTHING * state.loss + (1 - SMOOTHING) * loss
        if not state.total_steps and state.step >= TIMED_STEPS:
            state.total_steps = max(TIMED_STEPS, round(self.schedule.minutes * 60 / state.seconds * state.step))

    def _interval(self) -> int:
        return (
            max(1, math.ceil(self.state.total_steps / self.schedule.measurements)) if self.state.total_steps else 10**9
        )

    def _measured_on(self) -> list[Batch]:
        """Lay out the texts that acceptance is measured on, greedy ones first."""
        texts, held_out = self._material.texts, self._material.split.held_out
        wanted = held_out[np.argsort(texts.temperature[held_out], kind="stable")][: self.schedule.held_out]
        batches = epoch_batches(texts, wanted, self.schedule.batch_tokens, self.schedule.seed)
        return [self._assembled(numbers) for numbers in batches]

    def _measure(self) -> None:
        """Add a point to the curve."""
        found: Acceptance = torch.func.functional_call(self._served, self._weights(), (self._held_out,))
        state = self.state
        sampled = tuple(found.alpha_at(temperature) for temperature in TEMPERATURES)
        state.curve.append(
            Point(state.step, state.num_tokens, state.seconds, state.loss, found.alpha, tuple(found.by_position),
                  sampled, found.tokens_per_round)
        )  # fmt: skip

    def _keep(self) -> None:
        """Write the state."""
        tensors = {"net": self.trainee.net.state_dict(), "optimizer": self._optimizer.state_dict()}
        write_state(self._path, self.schedule, self.state, tensors)


class _Served(nn.Module):
    """A measurement as a module, so that it sees the weights as products take them."""

    def __init__(self, trainee: Trainee) -> None:
        super().__init__()
        self.net = trainee.net
        self._trainee: Any = trainee

    def forward(self, batches: list[Batch]) -> Acceptance:
        return measure(self._trainee, batches)


def _optimizer(net: nn.Module, schedule: Schedule) -> torch.optim.Optimizer:
    """Return AdamW; vectors do not decay."""
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": schedule.weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=True)
