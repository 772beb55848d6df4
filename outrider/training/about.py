"""What a folder of a training is of: a file beside what took long to make, so that nothing else is taken for it."""

import json
from collections.abc import Mapping
from pathlib import Path

from outrider.errors import FailedPrecondition

ABOUT = "about.json"


def is_described(folder: Path) -> bool:
    """Return whether a folder says what it is of."""
    return (folder / ABOUT).exists()


def describe(folder: Path, fields: Mapping[str, object]) -> None:
    """Write down what a folder is of; an unfinished file never has the name."""
    part = folder / f"{ABOUT}.part"
    part.write_text(json.dumps(fields, indent=2) + "\n")
    part.replace(folder / ABOUT)


def check_same(folder: Path, fields: Mapping[str, object], what: str) -> None:
    """Refuse a folder that is of something else.

    Args:
        folder: One that is described.
        fields: What it must be of.
        what: What it holds, for the error.

    Raises:
        FailedPrecondition: It is of something else; says in which fields.
    """
    found = json.loads((folder / ABOUT).read_text())
    differing = [name for name, value in fields.items() if found.get(name) != value]
    if differing:
        raise FailedPrecondition(
            f"{folder} holds {what} of another training ({', '.join(differing)} differ): remove it, or choose "
            "another --out"
        )
