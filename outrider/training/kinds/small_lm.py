"""Trains a small causal LM on the target's text: a Llama of a few layers with the target's tokenizer.

It reads tokens alone, so that its laws do not depend on where a chain began: every step is the same. Saved as a folder
that `transformers` loads, it is served like any other draft model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafting.checkpoint import Origin
from outrider.errors import InvalidRequest
from outrider.training.batches import Batch
from outrider.training.kinds.protocol import Target


class SmallLmTrainee:
    """A small causal LM in training."""

    reads_features = False
    depth = 1

    def __init__(self, target: Target, layers: int, hidden: int) -> None:
        """Make a model with random layers; embedding and head start from the target's where they are as wide.

        Args:
            target: On the device that is trained on.
            layers: How many.
            hidden: Its width, a multiple of 64.

        Raises:
            InvalidRequest: The width is not possible.
        """
        if hidden < 64 or hidden % 64:
            raise InvalidRequest("hidden", hidden, "a multiple of 64")
        config = LlamaConfig(**_fields(target, layers, hidden))
        model: Any = LlamaForCausalLM(config)
        self.net: nn.Module = model.float()
        model.generation_config.eos_token_id = getattr(target.model.generation_config, "eos_token_id", None)
        if hidden == target.embedding.shape[1]:
            with torch.no_grad():
                model.get_input_embeddings().weight.copy_(target.embedding)
        self.net.to(target.embedding.device)
        self._tokenizer = target.tokenizer

    @property
    def head(self) -> Tensor:
        """Rows of all ids."""
        model: Any = self.net
        weight: Tensor = model.lm_head.weight
        return weight

    def guesses(self, batch: Batch, depth: int, missing: Tensor | None = None) -> Iterator[Tensor]:
        """Yield hidden states; see the protocol."""
        del missing
        model: Any = self.net
        hidden = model.model(batch.token_ids, use_cache=False).last_hidden_state[:, 1:]
        for _ in range(depth):
            yield hidden

    def draft_numbers(self, ids: Tensor) -> Tensor:
        """Return the ids themselves: it knows them all."""
        return ids

    def save(self, folder: Path, origin: Origin) -> None:
        """Write a folder as `transformers` reads it, in bfloat16; what it was trained for is in no file of that."""
        del origin
        model: Any = LlamaForCausalLM(self.net.config).to(torch.bfloat16)  # type: ignore[arg-type]
        model.load_state_dict(self.net.state_dict())
        model.generation_config = self.net.generation_config
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


def _fields(target: Target, layers: int, hidden: int) -> dict[str, Any]:
    """Return a small model's configuration."""
    config = target.model.config
    return {
        "vocab_size": len(target.embedding),
        "hidden_size": hidden,
        "intermediate_size": 64 * round(hidden * 8 / 3 / 64),
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", 2048)),
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-5)),
        "tie_word_embeddings": True,
        "bos_token_id": getattr(config, "bos_token_id", None),
        "eos_token_id": getattr(config, "eos_token_id", None),
        "pad_token_id": getattr(config, "pad_token_id", None),
    }
