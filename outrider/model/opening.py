"""From a model's name to a runner that is ready: load, take over, check against the stock forward, probe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from outrider.messages import Vocabulary
from outrider.model.gguf import Progress
from outrider.model.loader import end_token_ids, load
from outrider.model.memory import KvBudget
from outrider.model.names import ModelSpec, cache_dir, locate
from outrider.model.parallel import Ranks
from outrider.model.probe import StockCheck, calibrate
from outrider.model.runner import ModelRunner
from outrider.model.toy import ToyTokenizer, toy_blocks, toy_from_name
from outrider.model.transformers_runner import TransformersRunner
from outrider.model.vocabulary import vocabulary
from outrider.model.weights import weights_digest


class Tokenizer(Protocol):
    """The part of `transformers`' tokenizers that Outrider uses."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """Return the text of ids; an incomplete character shows as U+FFFD."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the map from token to id."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], tokenize: bool = ..., add_generation_prompt: bool = ...
    ) -> list[int] | str:
        """Return a conversation in the model's format."""
        ...


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that can be served."""

    runner: ModelRunner
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    end_token_ids: tuple[int, ...]
    weights: bytes = b""
    """A digest of the weights, if it was asked for; of a toy its name."""


def open_model(
    spec: ModelSpec,
    *,
    num_blocks: int | KvBudget = 256,
    context_len: int = 0,
    on_progress: Progress = lambda *_: None,
    digest_weights: bool = False,
    ranks: Ranks | None = None,
) -> OpenedModel:
    """Open a model; blocks for seconds, longer the first time.

    Args:
        spec: Which one; names that start with "toy" give a toy (`toy_from_name`).
        num_blocks: Size of the KV pool in blocks of 64 tokens, or memory to fill with it.
        context_len: Most tokens of a session; 0 takes the model's own limit.
        on_progress: Told about stages: name, finished fraction or None.
        digest_weights: Whether to compute a digest of the weights, which takes about a second per GiB.
        ranks: That share the model, of which this one leads; None: nobody does.

    Raises:
        NotFound: No such model.
        FailedPrecondition: The model has a feature that is not supported, or there is no memory for its KV.
        RunnerBroken: Another rank is gone.
    """
    if spec.name == "toy" or spec.name.startswith("toy:"):
        toy = ToyTokenizer()
        runner = toy_from_name(spec.name, toy_blocks(num_blocks))
        return OpenedModel(runner, toy, vocabulary(toy), (toy.eos_token_id,), spec.name.encode())
    if ranks is not None:
        locate(spec.name, on_progress)  # what has to be converted is converted once
        ranks.wait()
    model, tokenizer = load(spec, on_progress)
    ends = end_token_ids(model, tokenizer)
    # Before the runner takes the model apart.
    weights = weights_digest(model) if digest_weights else b""
    stock = StockCheck(model)
    served = TransformersRunner(model, name=spec.label, num_blocks=num_blocks, context_len=context_len)
    if ranks is not None:
        ranks.agree(served.info.num_blocks)
        served.lead(ranks)
    on_progress("checking the model", None)
    stock.verify(served)
    calibrate(served, cache_dir())
    on_progress("checking the model", 1.0)
    return OpenedModel(served, cast(Tokenizer, tokenizer), vocabulary(tokenizer), ends, weights)


def follow(spec: ModelSpec, ranks: Ranks, context_len: int = 0) -> None:
    """Take part in a model that another rank leads, until it dismisses this one; blocks.

    Args:
        spec: As the leader has it.
        ranks: That share the model.
        context_len: As the leader has it.

    Raises:
        NotFound: No such model.
        FailedPrecondition: The model has a feature that is not supported.
        RunnerBroken: The leader is gone.
    """
    ranks.wait()
    model, _ = load(spec)
    StockCheck(model)  # the leader's stock forward needs all parts
    num_blocks = ranks.agree(0)
    TransformersRunner(model, name=spec.label, num_blocks=num_blocks, context_len=context_len).follow(ranks)
