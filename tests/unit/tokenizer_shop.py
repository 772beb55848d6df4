"""Small tokenizers of every kind that models come with, made here: no files, no hub.

Each has a special token `<|end|>`, one without a role (`<|reserved|>`), and an added token that is text (`<tool>`).
"""

from collections.abc import Callable, Mapping
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "the cat sat on the mat. The dog, it's said, didn't sit: 'no!' she cried. 12345 + 67 = 8?\n\tdef f(x): return x",
    "Über größe naïve café jalapeño; 你好世界 今天天气很好。 こんにちは 안녕하세요",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया 😀 👨\u200d👩\u200d👧 e\u0301",
    "<|im_start|>user\nhello there<|im_end|>\n",
)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA_3 = _WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = [f"<0x{value:02X}>" for value in range(256)]
MARK = "\u2581"


def _dressed(tokenizer: Tokenizer, **roles: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer as models bring it."""
    tokenizer.add_special_tokens(["<|end|>", "<|reserved|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False, **roles
    )
    return made


def _byte_level(splitter: pre_tokenizers.PreTokenizer, *, ignore_merges: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    return _dressed(tokenizer)


def gpt_2() -> PreTrainedTokenizerFast:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def llama_3() -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Split(Regex(LLAMA_3), behavior="isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _byte_level(pre_tokenizers.Sequence([split, plain]), ignore_merges=True)


def _merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary of pieces with marks for spaces, and its merges: what sentencepiece learns."""
    words = ["the", "cat", "sat", "on", "mat", "dog", "你好"]
    vocab, merges = {"<unk>": 0}, []
    for piece in [*BYTES, MARK, *"abcdefghijklmnopqrstuvwxyz.,'!?TÜüéß你好世界"]:
        vocab[piece] = len(vocab)
    for word in [*words, *(MARK + word for word in words), MARK * 2, MARK * 4]:
        for at in range(1, len(word)):
            pair, joined = (word[:at], word[at]), word[: at + 1]
            if joined not in vocab:
                vocab[joined] = len(vocab)
                merges.append(pair)
    return vocab, merges


def _sentencepiece(*, prefix: bool, metaspace: bool = False) -> PreTrainedTokenizerFast:
    vocab, merges = _merges()
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="first", split=False)
    else:
        before = [normalizers.Prepend(MARK)] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", MARK)])
    steps: list[decoders.Decoder] = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return _dressed(tokenizer, unk_token="<unk>")


def llama_2() -> PreTrainedTokenizerFast:
    return _sentencepiece(prefix=True)


def llama_2_not_legacy() -> PreTrainedTokenizerFast:
    return _sentencepiece(prefix=True, metaspace=True)


def gemma() -> PreTrainedTokenizerFast:
    return _sentencepiece(prefix=False)


def _unigram(*, byte_fallback: bool) -> PreTrainedTokenizerFast:
    pieces = [piece for piece in _merges()[0] if byte_fallback or piece not in BYTES]
    scores = [(piece, 0.0 if piece == "<unk>" else -20.0 + len(piece)) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scores, 0, byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="always")
    spaces = decoders.Metaspace(MARK, prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), spaces]) if byte_fallback else spaces
    return _dressed(tokenizer, unk_token="<unk>")


def t5() -> PreTrainedTokenizerFast:
    return _unigram(byte_fallback=False)


def unigram_with_bytes() -> PreTrainedTokenizerFast:
    return _unigram(byte_fallback=True)


def bert() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "the", "cat", "do", "n", "##t", "##s", ".", ",", "'", "!", "?", "not", "m", "ve", "s", "你", "好"]
    tokenizer = Tokenizer(models.WordPiece({word: token for token, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return _dressed(tokenizer, unk_token="[UNK]")


def clip() -> PreTrainedTokenizerFast:
    vocab = {piece: token for token, piece in enumerate(["a", "b", "c", "a</w>", "b</w>", "c</w>", "ab", "ab</w>"])}
    model = models.BPE(vocab, [("a", "b"), ("a", "b</w>")], end_of_word_suffix="</w>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return _dressed(tokenizer)


KINDS: Mapping[str, Callable[[], PreTrainedTokenizerFast]] = {
    "gpt-2": gpt_2,
    "llama-3": llama_3,
    "llama-2": llama_2,
    "llama-2-not-legacy": llama_2_not_legacy,
    "gemma": gemma,
    "t5": t5,
    "unigram-with-bytes": unigram_with_bytes,
    "bert": bert,
    "clip": clip,
}


@cache
def bought(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a kind, made once."""
    return KINDS[kind]()
