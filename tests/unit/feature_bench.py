"""Drafters over target features, with a tiny target whose features are computed for any text."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from draft_service.config import DraftSettings
from draft_service.drafters.feature import FeatureDrafter
from draft_service.drafters.medusa import Medusa
from draft_service.drafters.protocol import Drafter
from draft_service.trained import make_drafter, rank
from outrider.drafting.checkpoint import Checkpoint, Draft, Origin, embedding_mean
from outrider.drafting.feature import FeatureDraft, FeatureShape
from outrider.drafting.medusa import MedusaHeads, MedusaShape
from outrider.ids import Epoch, SessionId
from outrider.messages import TargetFeatures, Vocabulary
from outrider.messages import Tensor as WireTensor
from outrider.model.embedding import TargetOutline
from outrider.model.tiny import random_model
from tests.unit.drafter_bench import EPOCH, VOCAB

HIDDEN, HEADS, KNOWN_IDS = 32, 4, 18
"""Width of the target, number of Medusa heads, ids that a draft's head knows."""


LONGEST = 320
"""Tokens of a text."""


class NoTokenizer:
    """For outlines whose tokenizer nobody asks."""

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(VOCAB)}


@cache
def target(vocab_size: int = VOCAB) -> Any:
    return random_model(3, vocab_size=vocab_size, hidden_size=HIDDEN, intermediate_size=48)


def features_of(ids: Sequence[int]) -> Tensor:
    """Return [len(ids), HIDDEN], the target's features of a text; the same bits whatever follows."""
    return _features(tuple(ids))


@cache
@torch.no_grad()
def _features(ids: tuple[int, ...]) -> Tensor:
    padded = torch.tensor([[*ids, *[0] * (LONGEST - len(ids))]])
    hidden: Tensor = target().model(padded, use_cache=False).last_hidden_state[0]
    return hidden[: len(ids)]


def random_draft(kind: str, seed: int = 0, known_ids: int = KNOWN_IDS, vocab_size: int = VOCAB) -> Draft:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft: Draft
        if kind == "feature":
            draft = FeatureDraft(FeatureShape(HIDDEN, 4, 2, 8, 48, known_ids, embedding_scale=2.0))
        else:
            draft = MedusaHeads(MedusaShape(HIDDEN, HEADS, known_ids, embedding_scale=2.0))
        draft.draft_ids.copy_(torch.randperm(vocab_size)[:known_ids])
        torch.nn.init.normal_(draft.stand_in, std=0.5)
        torch.nn.init.normal_(draft.head.weight, std=0.7)
    return draft.requires_grad_(False)


def made(draft: Draft, embedding: Tensor, vocab_len: int = VOCAB, **settings: Any) -> Drafter:
    """Return the drafter of a network."""
    vocabulary = Vocabulary("v", vocab_len)
    checkpoint = Checkpoint(draft, Origin("tiny", vocabulary, embedding_mean(embedding)))
    outline = TargetOutline(embedding, NoTokenizer(), vocabulary, 512)
    known: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "model": "tiny", "drafter": checkpoint.kind}
    return make_drafter(DraftSettings(**{**known, **settings}), checkpoint, outline, rank(draft, vocab_len))


def feature_drafter(**settings: Any) -> FeatureDrafter:
    drafter = made(random_draft("feature"), target().get_input_embeddings().weight, **settings)
    assert isinstance(drafter, FeatureDrafter)
    return drafter


def medusa(**settings: Any) -> Medusa:
    drafter = made(random_draft("medusa"), target().get_input_embeddings().weight, **settings)
    assert isinstance(drafter, Medusa)
    return drafter


def sent(ids: Sequence[int], first: int, last: int, name: str = "s", epoch: Epoch = EPOCH) -> TargetFeatures:
    """Return the message with the features of positions [first, last) of a text."""
    return message(features_of(ids)[first:last], first, name, epoch)


def message(rows: Tensor, first: int, name: str = "s", epoch: Epoch = EPOCH) -> TargetFeatures:
    tensor = WireTensor(str(rows.dtype).removeprefix("torch."), (1, *rows.shape), rows.numpy().tobytes())
    return TargetFeatures(SessionId(name), epoch, first, tensor)
