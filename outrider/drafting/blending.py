"""The mean of two drafts, weight by weight: one that was trained on from the other keeps what it knew, and has learned.

Model soups, https://arxiv.org/abs/2203.05482; of a network and what it was fine-tuned to, https://arxiv.org/abs/2109.01903.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.drafting.checkpoint import Origin, load, save
from outrider.errors import FailedPrecondition


def blend(first: Path, second: Path, share: float, out: Path) -> None:
    """Write the mean of two drafts; the embedding's mean is the second's.

    Args:
        first: folder of a draft.
        second: folder of one of the same shape and target, that guesses the same ids.
        share: of the second, 0 .. 1.
        out: folder that the mean goes to; may be one of the two.

    Raises:
        NotFound: a folder holds no draft.
        FailedPrecondition: the two do not fit each other; says in what.
    """
    one, two = (load(folder, torch.float32) for folder in (first, second))
    for name, ours, theirs in (
        ("kind", one.kind, two.kind),
        ("shape", one.draft.shape, two.draft.shape),
        ("vocabulary", one.origin.vocabulary, two.origin.vocabulary),
    ):
        if ours != theirs:
            raise FailedPrecondition(f"{first} and {second} are no drafts of one {name}: {ours} and {theirs}")
    if not torch.equal(one.draft.draft_ids, two.draft.draft_ids):
        raise FailedPrecondition(f"{first} and {second} guess other ids")
    weights = two.draft.state_dict()
    for name, old in one.draft.state_dict().items():
        if old.is_floating_point():
            weights[name].lerp_(old, 1.0 - share)
    recipe: Mapping[str, Any] = {
        "blend": {"first": 1.0 - share, "second": share},
        "first": dict(one.origin.recipe),
        "second": dict(two.origin.recipe),
    }
    save(out, two.draft, Origin(two.origin.target, two.origin.vocabulary, two.origin.embedding_mean, recipe))
