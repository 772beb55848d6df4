"""Drafts that ship with the project."""

from pathlib import Path

FOLDER = Path(__file__).parent / "checkpoints"
FEATURE = "smollm2-135m-instruct-feature"
"""The feature draft of the default target."""


def shipped(name: str) -> Path | None:
    """Return the folder of a draft that ships with the project, None where there is none of that name."""
    folder = FOLDER / name
    return folder if name and Path(name).name == name and (folder / "config.json").is_file() else None
