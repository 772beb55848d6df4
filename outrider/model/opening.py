"""From a model's name to a runner that is ready: load, take over, check against the stock forward, probe."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from outrider.messages import Vocabulary
from outrider.model.gguf import Progress
from outrider.model.loader import ModelSpec, cache_dir, end_token_ids, load
from outrider.model.probe import StockCheck, calibrate
from outrider.model.transformers_runner import TransformersRunner
from outrider.model.vocabulary import vocabulary


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that can be served."""

    runner: TransformersRunner
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    end_token_ids: tuple[int, ...]


def open_model(
    spec: ModelSpec, *, num_blocks: int = 256, context_len: int = 0, on_progress: Progress = lambda *_: None
) -> OpenedModel:
    """Open a model; blocks for seconds, longer the first time.

    Args:
        spec: Which one.
        num_blocks: Size of the KV pool in blocks of 64 tokens.
        context_len: Most tokens of a session; 0 takes the model's own limit.
        on_progress: Told about stages: name, finished fraction or None.

    Raises:
        NotFound: No such model.
        FailedPrecondition: The model has a feature that is not supported.
    """
    model, tokenizer = load(spec, on_progress)
    ends = end_token_ids(model, tokenizer)
    stock = StockCheck(model)
    runner = TransformersRunner(model, name=spec.label, num_blocks=num_blocks, context_len=context_len)
    on_progress("checking the model", None)
    stock.verify(runner)
    calibrate(runner, cache_dir())
    on_progress("checking the model", 1.0)
    return OpenedModel(runner, tokenizer, vocabulary(tokenizer), ends)
