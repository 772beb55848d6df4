"""Checkpoints of trained drafts: a folder with `config.json` and `model.safetensors`.

A trained draft is of use to one target only. The folder says which: by the vocabulary's fingerprint, by the width of
its hidden states, and by the mean of its embedding, which tells apart models that share a tokenizer and a width. The
target's name is kept for people and is not compared: the same weights have many names.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.drafting.feature import FeatureDraft, FeatureShape
from outrider.drafting.medusa import MedusaHeads, MedusaShape
from outrider.errors import FailedPrecondition, NotFound, VocabularyMismatch
from outrider.messages import Vocabulary

VERSION = 1
"""Of the format."""
FEATURE_LAYER = -1
"""Features are the last hidden state, after the final norm."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_MEAN = "target_embedding_mean"
_TOLERANCE = 0.02
"""How far embedding means may lie apart, as a share of their root mean square: dtypes round differently."""

Draft = FeatureDraft | MedusaHeads


@dataclass(frozen=True, slots=True)
class Origin:
    """Which target a draft was trained for, and how."""

    target: str
    vocabulary: Vocabulary
    """Of the target's tokenizer."""
    embedding_mean: Tensor
    """[hidden] float32, over all rows of the target's embedding."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Data, seeds, steps, time and what was reached."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A draft as read from a folder."""

    draft: Draft
    origin: Origin

    @property
    def kind(self) -> str:
        """What it is: "feature" or "medusa"."""
        return _kind(self.draft)

    def check_target(self, vocabulary: Vocabulary, embedding: Tensor) -> None:
        """Check that a target is the one this draft was trained for.

        Args:
            vocabulary: Of the target's tokenizer.
            embedding: [vocabulary, hidden], the target's.

        Raises:
            VocabularyMismatch: Its tokenizer is another one.
            FailedPrecondition: Its width or its embedding differs.
        """
        ours = self.origin.vocabulary
        if ours.fingerprint != vocabulary.fingerprint:
            raise VocabularyMismatch(
                f"the draft was trained for the vocabulary {ours.fingerprint[:12]} of {self.origin.target}, the target "
                f"has {vocabulary.fingerprint[:12]}"
            )
        hidden = self.draft.shape.hidden_size
        if embedding.shape[1] != hidden:
            raise FailedPrecondition(
                f"the draft reads features of {hidden} values ({self.origin.target}), the target has "
                f"{embedding.shape[1]}"
            )
        mean, scale = self.origin.embedding_mean, float(self.origin.embedding_mean.square().mean().sqrt())
        apart = float((embedding_mean(embedding) - mean).square().mean().sqrt())
        if apart > _TOLERANCE * scale:
            raise FailedPrecondition(
                f"the draft was trained for {self.origin.target}: the target's embedding differs from that model's by "
                f"{apart / scale:.0%}, at most {_TOLERANCE:.0%} is allowed"
            )


def embedding_mean(embedding: Tensor) -> Tensor:
    """Return the mean of an embedding's rows, [hidden] float32 on the CPU."""
    return embedding.detach().float().mean(dim=0).cpu()


