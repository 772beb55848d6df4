"""Trains Medusa heads: the join starts as a least-squares guess of the next feature, the heads as the target's own."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as fn

from outrider.drafting import checkpoint
from outrider.drafting.checkpoint import Origin
from outrider.drafting.medusa import MedusaHeads, MedusaShape
from outrider.training.batches import Batch
from outrider.training.kinds.fitting import joined, least_squares
from outrider.training.kinds.protocol import Target, inverse


class MedusaTrainee:
    """Medusa heads in training."""

    reads_features = True

    def __init__(self, target: Target, draft_ids: Tensor, num_heads: int) -> None:
        """Make heads that start from the target's.

        Args:
            target: On the device that is trained on.
            draft_ids: Ids of the heads, rising.
            num_heads: How many.
        """
        self.depth = num_heads
        self._embedding = target.embedding
        scale = round(1 / float(target.embedding.float().square().mean().sqrt()), 3)
        eps = float(getattr(target.model.config, "rms_norm_eps", 1e-5))
        shape = MedusaShape(target.embedding.shape[1], num_heads, len(draft_ids), eps, scale)
        self.net = MedusaHeads(shape).float()
        self.net.draft_ids.copy_(draft_ids)
        with torch.no_grad():
            self.net.head.weight.copy_(target.head[draft_ids])
        self.net.to(target.embedding.device)
        self._places = inverse(draft_ids, len(target.embedding)).to(target.embedding.device)

    @property
    def head(self) -> Tensor:
        """Rows of the draft's ids."""
        return self.net.head.weight

    def guesses(self, batch: Batch, depth: int, missing: Tensor | None = None) -> Iterator[Tensor]:
        """Yield each head's guesses, moved down to the rows they speak of; see the protocol."""
        dtype = self.net.join.weight.dtype
        features = batch.features[:, :-1].to(dtype)
        if missing is not None:
            features = torch.where(missing[..., None], self.net.stand_in, features)
        guesses = self.net.guesses(self.embedded(batch).to(dtype), features)
        for head in range(min(depth, self.depth)):
            yield fn.pad(guesses[:, : guesses.shape[1] - head, head], (0, 0, head, 0))

    def embedded(self, batch: Batch) -> Tensor:
        """Return embeddings of the tokens behind each row, [texts, rows, hidden]."""
        return fn.embedding(batch.token_ids[:, 1:], self._embedding)

    def draft_numbers(self, ids: Tensor) -> Tensor:
        """Return where the heads have the target's ids."""
        return self._places[ids]

    def save(self, folder: Path, origin: Origin) -> None:
        """Write a checkpoint."""
        checkpoint.save(folder, self.net, origin)


@torch.no_grad()
def fit_heads(trainee: MedusaTrainee, batches: list[Batch]) -> float:
    """Fit the join to the next feature and the stand-in to the mean one; blocks add nothing yet.

    Args:
        trainee: Changed in place.
        batches: A few thousand rows.

    Returns:
        The share of the variance that the fit explains.
    """
    net, inputs, outputs = trainee.net, [], []
    for batch in batches:
        inputs.append(joined(trainee.embedded(batch), batch.features[:, :-1], net.shape.embedding_scale)[batch.mask])
        outputs.append(batch.features[:, 1:].float()[batch.mask])
    given, wanted = torch.cat(inputs), torch.cat(outputs)
    weight, explained = least_squares(given, wanted)
    net.join.weight.copy_(weight)
    net.stand_in.copy_(given[:, net.shape.hidden_size :].mean(0))
    net.norm_out.weight.copy_(wanted.square().mean(0).sqrt().mean().expand_as(net.norm_out.weight))
    for weight in net.blocks.parameters():
        weight.zero_()
    return explained
