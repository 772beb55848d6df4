"""What is known of the served model: its tokens, and how it marks thoughts and calls."""

import logging
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from orchestrator.http.limits import Markers
from orchestrator.http.parsing import Format, format_of
from orchestrator.http.tokens import Tokens
from orchestrator.language import Language

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """The served model, as this door sees it."""

    model: str
    tokens: Tokens
    format: Format


def served(language: Language, markers: Markers = "auto") -> Served:
    """Look at a model's tokenizer.

    Args:
        language: of the model.
        markers: which markers mean something; "auto": those in its chat template.
    """
    found = format_of(_template(language), _rendered(language))
    if markers != "auto":
        thinks = "think" in markers
        found = Format(thinks, thinks and found.thinks_first, "hermes" in markers)
    log.info("answers of %s are taken apart into %s", language.model, found)
    return Served(language.model, Tokens(language), found)


def _template(language: Language) -> str:
    """Return the chat template; several are looked at together."""
    found: Any = getattr(language.encoder, "chat_template", None)
    if isinstance(found, dict):
        return "\n".join(map(str, found.values()))
    return found if isinstance(found, str) else ""


def _rendered(language: Language) -> str:
    """Return how a conversation ends where the answer begins; empty where the template takes none."""
    encoder: Any = language.encoder
    try:
        rendered = encoder.apply_chat_template(
            [{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, ValueError, TypeError) as error:
        log.info("how answers of %s begin is not known: %s", language.model, error)
        return ""
    return str(rendered)