def save(folder: Path, draft: Draft, origin: Origin, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a draft; the weights first, so that a folder with a `config.json` is complete.

    Args:
        folder: Made if it is not there; files of an earlier checkpoint are replaced.
        draft: The network.
        origin: What it was trained for.
        dtype: Of the weights on disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.detach().to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in draft.state_dict().items()
    }
    save_file(tensors | {_MEAN: origin.embedding_mean}, _beside(folder / WEIGHTS))
    config = {
        "kind": _kind(draft),
        "version": VERSION,
        "target": origin.target,
        "target_vocabulary": asdict(origin.vocabulary),
        "feature_layer": FEATURE_LAYER,
        **asdict(draft.shape),
        "recipe": dict(origin.recipe),
    }
    _beside(folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    # safetensors lets nobody but the owner read what it writes; a service may run as somebody else.
    _beside(folder / WEIGHTS).chmod(_beside(folder / CONFIG).stat().st_mode)
    for name in (WEIGHTS, CONFIG):
        _beside(folder / name).replace(folder / name)


def load(folder: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Checkpoint:
    """Read a draft; blocks.

    Args:
        folder: As `save` wrote it.
        dtype: Of the weights in memory.
        device: Where they go.

    Returns:
        The draft in evaluation mode, without gradients, and its origin.

    Raises:
        NotFound: The folder holds no checkpoint.
        FailedPrecondition: It is of another format, or its parts do not fit each other; says what.
    """
    config = _read_config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise NotFound(f"the draft {str(folder)!r} has no {WEIGHTS}") from error
    except (OSError, SafetensorError) as error:
        raise FailedPrecondition(f"the draft's {folder / WEIGHTS} cannot be read: {error}") from error
    draft = _empty(config, folder)
    mean = tensors.pop(_MEAN, None)
    try:
        draft.load_state_dict(tensors)
    except RuntimeError as error:
        raise FailedPrecondition(f"the draft's {folder / WEIGHTS} does not fit its {CONFIG}: {error}") from error
    if mean is None or mean.shape != (draft.shape.hidden_size,):
        raise FailedPrecondition(f"the draft's {folder / WEIGHTS} has no {_MEAN} of {draft.shape.hidden_size} values")
    draft.requires_grad_(False).train(False).to(device=device, dtype=dtype)
    return Checkpoint(draft, Origin(config["target"], _vocabulary(config, folder), mean, config["recipe"]))


def _read_config(folder: Path) -> dict[str, Any]:
    """Read and check the configuration; see `load`."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"the draft {str(folder)!r} has no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"the draft's {path} cannot be read: {error}") from error
    wanted = {"kind", "version", "target", "target_vocabulary", "feature_layer", "recipe"}
    if not isinstance(config, dict) or wanted - config.keys():
        missing = ", ".join(sorted(wanted - set(config if isinstance(config, dict) else ())))
        raise FailedPrecondition(f"the draft's {path} lacks {missing}")
    for name, allowed in (("version", VERSION), ("feature_layer", FEATURE_LAYER)):
        if config[name] != allowed:
            raise FailedPrecondition(f"the draft's {path}: {name} {config[name]!r} is not {allowed}")
    return config


def _empty(config: Mapping[str, Any], folder: Path) -> Draft:
    """Return a network of the configured kind and shape, its weights still to come."""
    kind = config["kind"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise FailedPrecondition(f"the draft's {folder / CONFIG}: kind {kind!r} is not {' or '.join(_KINDS)}")
    draft_type, shape_type = _KINDS[kind]
    try:
        shape = shape_type(**{entry.name: config[entry.name] for entry in fields(shape_type)})
        return cast(Draft, draft_type(shape))
    except KeyError as error:
        raise FailedPrecondition(f"the draft's {folder / CONFIG} lacks {error.args[0]}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise FailedPrecondition(f"the draft's {folder / CONFIG} has sizes of no network: {error}") from error


def _vocabulary(config: Mapping[str, Any], folder: Path) -> Vocabulary:
    """Return the target's vocabulary."""
    try:
        return Vocabulary(**config["target_vocabulary"])
    except TypeError as error:
        raise FailedPrecondition(f"the draft's {folder / CONFIG}: target_vocabulary is none: {error}") from error


def _kind(draft: Draft) -> str:
    return "feature" if isinstance(draft, FeatureDraft) else "medusa"


def _beside(path: Path) -> Path:
    """Return where a file is written before it takes its place."""
    return path.with_name(path.name + ".part")


_KINDS: Mapping[str, Any] = {"feature": (FeatureDraft, FeatureShape), "medusa": (MedusaHeads, MedusaShape)}
"""Network and sizes of each kind."""
