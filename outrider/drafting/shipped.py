"""Drafts that ship with the project."""

from pathlib import Path

FOLDER = Path(__file__).parent / "checkpoints"
FEATURE = "smollm2-135m-instruct-feature"
"""The feature draft of the default target."""


def feature_for(target: str, dtype: str, device: str = "cpu") -> Path | None:
    """Return the folder of the feature draft that ships for a target, None where none does or it would not run.

    Args:
        target: name of the target.
        dtype: of its weights; a trained draft runs in bfloat16 and float32.
        device: of the drafter, as torch names it; a trained draft runs on a CPU.
    """
    runs = dtype != "float16" and device.partition(":")[0] == "cpu"
    return shipped(f"{target}-feature") if runs else None


def shipped(name: str) -> Path | None:
    """Return the folder of a draft that ships with the project, None where there is none of that name."""
    folder = FOLDER / name
    return folder if name and Path(name).name == name and (folder / "config.json").is_file() else None
