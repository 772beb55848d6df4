"""From settings to a runner that is ready; blocks for as long as the model takes to load."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.messages import Vocabulary
from outrider.model.loader import ModelSpec
from outrider.model.opening import open_model
from outrider.model.runner import ModelRunner
from outrider.model.toy import ToyLanguage, ToyRunner, ToyTokenizer, toy_blocks
from outrider.model.vocabulary import HasVocabulary, vocabulary
from verify_service.config import TOY, VerifySettings

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner, and the vocabulary it speaks."""

    runner: ModelRunner
    vocabulary: Vocabulary
    tokenizer: HasVocabulary | None = None
    """Whose map is told to those who ask; None: it is not told."""


def load_target(settings: VerifySettings, on_progress: Progress) -> Loaded:
    """Load and probe what the settings ask for.

    Args:
        settings: of the verifier.
        on_progress: told about stages: name, finished fraction or None.

    Raises:
        NotFound: no such model.
        FailedPrecondition: the model, or one of its settings, is not supported.
    """
    torch.set_num_threads(settings.threads)
    if settings.model == TOY:
        return _toy(settings)
    spec = ModelSpec(settings.model, settings.dtype, None, settings.device)
    opened = open_model(spec, num_blocks=settings.pool, context_len=settings.context_len, on_progress=on_progress)
    return Loaded(opened.runner, opened.vocabulary, opened.tokenizer)


def _toy(settings: VerifySettings) -> Loaded:
    tokenizer = ToyTokenizer()
    language = ToyLanguage(len(tokenizer), settings.toy_seed, settings.toy_order, settings.toy_sharpness)
    runner = ToyRunner(
        language,
        context_len=settings.context_len or 4096,
        num_blocks=toy_blocks(settings.pool),
        delay_s=settings.toy_delay_s,
    )
    return Loaded(runner, vocabulary(tokenizer), tokenizer)
