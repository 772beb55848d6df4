"""Token ids to text, one token at a time: only what no later token can change is given out. Pure.

Position counts tokens; text may lag behind it. The concatenation of everything given out, `flush` included, is what
the tokenizer makes of all the tokens at once (after the context, where one is given).

What is held back, and why that is enough:

* a character whose bytes are not complete: decoders show such an end as one replacement character, the last one;
* with byte-fallback vocabularies (sentencepiece), the run of byte tokens at the end: one wrong byte turns the whole run
  into replacement characters, so none of it is certain before the run is over. `pending` tells what it would be.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
CONTEXT_LEN = 8
"""Tokens of the prompt that are looked at for how the first generated token joins it."""
_LOOKED_BACK = 64
"""Tokens of the prompt that are searched for such a context, for at its end may be bytes or half a character."""
_LONG_WINDOW = 16
"""A window of more tokens is cut even in the middle of malformed text."""
_KEPT_AT_CUT = 4
"""An incomplete character has at most three bytes, each at most one token."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        """Look for special and byte-fallback ids.

        Args:
            tokenizer: of the model.
            skip_special: whether special tokens are left out of the text.
        """
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self.special = _special_ids(tokenizer) if skip_special else frozenset()
        """Ids that are no text."""
        vocab = tokenizer.get_vocab()
        self.bytes = self._byte_values(vocab)
        """Byte-fallback ids, each with its byte."""
        words = (token for piece, token in vocab.items() if piece.isascii() and piece.isalpha())
        self._word = next((token for token in words if token not in self.special and self.decode([token])), None)
        """Any token that is certain text; None: there is none."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special)

    def context(self, token_ids: Sequence[int]) -> list[int]:
        """Return tokens that a text can be decoded behind as it is behind these; empty: there are none.

        It only matters for decoders that treat the first word of all in their own way, so that tokens at the end that
        are no certain text may be left out, and any text does where there is none that is certain.
        """
        for end in range(len(token_ids), max(0, len(token_ids) - _LOOKED_BACK), -1):
            if token_ids[end - 1] in self.special or token_ids[end - 1] in self.bytes:
                continue
            before = [token for token in token_ids[max(0, end - CONTEXT_LEN) : end] if token not in self.special]
            text = self.decode(before)
            if text and not text.endswith(REPLACEMENT):
                return before
        return [self._word] if self._word is not None and self.decode(token_ids[-_LOOKED_BACK:]) else []

    def _byte_values(self, vocab: Mapping[str, int]) -> Mapping[int, int]:
        """Return the byte of each byte-fallback id; pieces that only look like one show themselves when decoded."""
        found = {token: int(match[1], 16) for piece, token in vocab.items() if (match := _BYTE_PIECE.fullmatch(piece))}
        letters = [token for token, value in found.items() if chr(value).isalpha() and value < 0x80]
        real = any(self.decode([token]).strip() == chr(found[token]) for token in letters[:1])
        return found if real else {}


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that decoding leaves out: those with a role, and all others that were added as special."""
    added: Mapping[int, object] = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {
        token for token, entry in added.items() if getattr(entry, "special", False)
    }


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
        self._window = decoder.context(context_ids)
        self._given = len(decoder.decode(self._window)) if self._window else 0
        self._boundary = len(self._window)
        self._run = bytearray()
        """Bytes of the byte-fallback tokens at the window's end."""

    def push(self, token_id: int) -> str:
        """Take one token and return the text that became certain with it."""
        if token_id in self._decoder.special:
            return ""
        self._window.append(token_id)
        if token_id in self._decoder.bytes:
            self._run.append(self._decoder.bytes[token_id])
            return ""
        self._run.clear()
        text = self._decoder.decode(self._window)
        certain = text.removesuffix(REPLACEMENT)
        given = certain[self._given :]
        self._given = max(self._given, len(certain))
        if certain == text and given:
            self._start_at_boundary()
        elif len(self._window) > _LONG_WINDOW:
            self._cut_anywhere()
        return given

    def pending(self) -> str:
        """Return what `flush` would if byte tokens at the end make complete characters; empty: they do not."""
        try:
            self._run.decode()
        except UnicodeDecodeError:
            return ""
        return self._decoder.decode(self._window)[self._given :] if self._run else ""

    def flush(self) -> str:
        """Return what was held back, with replacement characters where it is incomplete; nothing follows."""
        text = self._decoder.decode(self._window)[self._given :]
        self._given += len(text)
        self._run.clear()
        return text

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
        head, rest = self._decoder.decode(self._window[:start]), self._decoder.decode(self._window[start:])
        if len(head) <= self._given and head + rest == self._decoder.decode(self._window):
            del self._window[:start]
            self._given -= len(head)
            self._boundary = 0
