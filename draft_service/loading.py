"""From settings to a drafter that is ready; blocks for as long as the model takes to load."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from draft_service.config import WITH_MODEL, DraftSettings
from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.composed import Composed
from draft_service.drafters.prediction import PredictionDrafter
from draft_service.drafters.prompt_lookup import PromptLookup
from draft_service.drafters.protocol import Drafter
from draft_service.drafters.toy import noisy
from outrider.errors import NotFound
from outrider.messages import Vocabulary
from outrider.model.names import ModelSpec, locate
from outrider.model.runner import ModelRunner
from outrider.model.toy import TOY, ToyTokenizer, toy_of
from outrider.model.vocabulary import HasVocabulary, vocabulary

MAX_LOOKUP_LEN = 1 << 20
"""Most tokens of a session that drafters without a model look at."""

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A drafter, and the vocabulary it speaks."""

    drafter: Drafter
    vocabulary: Vocabulary
    runner: ModelRunner | None = None
    """The drafter's model, if it has one; the drafter's own, and here only to be described."""
    tokenizer: HasVocabulary | None = None
    """Whose map is told to those who ask; None: it is not told."""


def load_drafter(settings: DraftSettings, on_progress: Progress) -> Loaded:
    """Load what the settings ask for.

    Args:
        settings: of the worker.
        on_progress: told about stages: name, finished fraction or None.

    Raises:
        NotFound: no such model, or checkpoint of a trained draft.
        VocabularyMismatch: a trained draft is not for this target.
        FailedPrecondition: the model, or one of its settings, is not supported.
    """
    torch.set_num_threads(settings.threads)
    with_model = [kind for kind in settings.kinds if kind in WITH_MODEL]
    if with_model:
        loaded = _with_model(settings.model_copy(update={"drafter": with_model[0]}), on_progress)
    else:
        loaded = _without_model(settings, on_progress)
    size = loaded.vocabulary.size
    parts = [loaded.drafter if kind in with_model else _copier(kind, settings, size) for kind in settings.kinds]
    return loaded if len(parts) == 1 else replace(loaded, drafter=Composed(parts))


def _with_model(settings: DraftSettings, on_progress: Progress) -> Loaded:
    """Load the one drafter that has a model."""
    match settings.drafter:
        case "causal_lm":
            return _causal_lm(settings, on_progress)
        case "toy":
            return _toy(settings)
        case _:
            return _trained(settings, on_progress)


def _without_model(settings: DraftSettings, on_progress: Progress) -> Loaded:
    """Make the first drafter, for whom only the target's vocabulary is needed."""
    tokenizer = ToyTokenizer() if settings.model == TOY else _tokenizer(settings, on_progress)
    spoken = vocabulary(tokenizer)
    return Loaded(_copier(settings.kinds[0], settings, spoken.size), spoken, tokenizer=tokenizer)


def _copier(kind: str, settings: DraftSettings, vocab_len: int) -> Drafter:
    """Make a drafter that copies."""
    context_len = settings.context_len or MAX_LOOKUP_LEN
    if kind == "prediction":
        return PredictionDrafter(vocab_len, context_len=context_len)
    return PromptLookup(vocab_len, context_len=context_len, min_ngram=settings.min_ngram)


def _trained(settings: DraftSettings, on_progress: Progress) -> Loaded:
    from draft_service.trained import load_trained  # noqa: PLC0415 - as in `_causal_lm`

    trained = load_trained(settings, on_progress)
    return Loaded(trained.drafter, trained.target.vocabulary, tokenizer=trained.target.tokenizer)


def _causal_lm(settings: DraftSettings, on_progress: Progress) -> Loaded:
    # Here, because a toy needs none of it: the model libraries take seconds to import.
    from outrider.model.opening import open_model  # noqa: PLC0415

    spec = ModelSpec(settings.model, settings.dtype, settings.layers, settings.device)
    opened = open_model(spec, num_blocks=settings.pool, context_len=settings.context_len, on_progress=on_progress)
    drafter = CausalLm(
        opened.runner,
        vocab_len=opened.vocabulary.size,
        prefix_reuse=settings.prefix_reuse,
        tree_nodes=settings.tree_nodes,
    )
    return Loaded(drafter, opened.vocabulary, opened.runner, opened.tokenizer)


def _tokenizer(settings: DraftSettings, on_progress: Progress) -> HasVocabulary:
    """Load a model's tokenizer alone."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - as above

    source = locate(settings.model, on_progress)
    on_progress("loading the tokenizer", None)
    try:
        tokenizer: HasVocabulary = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise NotFound(f"the tokenizer of {settings.model!r} cannot be loaded from {source}: {error}") from error
    on_progress("loading the tokenizer", 1.0)
    return tokenizer


def _toy(settings: DraftSettings) -> Loaded:
    tokenizer, runner = ToyTokenizer(), toy_of(settings, lambda target: noisy(target, settings.toy_agreement))
    drafter = CausalLm(
        runner,
        vocab_len=len(tokenizer),
        kind=TOY,
        prefix_reuse=settings.prefix_reuse,
        tree_nodes=settings.tree_nodes,
    )
    return Loaded(drafter, vocabulary(tokenizer), runner, tokenizer)
