"""What the trainer asks of a kind of draft."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.drafting.checkpoint import Origin
from outrider.messages import Vocabulary
from outrider.training.batches import Batch
from outrider.training.texts import Ints


@dataclass(slots=True)
class Target:
    """The model that is drafted for."""

    name: str
    model: Any
    """As `outrider.model.loader.load` returns it."""
    tokenizer: Any
    vocabulary: Vocabulary

    @property
    def embedding(self) -> Tensor:
        """Its embedding, [vocab, hidden]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def embedding_scale(self) -> float:
        """What makes embeddings as large as features after a norm: a mean square of 1."""
        return round(1 / float(self.embedding.float().square().mean().sqrt()), 3)

    @property
    def head(self) -> Tensor:
        """The rows of its head, [vocab, hidden]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()


class Trainee(Protocol):
    """A draft in training."""

    @property
    def reads_features(self) -> bool:
        """Whether the target's hidden states are needed."""
        ...

    @property
    def depth(self) -> int:
        """Steps of a chain that are trained."""
        ...

    @property
    def net(self) -> nn.Module:
        """What is trained, its weights in float32."""
        ...

    @property
    def head(self) -> Tensor:
        """Turns guesses into logits, [ids of the draft, width]."""
        ...

    def guesses(self, batch: Batch, depth: int, missing: Tensor | None = None) -> Iterator[Tensor]:
        """Yield what step 1, 2, ... of chains say of every row: [texts, rows, width].

        Step k speaks of row i at the end of a chain that began at row i - k + 1.

        Args:
            batch: The texts.
            depth: How many steps.
            missing: [texts, rows] bool: where no feature is known.
        """
        ...

    def draft_numbers(self, ids: Tensor) -> Tensor:
        """Return where the draft's laws have the target's ids; -1 where the draft does not know an id."""
        ...

    def save(self, folder: Path, origin: Origin) -> None:
        """Write what a draft worker loads."""
        ...


def likeliest_ids(tokens: Ints, count: int, vocab_size: int) -> Tensor:
    """Return the ids that occur most often, rising, [at most count] int64; where they are few, others fill up.

    Args:
        tokens: Of answers.
        count: How many.
        vocab_size: How many ids there are.
    """
    occurring = torch.bincount(torch.from_numpy(tokens), minlength=vocab_size)
    return occurring.argsort(descending=True, stable=True)[:count].sort().values


def inverse(ids: Tensor, vocab_size: int) -> Tensor:
    """Return the place of each id among some, -1 for all others, [vocab_size] int64."""
    places = torch.full((vocab_size,), -1, dtype=torch.int64)
    places[ids] = torch.arange(len(ids))
    return places
