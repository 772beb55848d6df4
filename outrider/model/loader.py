"""Loads a model with its tokenizer, and, for layer-skip drafts, keeps only some of its layers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from outrider.errors import FailedPrecondition, NotFound
from outrider.model.gguf import Progress
from outrider.model.names import PACKAGED, ModelSpec, locate, silent
from outrider.model.sharding import require_divisible

_HUB_TIMEOUT_S = 10.0
_LOADING = threading.Lock()
"""`transformers` switches global state while it loads: two threads at once leave models without weights."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def load(spec: ModelSpec, on_progress: Progress = silent) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; blocks.

    Args:
        spec: Which one.
        on_progress: Told about stages: name, finished fraction or None.

    Returns:
        The model in evaluation mode, without gradients, and its tokenizer.

    Raises:
        NotFound: No such model; says what was tried.
        FailedPrecondition: It exists but cannot be used as asked: dtype, layers, device.
    """
    if spec.dtype not in DTYPES:
        raise FailedPrecondition(f"dtype {spec.dtype!r} is not one of {', '.join(DTYPES)}")
    with _LOADING, _quiet():
        source = locate(spec.name, on_progress)
        on_progress("loading the model", None)
        try:
            model, tokenizer = _read(source, spec)
        except (OSError, ValueError) as error:
            raise NotFound(f"model {spec.name!r} cannot be loaded from {source}: {error}") from error
    if spec.layers is not None:
        keep_layers(model, spec.layers)
    model.requires_grad_(False).train(False)
    on_progress("loading the model", 1.0)
    # The parts of a model that is split are where they belong.
    return cast(PreTrainedModel, model if spec.tensor_parallel > 1 else model.to(spec.device)), tokenizer


def _read(source: str, spec: ModelSpec) -> tuple[Any, PreTrainedTokenizerBase]:
    """Read model and tokenizer from a folder, the hub's local cache, or the hub, in this order.

    The hub is asked whether it has the model before anything is downloaded: a download retries for a minute.
    """
    local = {"local_files_only": True}
    if not Path(source).is_dir():
        try:
            AutoTokenizer.from_pretrained(source, **local)
        except (OSError, ValueError):
            _ask_hub(source)
            local = {}
    tokenizer = AutoTokenizer.from_pretrained(source, **local)
    if spec.tensor_parallel > 1:
        from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415 - see `sharding`

        require_divisible(AutoConfig.from_pretrained(source, **local), spec.tensor_parallel)
        split = DistributedConfig(tp_plan="auto")
        return AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[spec.dtype], distributed_config=split, **local
        ), tokenizer
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[spec.dtype], **local)
    return model, tokenizer


def _ask_hub(model_id: str) -> None:
    """Check that the hub has a model.

    Raises:
        NotFound: It has not, or it cannot be reached.
    """
    try:
        HfApi().model_info(model_id, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # the hub's client lets errors of its transport through, whichever that is
        raise NotFound(
            f"model {model_id!r} is not a folder, not in the local cache, not one of {', '.join(PACKAGED)}, and the "
            f"hub says: {error}"
        ) from error


def keep_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Drop all decoder layers but these, in place; the model becomes a draft of its former self.

    Raises:
        FailedPrecondition: Layers that are not there, not rising, or none.
    """
    base, config = cast(Any, model.base_model), model.config
    present = len(getattr(base, "layers", ()))
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= present:
        raise FailedPrecondition(f"layers {layers} are not rising numbers in [0, {present})")
    base.layers = nn.ModuleList(base.layers[index] for index in layers)
    for index, layer in enumerate(base.layers):
        layer.self_attn.layer_idx = index
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in layers]


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a generation: the generation settings' and the tokenizer's, rising."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    ids = {int(token) for token in (stated if isinstance(stated, list) else [stated]) if token is not None}
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `transformers`' own progress bars off the terminal."""
    bars = cast(Any, transformers_logging)
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
