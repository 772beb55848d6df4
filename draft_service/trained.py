"""Loads drafters that were trained for one target: a checkpoint, and what it needs of the target itself."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from draft_service.config import DraftSettings
from draft_service.drafters.feature import FeatureDrafter
from draft_service.drafters.feature_net import FeatureNet
from draft_service.drafters.medusa import Medusa, MedusaNet
from draft_service.drafters.protocol import Drafter, DrafterInfo
from draft_service.drafters.sampling import Ranked
from outrider.drafting.checkpoint import FEATURE_LAYER, Checkpoint, Draft, load
from outrider.drafting.feature import FeatureDraft
from outrider.drafting.shipped import shipped
from outrider.errors import FailedPrecondition, NotFound
from outrider.model.embedding import TargetOutline, outline
from outrider.model.gguf import Progress
from outrider.model.names import ModelSpec
from outrider.model.row_attention import is_supported

DEFAULT_CONTEXT_LEN = 4096
"""Most tokens of a session where neither the settings nor the target say."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained drafter, and the target it is for."""

    drafter: Drafter
    target: TargetOutline


def load_trained(settings: DraftSettings, on_progress: Progress) -> Trained:
    """Load the checkpoint that the settings name, and its target's embedding and tokenizer.

    Raises:
        NotFound: no such checkpoint or target.
        VocabularyMismatch: the target speaks another vocabulary than the draft was trained for.
        FailedPrecondition: the checkpoint is of another kind or target, or cannot run as asked.
    """
    _check(settings)
    on_progress("loading the draft", None)
    folder = _folder(settings)
    checkpoint = load(folder, torch.float32)
    if checkpoint.kind != settings.drafter:
        raise FailedPrecondition(
            f"{settings.variable('checkpoint')}: {str(folder)!r} holds a draft of kind {checkpoint.kind!r}, "
            f"{settings.variable('drafter')} is {settings.drafter!r}"
        )
    target = outline(ModelSpec(settings.model, settings.dtype), on_progress)
    checkpoint.check_target(target.vocabulary, target.embedding)
    ranked = rank(checkpoint.draft, target.vocabulary.size)
    drafter = make_drafter(settings, checkpoint, target, ranked)
    return Trained(drafter, target)


def make_drafter(settings: DraftSettings, checkpoint: Checkpoint, target: TargetOutline, ranked: Ranked) -> Drafter:
    """Return the drafter of a checkpoint whose head's rows rise by id."""
    dtype = getattr(torch, settings.dtype)
    context_len = min(filter(None, (settings.context_len, target.context_len)), default=DEFAULT_CONTEXT_LEN)
    info = DrafterInfo(
        checkpoint.kind, settings.model, target.vocabulary.size, context_len, settings.dtype,
        feature_layers=(FEATURE_LAYER,), feature_size=checkpoint.draft.shape.hidden_size,
    )  # fmt: skip
    draft = checkpoint.draft
    if not isinstance(draft, FeatureDraft):
        return Medusa(MedusaNet(draft, target.embedding, dtype), ranked, info, tree_nodes=settings.tree_nodes)
    net = FeatureNet(draft, target.embedding, dtype=dtype, num_blocks=settings.pool, context_len=context_len)
    return FeatureDrafter(net, ranked, info)


def rank(draft: Draft, vocab_len: int) -> Ranked:
    """Sort a head's rows by their ids, in place, and drop those that the vocabulary does not have.

    Raises:
        FailedPrecondition: no id is left, or one comes twice.
    """
    ids: Tensor = draft.draft_ids.to(torch.int64)
    order = torch.argsort(ids)
    order = order[(ids[order] >= 0) & (ids[order] < vocab_len)]
    kept = ids[order]
    if not len(kept) or bool((kept[1:] == kept[:-1]).any()):
        raise FailedPrecondition("the draft's ids are not distinct ids of the target's vocabulary")
    draft.head.weight = nn.Parameter(draft.head.weight[order], requires_grad=False)
    return Ranked(kept.tolist(), vocab_len)


def _folder(settings: DraftSettings) -> Path:
    """Return where the checkpoint is: the one that is named, or the one that ships for the model.

    Raises:
        NotFound: none is named, and none ships.
    """
    if settings.checkpoint:
        return shipped(settings.checkpoint) or Path(settings.checkpoint).expanduser()
    own = shipped(f"{settings.model}-{settings.drafter}")
    if own is None:
        raise NotFound(
            f"no draft of kind {settings.drafter!r} ships for {settings.model!r}: {settings.variable('checkpoint')} "
            f"has to name the folder of one that was trained for it"
        )
    return own


def _check(settings: DraftSettings) -> None:
    """Refuse what a trained drafter cannot do, before anything is loaded."""
    if not is_supported(torch.device(settings.device), getattr(torch, settings.dtype)):
        raise FailedPrecondition(
            f"a draft of kind {settings.drafter!r} runs on the CPU in bfloat16 or float32, not on {settings.device!r} "
            f"in {settings.dtype}"
        )
