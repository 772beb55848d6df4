"""The tokenizer of the served model: prompts to ids, and what is needed to turn ids into text. No weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from orchestrator.conversation import Conversations, template_of
from orchestrator.text import Decoder
from outrider.codec.checks import MAX_PREDICTION_TOKENS
from outrider.errors import InvalidRequest, NotFound
from outrider.generation import ChatPrompt, TextPrediction, TextPrompt, TokenPrediction, TokenPrompt
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


@dataclass(frozen=True, slots=True)
class Language:
    """A model's tokenizer, and what follows from it."""

    model: str
    encoder: Encoder
    conversations: Conversations
    decoder: Decoder
    """Ids to text without special tokens."""
    full_decoder: Decoder
    """Ids to text with special tokens."""
    vocabulary: Vocabulary
    end_ids: frozenset[int]
    """Ids that end a generation."""
    first_id: int | None = None
    """Id that the tokenizer puts before a text; None: it has none."""

    def encode(self, prompt: Prompt, *, after: Sequence[int] = ()) -> tuple[int, ...]:
        """Turn a prompt into ids; may block for long ones.

        Args:
            prompt: text, ids or a conversation.
            after: tokens of the session that it continues; empty: it begins one, so that the model's opening special
                tokens belong before a text.

        Raises:
            InvalidRequest: the prompt is empty, or a conversation that the model's template refuses.
        """
        match prompt:
            case TokenPrompt():
                ids = list(prompt.token_ids)
            case TextPrompt():
                ids = self._text(prompt.text, first=not after)
            case ChatPrompt():
                ids = self.conversations.encode(prompt, after)
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

    def _text(self, text: str, *, first: bool) -> list[int]:
        """Encode a text; one that begins with the opening token itself, as templates write it, gets no second one."""
        ids = self.encoder.encode(text, add_special_tokens=first)
        return ids[1:] if first and self.first_id is not None and ids[:2] == [self.first_id] * 2 else ids


def load_language(model: str, *, chat_template: str = "", own_templates: bool = False) -> Language:
    """Load a model's tokenizer; blocks, for seconds if the model has to be converted first.

    Args:
        model: as `outrider.model.loader.ModelSpec.name`, or `TOY_MODEL`.
        chat_template: file with a template to use instead of the model's; empty: the model's. A toy has its own.
        own_templates: whether clients may bring a template.

    Raises:
        NotFound: there is no such model.
        InvalidRequest: the template cannot be read.
    """
    if model == TOY_MODEL:
        toy = ToyTokenizer()
        return language_of(model, toy, frozenset({toy.eos_token_id}))
    # Here, because a toy needs none of it: it takes seconds to import.
    from transformers import AutoTokenizer  # noqa: PLC0415

    source = locate(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise NotFound(f"the tokenizer of {model!r} cannot be loaded from {source}: {error}") from error
    tokenizer.clean_up_tokenization_spaces = False
    if chat_template:
        tokenizer.chat_template = template_of(chat_template)
    ends = {*_stated_ends(source), *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
    return language_of(model, tokenizer, frozenset(ends), own_templates=own_templates)


def language_of(model: str, tokenizer: Any, end_ids: frozenset[int], *, own_templates: bool = False) -> Language:
    """Return what follows from a tokenizer.

    Args:
        model: its name.
        tokenizer: of `transformers`, or a toy's.
        end_ids: ids that end a generation.
        own_templates: whether clients may bring a template.
    """
    return Language(
        model=model,
        encoder=tokenizer,
        conversations=Conversations(model, tokenizer, own_templates=own_templates),
        decoder=Decoder(tokenizer),
        full_decoder=Decoder(tokenizer, skip_special=False),
        vocabulary=vocabulary(tokenizer),
        end_ids=end_ids,
        first_id=getattr(tokenizer, "bos_token_id", None),
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
