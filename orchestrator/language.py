"""The tokenizer of the served model: prompts to ids, and what is needed to turn ids into text. No weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, assert_never, cast

from jinja2 import TemplateError

from orchestrator.text import Decoder, Tokenizer
from outrider.codec.checks import MAX_PREDICTION_TOKENS
from outrider.errors import InvalidRequest, NotFound
from outrider.generation import ChatMessage, ChatPrompt, TextPrediction, TextPrompt, TokenPrediction, TokenPrompt
from outrider.messages import Vocabulary
from outrider.model.names import locate
from outrider.model.toy import ToyTokenizer
from outrider.model.vocabulary import vocabulary

TOY_MODEL = "toy"
"""Name of the model whose tokenizer needs no files."""

Prompt = TextPrompt | TokenPrompt | ChatPrompt


class Encoder(Protocol):
    """The part of a tokenizer that turns text into ids."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], tokenize: bool = True, add_generation_prompt: bool = True
    ) -> Any:
        """Return a conversation as the model wants to see it."""
        ...


@dataclass(frozen=True, slots=True)
class Language:
    """A model's tokenizer, and what follows from it."""

    model: str
    encoder: Encoder
    decoder: Decoder
    vocabulary: Vocabulary
    end_ids: frozenset[int]
    """Ids that end a generation."""

    def encode(self, prompt: Prompt, *, first: bool) -> tuple[int, ...]:
        """Turn a prompt into ids; may block for long ones.

        Args:
            prompt: text, ids or a conversation.
            first: whether it begins a session, so that the model's opening special tokens belong before a text.

        Raises:
            InvalidRequest: the prompt is empty, or a conversation that the model's template refuses.
        """
        match prompt:
            case TokenPrompt():
                ids = list(prompt.token_ids)
            case TextPrompt():
                ids = self.encoder.encode(prompt.text, add_special_tokens=first)
            case ChatPrompt():
                ids = self._chat(prompt.messages)
            case _:
                assert_never(prompt)
        if not ids:
            raise InvalidRequest("prompt", "no tokens", "a prompt of at least one token")
        return tuple(ids)

    def encode_prediction(self, prediction: TextPrediction | TokenPrediction | None) -> tuple[int, ...]:
        """Turn an expected answer into ids; may block for long ones.

        Raises:
            InvalidRequest: it has more tokens than allowed, or none.
        """
        match prediction:
            case TextPrediction():
                ids = self.encoder.encode(prediction.text, add_special_tokens=False)
                if not 1 <= len(ids) <= MAX_PREDICTION_TOKENS:
                    allowed = f"a text of 1 .. {MAX_PREDICTION_TOKENS} tokens"
                    raise InvalidRequest("prediction.text", f"{len(ids)} tokens", allowed)
                return tuple(ids)
            case TokenPrediction():
                return prediction.token_ids
            case None:
                return ()
            case _:
                assert_never(prediction)

    def _chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        spoken = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.encoder.apply_chat_template(spoken, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:
            allowed = f"a conversation that the chat template of {self.model} takes ({error})"
            raise InvalidRequest("chat.messages", spoken, allowed) from error
        return self.encoder.encode(text, add_special_tokens=False)


def load_language(model: str) -> Language:
    """Load a model's tokenizer; blocks, for seconds if the model has to be converted first.

    Args:
        model: as `outrider.model.loader.ModelSpec.name`, or `TOY_MODEL`.

    Raises:
        NotFound: there is no such model.
    """
    if model == TOY_MODEL:
        toy = ToyTokenizer()
        return Language(model, toy, Decoder(toy), vocabulary(toy), frozenset({toy.eos_token_id}))
    # Here, because a toy needs none of it: it takes seconds to import.
    from transformers import AutoTokenizer  # noqa: PLC0415

    source = locate(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise NotFound(f"the tokenizer of {model!r} cannot be loaded from {source}: {error}") from error
    tokenizer.clean_up_tokenization_spaces = False
    ends = {*_stated_ends(source), *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
    return Language(
        model, cast(Encoder, tokenizer), Decoder(cast(Tokenizer, tokenizer)), vocabulary(tokenizer), frozenset(ends)
    )


def _stated_ends(source: str) -> list[int]:
    """Return the end-of-sequence ids of the generation settings; a model need not have any."""
    from transformers import GenerationConfig  # noqa: PLC0415 - as above

    try:
        stated = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:
        return []
    if stated is None:
        return []
    return list(stated) if isinstance(stated, list) else [stated]
