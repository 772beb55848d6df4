"""The many fields in which a request can say what the whole answer must match, and the one grammar that comes of it."""

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.http.schema import ChatRequest, Sampled
from outrider.errors import InvalidRequest
from outrider.messages import Grammar, GrammarKind


def grammar_of(body: Sampled) -> Grammar | None:
    """Return what the answer must match; None: anything.

    Raises:
        InvalidRequest: several fields say it, or one says nothing.
    """
    given = grammars(body)
    if len(given) > 1:
        raise InvalidRequest(list(given)[1], "a value", f"nothing beside {next(iter(given))}")
    return next(iter(given.values()), None)


def grammars(body: Sampled) -> dict[str, Grammar]:
    """Return what the answer must match, by the field that says so."""
    within = body.structured_outputs
    found = {
        "guided_json": _schema(body.guided_json),
        "guided_regex": _text(GrammarKind.REGEX, body.guided_regex),
        "guided_choice": _choices(body.guided_choice),
        "guided_grammar": _text(GrammarKind.LARK, body.guided_grammar),
    }
    if within is not None:
        found |= {
            "structured_outputs.json": _schema(within.json_),
            "structured_outputs.regex": _text(GrammarKind.REGEX, within.regex),
            "structured_outputs.choice": _choices(within.choice),
            "structured_outputs.grammar": _text(GrammarKind.LARK, within.grammar),
            "structured_outputs.json_object": _schema({"type": "object"} if within.json_object else None),
        }
    if isinstance(body, ChatRequest):
        found["response_format"] = _response_format(body)
    return {name: grammar for name, grammar in found.items() if grammar is not None}


def _response_format(body: ChatRequest) -> Grammar | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _schema({"type": "object"})
    if wanted.json_schema is None:
        raise InvalidRequest("response_format.json_schema", None, "an object beside type json_schema")
    return _schema({} if wanted.json_schema.schema_ is None else wanted.json_schema.schema_)


def _schema(schema: Mapping[str, Any] | str | None) -> Grammar | None:
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _choices(texts: list[str] | None) -> Grammar | None:
    return None if texts is None else Grammar(GrammarKind.CHOICES, json.dumps(texts, ensure_ascii=False))


def _text(kind: GrammarKind, text: str | None) -> Grammar | None:
    return None if text is None else Grammar(kind, text)
