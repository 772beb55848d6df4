"""`outrider drafters blend`: the mean of two drafts."""

from pathlib import Path

from rich.console import Console

from outrider.cli.ranges import check_range
from outrider.drafting.blending import blend as blended

console = Console(highlight=False)


def blend(first: Path, second: Path, *, out: Path, share: float = 0.5) -> None:
    """Average the weights of a draft and of what it was trained on to.

    Args:
        first: Folder of a draft.
        second: Folder of another one of the same sizes and target, for instance one that began from the first.
        out: Folder that the mean is written to.
        share: Of the second.
    """
    check_range("share", share, 0.0, 1.0)
    blended(first, second, share, out)
    console.print(f"the mean: {out}", soft_wrap=True)
