"""What the drafts that read the target's hidden states have in common while they are trained."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as fn

from outrider.drafting import checkpoint
from outrider.drafting.checkpoint import Origin
from outrider.drafting.feature import FeatureDraft
from outrider.drafting.medusa import MedusaHeads
from outrider.training.batches import Batch
from outrider.training.kinds.fitting import joined, least_squares
from outrider.training.kinds.protocol import Target, inverse

Net = TypeVar("Net", FeatureDraft, MedusaHeads)


class FeatureReader(Generic[Net]):
    """A draft in training that reads, for each row, the embedding of the token behind it and the target's feature."""

    reads_features = True

    def __init__(self, target: Target, net: Net, draft_ids: Tensor, depth: int) -> None:
        """Take a network, whose head starts as the target's.

        Args:
            target: On the device that is trained on.
            net: Its weights otherwise as they start.
            draft_ids: Ids of the head, rising.
            depth: Steps of a chain that are trained.
        """
        self.depth, self._embedding = depth, target.embedding
        self.net: Net = net.float()
        with torch.no_grad():
            self.net.draft_ids.copy_(draft_ids)
            self.net.head.weight.copy_(target.head[draft_ids])
        self.net.to(target.embedding.device)
        self._places = inverse(draft_ids, len(target.embedding)).to(target.embedding.device)

    @property
    def head(self) -> Tensor:
        """Rows of the draft's ids."""
        return self.net.head.weight

    def read(self, batch: Batch, missing: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return embeddings and features of each row, [texts, rows, hidden], with the stand-in where they are missing.

        Args:
            batch: The texts.
            missing: [texts, rows] bool; None: nowhere.
        """
        dtype = self.net.join.weight.dtype
        features = batch.features[:, :-1].to(dtype)
        if missing is not None:
            features = torch.where(missing[..., None], self.net.stand_in, features)
        return self.embedded(batch).to(dtype), features

    def embedded(self, batch: Batch) -> Tensor:
        """Return embeddings of the tokens behind each row, [texts, rows, hidden]."""
        return fn.embedding(batch.token_ids[:, 1:], self._embedding)

    def draft_numbers(self, ids: Tensor) -> Tensor:
        """Return where the draft has the target's ids."""
        return self._places[ids]

    def save(self, folder: Path, origin: Origin) -> None:
        """Write a checkpoint."""
        checkpoint.save(folder, self.net, origin)

    @torch.no_grad()
    def fit(self, batches: Sequence[Batch], wanted: Callable[[Batch], Tensor]) -> tuple[float, Tensor]:
        """Fit the join to what it should give, and the stand-in to the mean feature.

        Args:
            batches: A few thousand rows.
            wanted: Returns that of a batch, [texts, rows, hidden].

        Returns:
            The share of the variance that the fit explains, and what was wanted, [rows, hidden] float32.
        """
        shape = self.net.shape
        given = torch.cat(
            [joined(self.embedded(each), each.features[:, :-1], shape.embedding_scale)[each.mask] for each in batches]
        )
        outputs = torch.cat([wanted(each)[each.mask].float() for each in batches])
        weight, explained = least_squares(given, outputs)
        self.net.join.weight.copy_(weight)
        self.net.stand_in.copy_(given[:, shape.hidden_size :].mean(0))
        return explained, outputs
