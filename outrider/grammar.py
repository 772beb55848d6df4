"""Grammars: from a schema, a pattern or rules to which tokens may come next. Compiling may block for a second.

Decides nothing about sampling: it says which tokens keep an output such that some continuation matches as a whole, and
that where it is whole an end-of-sequence token may follow. The library behind it works on the tokenizer's bytes, so
every way of cutting a text into tokens is allowed, not only the tokenizer's own.

Bounds: a grammar's size, and the work of compiling it and of each row, are limited by the library's own budgets
(`LIMITS`). A grammar is compiled once for as long as it is among the `MAX_COMPILED` used last.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Protocol, assert_never, runtime_checkable

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.errors import InvalidRequest
from outrider.messages import Grammar, GrammarKind, SamplingParams

MAX_COMPILED = 32
"""Compiled grammars that are kept."""
MAX_TOKENIZERS = 4
"""Sets of end-of-sequence ids for which the vocabulary is kept; a model has one."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""About 20 ms to compile a lexer, 15 ms for a row at worst, and 40 MB of lexer states."""
MAX_REASON_CHARS = 300
"""Characters of the library's own words in an error."""


@runtime_checkable
class HasBackend(Protocol):
    """A tokenizer of `transformers` that is fast: it can be written as the JSON of `tokenizers`."""

    @property
    def backend_tokenizer(self) -> "Writable":
        """The tokenizer of `tokenizers`."""
        ...


