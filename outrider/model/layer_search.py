"""Which layers of a model guess best for all of them.

A draft that keeps some of the target's layers is right where its likeliest token is the target's own. That is measured
on texts the target wrote, all positions at once: in such a text a guess is tested behind true tokens only, so the share
of agreeing positions is the acceptance at temperature 0.

The search takes layers away one by one: from each subset it goes on with, every layer is left out once, and the best
`beam` of what comes out are gone on with. Candidates share what is computed before the layer they leave out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import FailedPrecondition

Layers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A text, of which everything behind the prompt was written by the target."""

    token_ids: tuple[int, ...]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class Subset:
    """Layers that are kept, and how often they guess right."""

    layers: Layers
    alpha: float
    """Share of positions where they agree with all layers."""


class LayerAgreement:
    """A model whose layers can be left out, and texts to try that on. Not safe to use from two threads."""

    def __init__(self, model: PreTrainedModel, samples: Sequence[Sample]) -> None:
        """Compute what the whole model says.

        Args:
            model: with its layers in a list, in evaluation mode.
            samples: at least one that has two tokens behind its prompt.

        Raises:
            FailedPrecondition: the model has no list of layers, or there is nothing to try them on.
        """
        self._model: Any = model
        self._base: Any = model.base_model
        self._all = list(getattr(self._base, "layers", ()))
        self._head: nn.Module = cast(Any, model).get_output_embeddings()
        if len(self._all) < 2:
            raise FailedPrecondition("the model has no list of layers that some could be left out of")
        self._ids, self._scored = _batch(samples, model.device)
        if not int(self._scored.sum()):
            raise FailedPrecondition("no text has two tokens behind its prompt: there is nothing to guess")
        self._types = list(getattr(model.config, "layer_types", None) or ())
        whole = self._run(self.all_layers, {"input_ids": self._ids})
        self._truth = self._guesses(whole[-1])
        self._shares = self._can_share(whole)

    @property
    def all_layers(self) -> Layers:
        """The whole model."""
        return tuple(range(len(self._all)))

    @property
    def num_positions(self) -> int:
        """Guesses that each subset is measured by."""
        return int(self._scored.sum())

    def alpha(self, layers: Layers) -> float:
        """Return how often a subset agrees with the whole model."""
        return self._agreement(self._run(layers, {"input_ids": self._ids})[-1])

    def without_each(self, layers: Layers) -> Iterator[Subset]:
        """Leave out each layer of a subset, one at a time."""
        before = self._run(layers, {"input_ids": self._ids})
        for index in range(len(layers)):
            rest = layers[:index] + layers[index + 1 :]
            tail = layers[index + 1 :]
            if self._shares and tail:
                hidden = self._run(tail, {"inputs_embeds": before[index]})[-1]
            else:
                hidden = self._run(rest, {"input_ids": self._ids})[-1]
            yield Subset(rest, self._agreement(hidden))

    def _can_share(self, whole: list[Tensor]) -> bool:
        """Whether layers may be entered in the middle: a model may do more to embeddings than hand them on.

        Args:
            whole: hidden states of all layers.
        """
        tail = self._run(self.all_layers[1:], {"inputs_embeds": whole[1]})
        return torch.equal(tail[-1], whole[-1])

    @torch.no_grad()
    def _run(self, layers: Layers, given: dict[str, Tensor]) -> list[Tensor]:
        """Return the hidden states before each layer, [texts, length, hidden], and last those behind the final norm."""
        with self._keeping(layers):
            out = self._base(**given, use_cache=False, output_hidden_states=True)
        return [*out.hidden_states[: len(layers)], out.last_hidden_state]

    @contextmanager
    def _keeping(self, layers: Layers) -> Iterator[None]:
        self._set(nn.ModuleList(self._all[index] for index in layers), [self._types[i] for i in layers if self._types])
        try:
            yield
        finally:
            self._set(nn.ModuleList(self._all), self._types)

    def _set(self, layers: nn.ModuleList, types: list[str]) -> None:
        self._base.layers, self._model.config.num_hidden_layers = layers, len(layers)
        if self._types:
            self._model.config.layer_types = types

    @torch.no_grad()
    def _guesses(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token at each scored position, [positions]."""
        return cast(Tensor, self._head(hidden[self._scored])).argmax(-1)

    def _agreement(self, hidden: Tensor) -> float:
        return float((self._guesses(hidden) == self._truth).double().mean())


def search(
    agreement: LayerAgreement, keep: int, beam: int, on_step: Callable[[Subset], bool] = lambda _: True
) -> list[Subset]:
    """Take layers away until `keep` are left; return the best subset of each size, largest first.

    Args:
        agreement: the model and its texts.
        keep: layers of the smallest subset, 1 .. all of them less one.
        beam: subsets of each size that are gone on with, >= 1.
        on_step: told of every subset that was tried; False ends the search with what there is.

    Raises:
        FailedPrecondition: `keep` or `beam` is out of range.
    """
    num = len(agreement.all_layers)
    if not 1 <= keep < num or beam < 1:
        raise FailedPrecondition(f"keep = {keep}, beam = {beam}: must be 1 .. {num - 1} of the {num} layers, and >= 1")
    best, going = list[Subset](), [Subset(agreement.all_layers, 1.0)]
    for _ in range(num - keep):
        found: dict[Layers, Subset] = {}
        for subset in going:
            for tried in agreement.without_each(subset.layers):
                found[tried.layers] = tried
                if not on_step(tried):
                    return best
        # Of equally good subsets the one that lost a later layer comes first: its texts agree in more of the rest.
        going = sorted(found.values(), key=lambda subset: (-subset.alpha, subset.layers))[:beam]
        best.append(going[0])
    return best


def _batch(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the texts, padded behind, and a mask of the positions whose next token the target chose.

    Padding comes behind everything that is looked at, and causal attention does not look ahead.
    """
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    scored = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        scored[row, max(0, sample.prompt_len - 1) : len(sample.token_ids) - 1] = True
    return ids.to(device), scored.to(device)
