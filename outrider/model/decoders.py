"""From a pass's numbers to logits: by fused layers where a model has some, by its stock layers otherwise."""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.model.attention import ATTENTION_NAME
from outrider.model.fused import FusedDecoder
from outrider.model.planning import PassInput
from outrider.model.sharding import local


@dataclass(slots=True)
class PassOutput:
    """What a pass computes for the rows that are kept."""

    logits: Tensor
    """[kept, vocab_size] in the model's dtype; no columns where only hidden states are wanted."""
    hidden: Tensor
    """[kept, hidden_size], what the head was applied to."""


class Decoder(Protocol):
    """A causal LM over the block pool; touches nothing but the pool and what it returns, so that it can be recorded."""

    def run(self, given: PassInput) -> PassOutput | None:
        """Run a pass; None if no rows are kept."""
        ...


class FusedModel:
    """Fused layers and the head."""

    def __init__(self, model: PreTrainedModel, head: nn.Module, context_len: int) -> None:
        self._decoder = FusedDecoder(model, context_len)
        self._head = head

    def run(self, given: PassInput) -> PassOutput | None:
        """Run a pass."""
        hidden = self._decoder.run(given.token_ids, given.positions, given.plan)
        if not len(given.kept):
            return None
        kept = hidden.index_select(0, given.kept)
        return PassOutput(cast(Tensor, self._head(kept)) if given.head else kept[:, :0], kept)


class StockModel:
    """A model's own forward with the attention replaced."""

    def __init__(self, model: PreTrainedModel, head: nn.Module) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        self._model: Any = model
        self._head_input: Tensor | None = None
        head.register_forward_pre_hook(self._keep_head_input)

    def run(self, given: PassInput) -> PassOutput | None:
        """Run a pass."""
        kwargs = {"position_ids": given.positions[None], "use_cache": False, "outrider_pass": given.plan}
        if not len(given.kept):
            self._model.base_model(given.token_ids[None], **kwargs)
            return None
        output = self._model(given.token_ids[None], logits_to_keep=given.kept, **kwargs)
        return PassOutput(output.logits[0], local(cast(Tensor, self._head_input))[0])

    def _keep_head_input(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._head_input = args[0]


def device_of(head: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return where a head's weight is, and its type."""
    weight = cast(Tensor, head.weight)
    return weight.device, weight.dtype
