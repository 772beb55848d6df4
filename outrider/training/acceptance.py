"""Acceptance on held-out texts, as a verifier would count it, without decoding anything.

A greedy text is what the target says at temperature 0, so a chain that agrees with the target's likeliest token at
every row *is* the text: rounds are played over it from row to row, tests stopping at the first rejection. At other
temperatures acceptance is the mass that the two laws share, over chains that begin at every row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as fn

from outrider.training.batches import Batch
from outrider.training.kinds.protocol import Trainee

DEPTH = 6
"""Longest chain that is played."""
SAMPLED_DEPTH = 4
"""Length of the chains of which shared mass is taken."""
TEMPERATURES = (0.7, 1.0)


@dataclass(slots=True)
class Acceptance:
    """Counts of many texts."""

    tested: list[int] = field(default_factory=lambda: [0] * DEPTH)
    """By position in a chain, at temperature 0."""
    accepted: list[int] = field(default_factory=lambda: [0] * DEPTH)
    rounds: int = 0
    shared: dict[float, list[float]] = field(default_factory=lambda: {each: [0.0, 0.0] for each in TEMPERATURES})
    """By temperature: expected accepted and expected tested."""

    @property
    def alpha(self) -> float | None:
        """Accepted of tested at temperature 0; None without a greedy text."""
        return sum(self.accepted) / sum(self.tested) if sum(self.tested) else None

    @property
    def by_position(self) -> list[float]:
        """Accepted of tested at each position that was tested, temperature 0."""
        return [accepted / tested for accepted, tested in zip(self.accepted, self.tested, strict=True) if tested]

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens a pass commits when each is given the longest chain; None without a greedy text."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None

    def alpha_at(self, temperature: float) -> float | None:
        """Return the expected acceptance at one of TEMPERATURES; None without a text."""
        accepted, tested = self.shared[temperature]
        return accepted / tested if tested else None


@dataclass(slots=True)
class _Step:
    """What one step of chains says of all rows, [texts, rows] each."""

    matches: Tensor
    """bool: its likeliest id is the target's."""
    shared: dict[float, Tensor]
    """By temperature."""


@torch.inference_mode()
def measure(trainee: Trainee, batches: Sequence[Batch]) -> Acceptance:
    """Measure a draft on held-out texts; blocks.

    Args:
        trainee: The draft, its weights as they are to be served.
        batches: The texts.
    """
    total = Acceptance()
    for batch in batches:
        steps = list(_steps(trainee, batch))
        for temperature, sums in total.shared.items():
            _share(batch.mask, [step.shared[temperature] for step in steps[:SAMPLED_DEPTH]], sums)
        for text, greedy in enumerate(batch.greedy):
            if greedy:
                rows = slice(batch.first[text], batch.last[text])
                _play(torch.stack([step.matches[text, rows] for step in steps]).tolist(), total)
    return total


def _steps(trainee: Trainee, batch: Batch) -> Iterator[_Step]:
    rows = batch.mask.nonzero(as_tuple=True)
    places = trainee.draft_numbers(batch.law_ids[rows])
    probs = batch.law_probs[rows]
    for guesses in trainee.guesses(batch, DEPTH):
        logits = (guesses[rows] @ trainee.head.T).float()
        matches = torch.zeros_like(batch.mask)
        matches[rows] = logits.argmax(-1) == places[:, 0]
        shared = {each: batch.mask.float() for each in TEMPERATURES}
        for temperature, sums in shared.items():
            sums[rows] = _shared_mass(logits, places, probs, temperature)
        yield _Step(matches, shared)


def _shared_mass(logits: Tensor, places: Tensor, probs: Tensor, temperature: float) -> Tensor:
    """Return the mass that two laws share at a temperature, [rows]; what the cache does not hold is not counted."""
    target = probs ** (1 / temperature)
    if temperature != 1.0:  # at 1 the cached probabilities are whole laws'; at others the rest is next to nothing
        target = target / target.sum(-1, keepdim=True)
    draft = (logits / temperature).log_softmax(-1).gather(-1, places.clamp(min=0)).exp() * (places >= 0)
    return torch.minimum(target, draft).sum(-1)


def _share(mask: Tensor, shared: list[Tensor], sums: list[float]) -> None:
    """Add expected accepted and tested tokens of chains that begin at every row."""
    reached = mask.float()
    for step, mass in enumerate(shared):
        if step:
            reached = fn.pad(reached[:, :-1], (1, 0)) * mask
        sums[1] += float(reached.sum())
        reached = reached * mass
        sums[0] += float(reached.sum())


def _play(matches: list[list[bool]], total: Acceptance) -> None:
    """Play rounds over one greedy text.

    Args:
        matches: [steps][rows]: whether a step's token at a row is the text's.
        total: Counted into.
    """
    row, num_rows = 0, len(matches[0])
    while row < num_rows:
        total.rounds += 1
        for step in range(min(len(matches), num_rows - row)):
            total.tested[step] += 1
            if not matches[step][row + step]:
                row += step + 1
                break
            total.accepted[step] += 1
        else:
            row += len(matches) + 1