class Writable(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def to_str(self) -> str:
        """Return the whole tokenizer as JSON."""
        ...


@runtime_checkable
class HasPieces(Protocol):
    """A tokenizer that is a list of pieces, such as the toy's; the end-of-sequence token is the empty one."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of each id."""
        ...


class State:
    """Where one output stands in its grammar (`outrider.history.GrammarState`)."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], vocab_len: int) -> None:
        """Take over a matcher.

        Args:
            matcher: of nobody else.
            end_ids: end-of-sequence ids.
            vocab_len: length of the tokenizer's id range.
        """
        self._matcher, self._end_ids, self._vocab_len = matcher, end_ids, vocab_len
        self._has_ended = False
        self.is_broken = False
        """Whether the output holds a token that the grammar forbids."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output; behind its end only further ends keep the grammar."""
        for token in token_ids:
            if self.is_broken:
                return
            if token in self._end_ids:
                self.is_broken = not self._has_ended and not self._matcher.is_accepting()
                self._has_ended = True
            else:
                self.is_broken = self._has_ended or not self._matcher.try_consume_tokens([token])

    def copy(self) -> "State":
        """Return a state that moves on by itself."""
        other = State(self._matcher.deep_copy(), self._end_ids, self._vocab_len)
        other._has_ended, other.is_broken = self._has_ended, self.is_broken
        return other

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Return [vocab_len], which tokens may come next; None where it is broken or too complex to go on."""
        if self.is_broken:
            return None
        if self._has_ended:
            return self._ends(np.zeros(self._vocab_len, dtype=np.bool_), allowed=True)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self.is_broken = True
            return None
        mask = np.unpackbits(bits, count=self._vocab_len, bitorder="little").view(np.bool_)
        return self._ends(mask, allowed=self._matcher.is_accepting())

    def _ends(self, mask: npt.NDArray[np.bool_], *, allowed: bool) -> npt.NDArray[np.bool_]:
        mask[list(self._end_ids)] = allowed
        return mask


class Grammars:
    """Compiles for one tokenizer; may be used from any thread."""

    def __init__(self, tokenizer: object, vocab_len: int) -> None:
        """Keep the tokenizer; nothing is built before the first grammar.

        Args:
            tokenizer: a fast one of `transformers`, or one with `pieces`.
            vocab_len: length of its id range.
        """
        self._tokenizer, self._vocab_len = tokenizer, vocab_len
        self._lock = Lock()
        self._lexicons: OrderedDict[tuple[int, ...], LLTokenizer] = OrderedDict()
        self._compiled: OrderedDict[tuple[Grammar, tuple[int, ...]], LLMatcher] = OrderedDict()

    def begin(self, sampling: SamplingParams, output_ids: Sequence[int] = ()) -> State | None:
        """Return where an output stands in the grammar of its request, if it has one; blocks.

        Args:
            sampling: with `grammar_end_ids` where it has a grammar.
            output_ids: the output so far.

        Raises:
            InvalidRequest: the grammar does not compile, is too large, or the model's tokenizer knows no bytes.
        """
        if sampling.grammar is None:
            return None
        matcher = self._matcher(sampling.grammar, sampling.grammar_end_ids)
        state = State(matcher.deep_copy(), frozenset(sampling.grammar_end_ids), self._vocab_len)
        state.advance(output_ids)
        return state

    def _matcher(self, grammar: Grammar, end_ids: tuple[int, ...]) -> LLMatcher:
        """Return a compiled grammar at its begin; not to be moved on."""
        with self._lock:
            known = self._compiled.get((grammar, end_ids))
            if known is not None:
                self._compiled.move_to_end((grammar, end_ids))
                return known
        matcher = _compiled(grammar, self._lexicon(end_ids))
        with self._lock:
            self._compiled[grammar, end_ids] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _lexicon(self, end_ids: tuple[int, ...]) -> LLTokenizer:
        """Return the tokenizer as the library wants it; a second caller waits for the first."""
        with self._lock:
            if end_ids not in self._lexicons:
                self._lexicons[end_ids] = _lexicon(self._tokenizer, self._vocab_len, end_ids)
                while len(self._lexicons) > MAX_TOKENIZERS:
                    self._lexicons.popitem(last=False)
            return self._lexicons[end_ids]


class _Pieces:
    """A list of pieces, as the library wants to see it."""

    is_tokenizer_wrapper = True

    def __init__(self, pieces: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        self.tokens = [piece or b"<eos>" for piece in pieces]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]

    def __call__(self, text: str) -> list[int]:
        """Cut nothing: texts are asked for as hints only, and byte by byte is always right."""
        return [self.tokens.index(bytes([value])) for value in text.encode()]


def _lexicon(tokenizer: object, vocab_len: int, end_ids: Sequence[int]) -> LLTokenizer:
    if not end_ids:
        raise InvalidRequest("sampling.grammar", "a grammar", "none: the model has no end-of-sequence token")
    if isinstance(tokenizer, HasPieces):
        pieces: object = _Pieces(tokenizer.pieces, end_ids)
        return LLTokenizer(pieces, n_vocab=vocab_len, eos_token=list(end_ids))  # type: ignore[arg-type]
    if isinstance(tokenizer, HasBackend):
        return LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=vocab_len, eos_token=list(end_ids))
    kind = type(tokenizer).__name__
    raise InvalidRequest("sampling.grammar", "a grammar", f"none: a {kind} does not say what bytes its tokens are")


def _compiled(grammar: Grammar, lexicon: LLTokenizer) -> LLMatcher:
    try:
        rules = _rules(grammar)
    except ValueError as error:
        raise _refused(grammar, str(error)) from error
    matcher = LLMatcher(lexicon, rules, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise _refused(grammar, matcher.get_error())
    return matcher


def _rules(grammar: Grammar) -> str:
    """Return a grammar in the library's own terms.

    Raises:
        ValueError: it is no JSON where it has to be.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(json.dumps(json.loads(grammar.text)))
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.CHOICES:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.text))))
        case _:
            assert_never(grammar.kind)


def _refused(grammar: Grammar, why: str) -> InvalidRequest:
    reason = " ".join(why.split())[:MAX_REASON_CHARS]
    return InvalidRequest(f"sampling.grammar.{grammar.kind}", grammar.text, f"one that can be compiled: {reason}")
