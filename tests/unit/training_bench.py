"""A tiny target and texts for it, for tests of training."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from outrider.messages import Vocabulary
from outrider.model.tiny import random_model
from outrider.training.batches import Batch, assemble
from outrider.training.cache import Cache, CacheKey, fill
from outrider.training.kinds.feature import FeatureTrainee
from outrider.training.kinds.medusa import MedusaTrainee
from outrider.training.kinds.protocol import Target, Trainee
from outrider.training.kinds.small_lm import SmallLmTrainee
from outrider.training.state import Schedule
from outrider.training.texts import Split, Texts, split, texts_of
from outrider.training.trainer import Material

VOCAB = 96
IDS = torch.arange(0, VOCAB, 2)
"""What the drafts know: every second id."""


@dataclass
class Setting:
    """A target with texts and their hidden states."""

    target: Target
    texts: Texts
    parts: Split
    cache: Cache

    @property
    def material(self) -> Material:
        return Material(self.texts, self.parts, self.cache)

    def trainee(self, kind: str) -> Trainee:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            if kind == "feature":
                return FeatureTrainee(self.target, IDS, 0, 3)
            if kind == "medusa":
                return MedusaTrainee(self.target, IDS, 3)
            return SmallLmTrainee(self.target, 1, 64)

    def batch(self) -> Batch:
        return assemble(self.cache, self.texts, self.parts.training[:6])


def some_texts(count: int = 24, seed: int = 0) -> Texts:
    rng = np.random.default_rng(seed)
    parts = []
    for number in range(count):
        length = int(rng.integers(12, 28))
        parts.append((rng.integers(1, VOCAB, length).tolist(), 4, 0.0 if number % 2 else 1.0))
    return texts_of(parts, VOCAB)


def tiny_target() -> Target:
    model = random_model(vocab_size=VOCAB, hidden_size=32, intermediate_size=48).requires_grad_(False)
    return Target("tiny", model, None, Vocabulary("f" * 64, VOCAB))


def key_of(target: Target, texts: Texts) -> CacheKey:
    return CacheKey("tiny", "f", texts.digest(), len(texts.tokens), len(texts), target.embedding.shape[1], VOCAB)


def make_setting(folder: Path) -> Setting:
    target, texts = tiny_target(), some_texts()
    cache = Cache(folder, key_of(target, texts), 1 << 30)
    fill(cache, target.model, texts, 128)
    return Setting(target, texts, split(texts, seed=1), cache)


def quick(steps: int = 12) -> Schedule:
    return Schedule(steps=steps, batch_tokens=128, measurements=2, bfloat16=False)
