"""A model's embedding without the rest of the model: what a draft that reads the target's features needs of it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from outrider.errors import FailedPrecondition, NotFound
from outrider.messages import Vocabulary
from outrider.model.gguf import Progress
from outrider.model.loader import load
from outrider.model.names import ModelSpec, locate, silent
from outrider.model.vocabulary import HasVocabulary, vocabulary

_NAMES = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight", "embed_tokens.weight")
"""What checkpoints call an embedding."""


@dataclass(frozen=True, slots=True)
class TargetOutline:
    """What is known of a target without its layers."""

    embedding: Tensor
    """[vocab_size, hidden_size]"""
    tokenizer: HasVocabulary
    vocabulary: Vocabulary
    context_len: int
    """Most tokens of a session; 0 where the model does not say."""


def outline(spec: ModelSpec, on_progress: Progress = silent) -> TargetOutline:
    """Read a model's embedding, tokenizer and limits; blocks.

    The embedding alone is read from a folder of safetensors files; any other model is loaded, and the rest of it
    dropped.

    Args:
        spec: which model, in which dtype.
        on_progress: told about stages.

    Raises:
        NotFound: no such model.
        FailedPrecondition: it has no embedding that can be told from the rest.
    """
    source = locate(spec.name, on_progress)
    on_progress("loading the embedding", None)
    folder = Path(source)
    embedding = _stored(folder) if folder.is_dir() else None
    if embedding is None:
        model, tokenizer = load(spec, on_progress)
        module: Any = model.get_input_embeddings()
        if not isinstance(getattr(module, "weight", None), Tensor):
            raise FailedPrecondition(f"model {spec.name!r} has no embedding that a draft could use")
        embedding, config = module.weight.detach().clone(), model.config
    else:
        try:
            config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise NotFound(f"model {spec.name!r} cannot be loaded from {source}: {error}") from error
    on_progress("loading the embedding", 1.0)
    dtype = cast(torch.dtype, getattr(torch, spec.dtype))
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    return TargetOutline(embedding.to(dtype), tokenizer, vocabulary(tokenizer), limit)


def _stored(folder: Path) -> Tensor | None:
    """Return the embedding of a folder of safetensors files; None if there is none under a known name."""
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                name = next((each for each in _NAMES if each in names), None)
                if name is not None:
                    return cast(Tensor, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise NotFound(f"{path} cannot be read: {error}") from error
    return None


def _files(folder: Path) -> Iterator[Path]:
    """Yield the file that an index names for an embedding, else all files there are."""
    try:
        placed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    except (OSError, ValueError, KeyError):
        yield from sorted(folder.glob("*.safetensors"))
        return
    yield from {folder / placed[name] for name in _NAMES if name in placed}
