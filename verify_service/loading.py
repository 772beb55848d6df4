"""From settings to a runner that is ready; blocks for as long as the model takes to load."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.messages import Vocabulary
from outrider.model.names import ModelSpec
from outrider.model.runner import ModelRunner
from outrider.model.toy import TOY, ToyTokenizer, toy_of
from outrider.model.vocabulary import HasVocabulary, vocabulary
from outrider.tier.identity import identify
from outrider.tier.speeds import Speeds
from outrider.tier.tier import BlockTier
from verify_service.config import VerifySettings
from verify_service.restoring import Tier

if TYPE_CHECKING:
    from outrider.model.parallel import Ranks

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner, and the vocabulary it speaks."""

    runner: ModelRunner
    vocabulary: Vocabulary
    tokenizer: HasVocabulary | None = None
    """Whose map is told to those who ask; None: it is not told."""
    tier: Tier | None = None
    """Where its KV is stored outside this process; whoever takes it closes it."""
    ranks: "Ranks | None" = None
    """The processes that share the model; whoever stops dismisses the others."""


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
    # Here, because a toy needs none of it: the model libraries take seconds to import.
    from outrider.model.opening import open_model  # noqa: PLC0415

    spec, ranks = spec_of(settings), meet(settings)
    opened = open_model(
        spec,
        num_blocks=settings.pool,
        context_len=settings.context_len,
        on_progress=on_progress,
        digest_weights=bool(settings.kv_tier_url),
        ranks=ranks,
    )
    tier = open_tier(settings, opened.runner, opened.weights)
    return Loaded(opened.runner, opened.vocabulary, opened.tokenizer, tier, ranks)


def spec_of(settings: VerifySettings) -> ModelSpec:
    """Return which model the settings ask for."""
    return ModelSpec(settings.model, settings.dtype, None, settings.device, tensor_parallel=settings.tensor_parallel)


def meet(settings: VerifySettings) -> "Ranks | None":
    """Meet the other processes that share the model; None: there are none.

    Raises:
        InvalidRequest: `torchrun` started another number of processes than the settings say.
        RunnerBroken: they did not come.
    """
    from outrider.model.parallel import join, own_rank  # noqa: PLC0415 - as in `load_target`

    if settings.tensor_parallel == 1:
        own_rank(1)
        return None
    return join(settings.tensor_parallel, settings.device, settings.rank_timeout_s)


def open_tier(settings: VerifySettings, runner: ModelRunner, weights: bytes) -> Tier | None:
    """Return the tier that the settings ask for, if they do; the server is not asked for anything yet.

    Args:
        settings: of the verifier.
        runner: calibrated; a few passes are run.
        weights: a digest of its weights.

    Raises:
        FailedPrecondition: a context shorter than one block.
    """
    if not settings.kv_tier_url:
        return None
    found = identify(runner, weights)
    return Tier(BlockTier(found.identity, settings.tier), Speeds(found.prefill_s))


def _toy(settings: VerifySettings) -> Loaded:
    tokenizer, runner = ToyTokenizer(), toy_of(settings)
    # What decides the toy's rows, in place of weights.
    weights = repr((settings.toy_seed, settings.toy_order, settings.toy_sharpness)).encode()
    return Loaded(runner, vocabulary(tokenizer), tokenizer, open_tier(settings, runner, weights))
