"""What a draft is trained to do: to agree with the target's law as deep into a chain as chains get.

The loss of a row is the cross-entropy of the draft's law against the target's. Step k of a chain is seen in service
only where the k - 1 tokens before it were accepted; rows are therefore drawn with the probability of that, measured
as the mass the two laws share, and never below a floor, so that no step is forgotten.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from outrider.training.agreement import agreement
from outrider.training.batches import Batch
from outrider.training.kinds.protocol import Trainee

FLOOR = 0.2
"""Least probability with which a row of a later step is trained on."""
PREFIX_SHARE, WHOLE_SHARE = 0.3, 0.04
"""Share of texts whose features are missing up to a random row, and share (of all) where none are there."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """How one step of chains did on the rows it was trained on."""

    loss: float
    shared: float
    """Mean mass that the draft's law shares with the target's: the chance of acceptance at temperature 1."""


class Objective(nn.Module):
    """The loss as a module, so that its weights can be replaced by copies in another dtype."""

    def __init__(self, trainee: Trainee) -> None:
        """Take a draft.

        Args:
            trainee: The draft; its `net` becomes this module's only child.
        """
        super().__init__()
        self.net = trainee.net
        self._trainee: Any = trainee

    def forward(self, batch: Batch, chance: torch.Generator) -> tuple[Tensor, list[StepFigures]]:
        """Return the loss of a batch and how each step did.

        Args:
            batch: The texts.
            chance: Draws rows and missing prefixes.
        """
        reach, losses, figures = batch.mask.float(), [], []
        missing = drawn_prefixes(batch, chance) if self._trainee.reads_features else None
        for step, guesses in enumerate(self._trainee.guesses(batch, self._trainee.depth, missing)):
            rows = self._drawn(batch.mask, reach, step, chance)
            places = self._trainee.draft_numbers(batch.law_ids[rows])
            loss, shared = agreement(guesses[rows], self._trainee.head, places, batch.law_probs[rows])
            losses.append(loss)
            figures.append(StepFigures(float(loss.detach()), float(shared.mean())))
            reached = torch.zeros_like(reach)
            reached[rows] = reach[rows] * shared
            reach = fn.pad(reached[:, :-1], (1, 0))
        return torch.stack(losses).mean(), figures

    def _drawn(self, mask: Tensor, reach: Tensor, step: int, chance: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the rows that a step is trained on; chains begin inside the mask."""
        if not step:
            return mask.nonzero(as_tuple=True)
        possible = mask & fn.pad(mask[:, :-step], (step, 0))
        draws = torch.rand(reach.shape, generator=chance).to(reach.device)
        return (possible & (draws < reach.clamp(min=FLOOR))).nonzero(as_tuple=True)


def drawn_prefixes(batch: Batch, chance: torch.Generator) -> Tensor:
    """Draw up to which row each text's features are missing, [texts, rows] bool.

    Args:
        batch: The texts.
        chance: Draws.
    """
    texts, rows = batch.mask.shape
    kind, depth = torch.rand(texts, generator=chance), torch.rand(texts, generator=chance)
    cut = (depth * rows).long() * (kind < PREFIX_SHARE)
    cut[kind < WHOLE_SHARE] = rows
    return (torch.arange(rows) < cut[:, None]).to(batch.mask.device)
