"""Incremental text: whatever the tokens, what is given out adds up to the text of all tokens at once."""

import random
from collections.abc import Mapping, Sequence
from typing import cast

import pytest
from transformers import AutoTokenizer

from orchestrator.text import REPLACEMENT, Decoder, Detokenizer, Tokenizer
from outrider.model.names import DEFAULT_MODEL, locate
from outrider.model.toy import ToyTokenizer

TEXT = "Hello 😀 wörld 你好世界 e\u0301a\u0308 नमस्ते 👨\u200d👩\u200d👧\u200d👦 end. \u200b\ufeff"


class ByteFallback:
    """A tokenizer of sentencepiece's kind: words with a leading mark, bytes for what is not in the vocabulary."""

    all_special_ids: Sequence[int] = (0,)

    def __init__(self) -> None:
        self._pieces = ["<s>", *(f"<0x{value:02X}>" for value in range(256)), "▁the", "▁cat", "s", "▁", "你"]

    def __len__(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> Mapping[str, int]:
        return {piece: token for token, piece in enumerate(self._pieces)}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        text, run = "", b""
        for token in [*filter(None, token_ids), -1]:
            if 1 <= token <= 256:
                run += bytes([token - 1])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += REPLACEMENT * len(run)
            run = b""
            if token > 256:
                text += self._pieces[token].replace("▁", " ")
        return text.removeprefix(" ")


@pytest.fixture(scope="module")
def real() -> Decoder:
    return Decoder(cast(Tokenizer, AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL))))


def pushed(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


def random_ids(source: random.Random, size: int, most: int) -> list[int]:
    return [source.randrange(size) for _ in range(source.randrange(most))]


def check(decoder: Decoder, token_ids: list[int]) -> None:
    given = pushed(Detokenizer(decoder), token_ids)
    assert "".join(given) == decoder.decode(token_ids)
    for text in given:
        text.encode()  # no lone surrogates


@pytest.mark.parametrize("tokenizer", [ToyTokenizer(), ByteFallback()], ids=["byte-level", "byte-fallback"])
def test_random_tokens_add_up_to_the_full_text(tokenizer: Tokenizer) -> None:
    source, decoder = random.Random(1), Decoder(tokenizer)
    for _ in range(2000):
        check(decoder, random_ids(source, len(tokenizer.get_vocab()), 40))


def test_random_tokens_of_the_real_vocabulary_add_up(real: Decoder) -> None:
    source = random.Random(2)
    for _ in range(500):
        check(real, random_ids(source, 49_152, 40))


def test_no_replacement_character_stands_for_a_character_that_is_completed_later(real: Decoder) -> None:
    for decoder, tokenizer in ((Decoder(ToyTokenizer()), ToyTokenizer()), (real, real._tokenizer)):
        token_ids = tokenizer.encode(TEXT)  # type: ignore[attr-defined]
        given = pushed(Detokenizer(decoder), token_ids)
        assert "".join(given) == TEXT
        assert not any(REPLACEMENT in text for text in given)


def test_byte_tokens_wait_until_their_run_is_over() -> None:
    decoder = Decoder(ByteFallback())
    detokenizer = Detokenizer(decoder)
    run = [value + 1 for value in "é".encode()]
    assert [detokenizer.push(token) for token in run] == ["", ""]
    assert detokenizer.push(257) == "é the"


def test_an_incomplete_character_at_the_end_is_flushed_as_the_full_decode_shows_it() -> None:
    decoder = Decoder(ToyTokenizer())
    token_ids = [1 + value for value in "a😀".encode()[:-1]]
    detokenizer = Detokenizer(decoder)
    assert [detokenizer.push(token) for token in token_ids] == ["a", "", "", ""]
    assert detokenizer.flush() == REPLACEMENT


def test_a_word_after_the_prompt_keeps_its_leading_space() -> None:
    decoder = Decoder(ByteFallback())
    assert pushed(Detokenizer(decoder, [257]), [258, 258]) == [" cat", " cat", ""]
    assert pushed(Detokenizer(decoder), [258, 258]) == ["cat", " cat", ""]


def test_a_prompt_that_ends_inside_a_character_is_no_context() -> None:
    decoder = Decoder(ToyTokenizer())
    half = [1 + value for value in "😀".encode()[:2]]
    assert "".join(pushed(Detokenizer(decoder, half), [1 + ord("a")])) == "a"


def test_special_tokens_are_no_text_and_split_no_character() -> None:
    decoder = Decoder(ToyTokenizer())
    first, second = (1 + value for value in "é".encode())
    assert pushed(Detokenizer(decoder), [first, 0, second]) == ["", "", "é", ""]


def test_malformed_text_without_end_keeps_the_window_short() -> None:
    decoder = Decoder(ToyTokenizer())
    detokenizer = Detokenizer(decoder)
    given = pushed(detokenizer, [256] * 2000)
    assert "".join(given) == REPLACEMENT * 2000
    assert len(detokenizer._window) <= 17
