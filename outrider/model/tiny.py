"""Random models of a few kilobytes, for tests and for trying things out without a checkpoint."""

from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def random_model(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> LlamaForCausalLM:
    """Return a small Llama with random weights, the same for the same arguments.

    Args:
        seed: Of the weights.
        dtype: Of the weights.
        **overrides: Fields of `LlamaConfig` that replace the defaults (2 layers, hidden 64, vocabulary 512).
    """
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**(fields | overrides)))
    return cast(LlamaForCausalLM, model.to(dtype=dtype).train(False))
