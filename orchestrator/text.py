"""Token ids to text, one token at a time: only what no later token can change is given out. Pure.

Position counts tokens; text may lag behind it. The concatenation of everything given out, `flush` included, is what
the tokenizer makes of all the tokens at once (after the context, where one is given).

What is held back, and why that is enough:

* a character whose bytes are not complete: decoders show such an end as one replacement character, the last one;
* with byte-fallback vocabularies (sentencepiece), the run of byte tokens at the end: one wrong byte turns the whole run
  into replacement characters, so none of it is certain before the run is over.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
CONTEXT_LEN = 8
"""Tokens of the prompt that are looked at for how the first generated token joins it."""
_LONG_WINDOW = 16
"""A window of more tokens is cut even in the middle of malformed text."""
_KEPT_AT_CUT = 4
"""An incomplete character has at most three bytes, each at most one token."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(Protocol):
    """The part of a tokenizer that turns ids into text. Does not block for long; every call is repeatable."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """Ids that are never text."""
        ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids; what is not UTF-8 becomes U+FFFD."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Return the map from piece to id."""
        ...


class Decoder:
    """What is fixed about a tokenizer, computed once and shared by all generations."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look for special and byte-fallback ids."""
        self._tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)
        self.bytes = frozenset(token for piece, token in tokenizer.get_vocab().items() if _BYTE_PIECE.fullmatch(piece))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


class Detokenizer:
    """Text of one generation so far; see the module's head.

    It decodes a short window of tokens that starts at a token whose text is certain, and remembers how much of the
    window's text it has given out.
    """

    def __init__(self, decoder: Decoder, context_ids: Sequence[int] = ()) -> None:
        """Start behind a context.

        Args:
            decoder: of the model's tokenizer.
            context_ids: the prompt, of which only the end matters: a word that follows it keeps its leading space.
        """
        self._decoder = decoder
        self._window: list[int] = []
        self._given = 0
        self._boundary = 0
        context = [token for token in context_ids[-CONTEXT_LEN:] if token not in decoder.special]
        if context and context[-1] not in decoder.bytes:
            text = decoder.decode(context)
            if text and not text.endswith(REPLACEMENT):
                self._window, self._given, self._boundary = context, len(text), len(context)

    def push(self, token_id: int) -> str:
        """Take one token and return the text that became certain with it."""
        if token_id in self._decoder.special:
            return ""
        self._window.append(token_id)
        certain, complete = self._certain()
        given = certain[self._given :]
        self._given = max(self._given, len(certain))
        if complete and given:
            self._start_at_boundary()
        elif len(self._window) > _LONG_WINDOW:
            self._cut_anywhere()
        return given

    def flush(self) -> str:
        """Return what was held back, with replacement characters where it is incomplete; nothing follows."""
        text = self._decoder.decode(self._window)[self._given :]
        self._given += len(text)
        return text

    def _certain(self) -> tuple[str, bool]:
        """Return the part of the window's text that no later token can change, and whether that is all of it."""
        end = len(self._window)
        while end and self._window[end - 1] in self._decoder.bytes:
            end -= 1
        text = self._decoder.decode(self._window[:end])
        if end < len(self._window):
            return text, False
        certain = text.removesuffix(REPLACEMENT)
        return certain, certain == text

    def _start_at_boundary(self) -> None:
        """All text is certain: drop what lies before the last such point, and note this one.

        The tokens between the two stay, so that a decoder that treats the first word in its own way does so with a word
        that has been given out.
        """
        rest = self._window[self._boundary :]
        text = self._decoder.decode(rest)
        if text:
            self._window, self._given = rest, len(text)
            self._boundary = len(rest)

    def _cut_anywhere(self) -> None:
        """Keep malformed text from growing the window: cut where both parts decode as they do together."""
        start = len(self._window) - _KEPT_AT_CUT
        if self._decoder.bytes.issuperset(self._window[start - 1 : start + 1]):
            return  # inside a run of byte tokens, which stands or falls as a whole
        head, rest = self._decoder.decode(self._window[:start]), self._decoder.decode(self._window[start:])
        if len(head) <= self._given and head + rest == self._decoder.decode(self._window):
            del self._window[:start]
            self._given -= len(head)
            self._boundary = 0
