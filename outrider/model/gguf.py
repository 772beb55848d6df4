"""Converts a GGUF file, once, into a folder that loads in a second.

The folder appears under its final name only when it is complete, and one process converts while others wait: services
of a cluster start at the same moment.
"""

import hashlib
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from outrider.errors import NotFound

Progress = Callable[[str, float | None], None]
"""Called with a stage's name and its finished fraction, None where unknown."""

_SAMPLE_BYTES = 1 << 20


def converted(source: Path, cache_dir: Path, on_progress: Progress) -> Path:
    """Return the folder of a converted GGUF file; converts it if that has not been done.

    Weights are kept in bfloat16. Blocks for about 15 seconds the first time.

    Args:
        source: The file.
        cache_dir: Where converted models are kept.
        on_progress: Told about stages.

    Raises:
        NotFound: The file is not a GGUF file of a model that `transformers` can read.
    """
    target = cache_dir / "models" / f"{source.stem}-{content_key(source)}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        if not target.exists():
            _convert(source, target, on_progress)
    return target


def content_key(source: Path) -> str:
    """Return a digest that tells files apart: size, first and last mebibyte."""
    size = source.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with source.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def _convert(source: Path, target: Path, on_progress: Progress) -> None:
    """Write the folder beside its final place, then move it there in one step."""
    # Here, because whoever finds the folder written needs neither: they take seconds to import.
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        on_progress("reading the GGUF file", None)
        folder, name = str(source.parent), source.name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        on_progress("writing the converted model", 0.8)
        _unmark_quantized(model)
        model.to(torch.bfloat16).save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(target)
        on_progress("writing the converted model", 1.0)
    except (OSError, ValueError, LookupError, NotImplementedError, struct.error) as error:
        raise NotFound(f"{source} cannot be converted: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _unmark_quantized(model: Any) -> None:
    """Make a model read from GGUF savable: its weights are plain numbers by now, its marks say otherwise."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
