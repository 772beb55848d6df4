"""Codec of the part of `types.proto` that bans tokens: allowed ids, an output's least length, grammars."""

import json
from typing import TypedDict, assert_never

from outrider.codec.checks import CLIENT, Checks
from outrider.messages import Grammar, GrammarKind
from outrider.v1 import types_pb2 as pb

MAX_ALLOWED_IDS = 1 << 15
"""Most ids of a list of allowed tokens."""
MAX_GRAMMAR_CHARS = 1 << 16
"""Most characters of a grammar's text."""
MAX_CHOICES = 1024
"""Most texts of which one is to be the output."""
MAX_END_IDS = 256
"""Most ids that end an output."""


class Bans(TypedDict):
    """Fields of `SamplingParams`."""

    allowed_token_ids: tuple[int, ...]
    min_tokens: int
    grammar: Grammar | None
    end_token_ids: tuple[int, ...]
    grammar_end_ids: tuple[int, ...]


def bans_from_proto(message: pb.SamplingParams, checks: Checks) -> Bans:
    """Decode and check what bans tokens.

    Which ids end an output is the orchestrator's to say: a client's request that does is refused.
    """
    allowed = checks.ids("sampling.allowed_token_ids", message.allowed_token_ids, 0, MAX_ALLOWED_IDS)
    checks.require(len(set(allowed)) == len(allowed), "sampling.allowed_token_ids", "an id twice", "distinct ids")
    ends = {
        "end_token_ids": checks.ids("sampling.end_token_ids", message.end_token_ids, 0, MAX_END_IDS),
        "grammar_end_ids": checks.ids("sampling.grammar_end_ids", message.grammar_end_ids, 0, MAX_END_IDS),
    }
    if checks is CLIENT:
        for name, ids in ends.items():
            checks.require(not ids, f"sampling.{name}", ids, "nothing: the server sets it")
    grammar = grammar_from_proto(message.grammar, checks) if message.HasField("grammar") else None
    min_tokens = checks.integer("sampling.min_tokens", message.min_tokens)
    checks.require(grammar is None or not min_tokens, "sampling.min_tokens", min_tokens, "0 beside a grammar")
    return Bans(
        allowed_token_ids=allowed,
        min_tokens=min_tokens,
        grammar=grammar,
        end_token_ids=ends["end_token_ids"],
        grammar_end_ids=ends["grammar_end_ids"],
    )


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    """Encode a grammar.

    Raises:
        ValueError: the text of choices is no JSON list of strings.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return pb.Grammar(json_schema=grammar.text)
        case GrammarKind.REGEX:
            return pb.Grammar(regex=grammar.text)
        case GrammarKind.LARK:
            return pb.Grammar(lark=grammar.text)
        case GrammarKind.CHOICES:
            return pb.Grammar(choices=pb.Choices(texts=json.loads(grammar.text)))
        case _:
            assert_never(grammar.kind)


def grammar_from_proto(message: pb.Grammar, checks: Checks) -> Grammar:
    """Decode a grammar and check its size; whether it means anything shows when it is compiled."""
    match message.WhichOneof("kind"):
        case "json_schema":
            return _grammar(GrammarKind.JSON_SCHEMA, message.json_schema, checks)
        case "regex":
            return _grammar(GrammarKind.REGEX, message.regex, checks)
        case "lark":
            return _grammar(GrammarKind.LARK, message.lark, checks)
        case "choices":
            field, texts = "sampling.grammar.choices", message.choices.texts
            checks.count(field, texts, 1, MAX_CHOICES)
            checks.require(
                all(texts) and len(set(texts)) == len(texts), field, list(texts), "distinct texts, not empty"
            )
            return _grammar(GrammarKind.CHOICES, json.dumps(list(texts), ensure_ascii=False), checks)
        case None:
            raise checks.fault("sampling.grammar", None, "one of json_schema, regex, lark, choices")
        case other:
            assert_never(other)


def _grammar(kind: GrammarKind, text: str, checks: Checks) -> Grammar:
    allowed = f"1 .. {MAX_GRAMMAR_CHARS} characters"
    checks.require(1 <= len(text) <= MAX_GRAMMAR_CHARS, f"sampling.grammar.{kind}", f"{len(text)} characters", allowed)
    return Grammar(kind, text)
