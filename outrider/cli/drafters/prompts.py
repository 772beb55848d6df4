"""`outrider drafters prompts`: a file of prompts for `outrider drafters train`."""

import json
from pathlib import Path

from rich.console import Console

from outrider.cli.ranges import check_range
from outrider.errors import InvalidRequest
from outrider.training.turns import turns

console = Console(highlight=False)


def prompts(file: Path, *, count: int = 4000, seed: int = 1) -> None:
    """Write a file of varied prompts in English, for a target to answer.

    Args:
        file: Where it goes, a .jsonl file; one that is there is replaced.
        count: How many prompts.
        seed: Of the choice.
    """
    check_range("count", count, 1, 100_000)
    if file.suffix != ".jsonl":
        raise InvalidRequest("file", str(file), "a name that ends in .jsonl")
    lines = [json.dumps({"text": turn}, ensure_ascii=False) + "\n" for turn in turns(count, seed)]
    try:
        file.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest("file", str(file), f"a file that can be written ({error.strerror})") from error
    console.print(f"{len(lines):,} prompts: {file}", soft_wrap=True)
