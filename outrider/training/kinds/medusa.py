"""Trains Medusa heads: the join starts as a least-squares guess of the next feature, the heads as the target's own."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as fn

from outrider.drafting.medusa import MedusaHeads, MedusaShape
from outrider.training.batches import Batch
from outrider.training.kinds.protocol import Target
from outrider.training.kinds.reader import FeatureReader


class MedusaTrainee(FeatureReader[MedusaHeads]):
    """Medusa heads in training."""

    def __init__(self, target: Target, draft_ids: Tensor, num_heads: int) -> None:
        """Make heads that start from the target's.

        Args:
            target: On the device that is trained on.
            draft_ids: Ids of the heads, rising.
            num_heads: How many.
        """
        eps = float(getattr(target.model.config, "rms_norm_eps", 1e-5))
        shape = MedusaShape(target.embedding.shape[1], num_heads, len(draft_ids), eps, target.embedding_scale)
        super().__init__(target, MedusaHeads(shape), draft_ids, num_heads)

    def guesses(self, batch: Batch, depth: int, missing: Tensor | None = None) -> Iterator[Tensor]:
        """Yield each head's guesses, moved down to the rows they speak of; see the protocol."""
        guesses = self.net.guesses(*self.read(batch, missing))
        for head in range(min(depth, self.depth)):
            yield fn.pad(guesses[:, : guesses.shape[1] - head, head], (0, 0, head, 0))


@torch.no_grad()
def fit_heads(trainee: MedusaTrainee, batches: list[Batch]) -> float:
    """Fit the join to the next feature and the stand-in to the mean one; blocks add nothing yet.

    Args:
        trainee: Changed in place.
        batches: A few thousand rows.

    Returns:
        The share of the variance that the fit explains.
    """
    explained, wanted = trainee.fit(batches, lambda batch: batch.features[:, 1:])
    net = trainee.net
    net.norm_out.weight.copy_(wanted.square().mean(0).sqrt().mean().expand_as(net.norm_out.weight))
    for weight in net.blocks.parameters():
        weight.zero_()
    return explained
