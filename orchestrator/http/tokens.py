"""Tokens as OpenAI's API shows them: each one's text and bytes by itself, and log-probabilities in its two shapes."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from orchestrator.language import Language
from outrider.messages import TokenLogprobs

MAX_KNOWN = 1 << 16
"""Tokens whose text is remembered."""

Json = dict[str, Any]


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves, the others, in order, for the characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokens:
    """Tells what tokens are; one per process, safe to share."""

    def __init__(self, language: Language) -> None:
        """Keep the tokenizer's maps."""
        encoder: Any = language.encoder
        self._tokenizer = encoder
        self._pieces: dict[int, str] = {token: piece for piece, token in self._tokenizer.get_vocab().items()}
        self.text: Callable[[int], str] = lru_cache(MAX_KNOWN)(self._text)

    def _text(self, token_id: int) -> str:
        """Return a token's text by itself, special tokens' too; U+FFFD where it is no whole character."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        piece = self._pieces.get(token_id, "")
        # Decoders of sentencepiece leave out the space before the first word.
        return f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text

    def texts(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens together."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def data(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        text = self.text(token_id)
        if "\ufffd" not in text:
            return text.encode()
        piece = self._pieces.get(token_id, "")
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        if piece and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        return text.encode()

    # -- chats -----------------------------------------------------------------------------------------------------

    def chat_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Json]:
        """Return log-probabilities as a chat completion shows them."""
        return [
            self._entry(token_id, each.logprob) | {"top_logprobs": [self._entry(*top) for top in each.top]}
            for token_id, each in zip(token_ids, logprobs, strict=True)
        ]

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {"token": self.text(token_id), "logprob": logprob, "bytes": list(self.data(token_id))}

    # -- completions -----------------------------------------------------------------------------------------------

    def completion_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int
    ) -> tuple[Json, int]:
        """Return log-probabilities as a completion shows them, and where the text after them starts.

        Args:
            token_ids: [n] tokens.
            logprobs: [n]; None where a token follows nothing.
            offset: where the first token's text starts.
        """
        texts = [self.text(token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if each is None else each.logprob for each in logprobs],
            "top_logprobs": [None if each is None else self._top(each.top) for each in logprobs],
            "text_offset": offsets,
        }, offset

    def _top(self, top: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Return the likeliest tokens by their text; of several with one text the likeliest counts."""
        found: dict[str, float] = {}
        for token_id, logprob in top:
            found.setdefault(self.text(token_id), logprob)
        return found

    def prompt_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> list[Json | None]:
        """Return log-probabilities of a prompt by token id, as vLLM shows them."""
        shown: list[Json | None] = []
        for token_id, each in zip(token_ids, logprobs, strict=True):
            if each is None:
                shown.append(None)
                continue
            entries = {token_id: each.logprob} | dict(each.top)
            shown.append({str(token): self._decoded(token, logprob) for token, logprob in entries.items()})
        return shown

    def _decoded(self, token_id: int, logprob: float) -> Json:
        return {"logprob": logprob, "decoded_token": self.text(token_id)}


def joined(before: Json | None, more: Json) -> Json:
    """Return log-probabilities of a completion with more behind them."""
    return more if before is None else {name: before[name] + more[name] for name in more}
