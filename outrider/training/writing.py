"""Has the target write the texts that a draft of it is trained on.

Without prompts the target writes both sides: its chat template is opened up to where a user would speak, the target
goes on as the user until it ends the turn, the template closes the turn, and the target answers. Left to itself a small
target asks much the same things in much the same words, and a draft trained on that knows little else; so most turns
begin with words that questions and requests begin with. Given prompts are repeated with other temperatures and seeds
until there is enough.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from outrider.errors import FailedPrecondition
from outrider.model.loader import end_token_ids
from outrider.prompts import Prompt
from outrider.training.about import check_same, describe, is_described
from outrider.training.kinds.protocol import Target
from outrider.training.texts import MIN_ANSWER, Texts, joined_texts, read_texts, texts_of, write_texts

TEMPERATURES = (0.0, 0.7, 0.7, 1.0)
"""Of answers, in turn: a quarter is greedy, which acceptance at temperature 0 is measured on."""
TOP_P, USER_TOP_P = 0.95, 0.97
USER_LEN = 64
"""Most tokens of a turn that the target writes as the user."""
OPENINGS = (
    "", "What is", "What are", "How do", "How does", "How can I", "Why do", "Why is", "When did", "Where", "Who was",
    "Which", "Explain", "Describe", "Compare", "Summarise", "List", "Give me", "Tell me about", "Write a", "Write an",
    "Suggest", "Plan", "Help me", "Can you", "Is it", "I want to", "I have", "My", "The", "Translate", "Correct",
    "Imagine", "Define", "What is the difference between", "What would happen if", "Name three", "Teach me",
)  # fmt: skip
"""How turns begin that the target writes as the user; most are questions and requests in English."""
_TRIED = 256
"""How many of the likeliest ids are looked at first: they mostly hold a nucleus."""
_PLACE = "\x02"
"""Stands for the user's words in a template; no text has it."""

Progress = Callable[[int], None]
"""Told how many tokens are written."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be written."""

    tokens: int = 300_000
    """At least so many, all texts together."""
    answer_len: int = 176
    """Most tokens of an answer."""
    batch: int = 64
    """Texts written side by side."""
    seed: int = 1


def written(target: Target, wish: Wish, prompts: Sequence[Prompt], folder: Path, on_progress: Progress) -> Texts:
    """Have texts written; blocks for long.

    Each batch is a file as soon as it is there, so an interrupted call loses one batch at most: the next goes on.

    Args:
        target: Who writes.
        wish: How much.
        prompts: What it is asked; empty: it asks itself.
        folder: Where batches are kept.
        on_progress: Told after each batch.

    Raises:
        FailedPrecondition: The folder has texts of another kind, or the target says next to nothing.
    """
    _claim(folder, target, wish, prompts)
    vocab_size, parts, tokens = len(target.embedding), list[Texts](), 0
    while tokens < wish.tokens:
        path = folder / f"texts-{wish.seed}-{len(parts):05d}.npz"
        if not path.exists():
            write_texts(path, texts_of(_batch(target, wish, prompts, len(parts)), vocab_size))
        parts.append(read_texts(path, vocab_size, 1 << 30))
        tokens += len(parts[-1].tokens)
        if not tokens and len(parts) == len(TEMPERATURES):
            raise FailedPrecondition(f"{target.name} gives no answer of at least {MIN_ANSWER} tokens to train on")
        on_progress(tokens)
    return joined_texts(parts)


def _claim(folder: Path, target: Target, wish: Wish, prompts: Sequence[Prompt]) -> None:
    """Say what a folder's texts are of, or refuse it; texts of several seeds have different names."""
    asked = json.dumps([(prompt.text, prompt.raw) for prompt in prompts])
    fields = {
        "target": target.name, "vocabulary": target.vocabulary.fingerprint, "answer_len": wish.answer_len,
        "batch": wish.batch, "prompts": hashlib.sha256(asked.encode()).hexdigest() if prompts else "",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if is_described(folder):
        check_same(folder, fields, "texts")
    else:
        describe(folder, fields)


def _batch(target: Target, wish: Wish, prompts: Sequence[Prompt], number: int) -> list[tuple[list[int], int, float]]:
    """Write one batch."""
    temperature, first = TEMPERATURES[number % len(TEMPERATURES)], number * wish.batch
    with torch.random.fork_rng(devices=_devices(target)):
        torch.manual_seed(wish.seed * 100_003 + number)
        if prompts:
            asked = [_asked(target, prompts[(first + place) % len(prompts)]) for place in range(wish.batch)]
        else:
            asked = _self_asked(target, wish.batch)
        answers = _continued(target, asked, wish.answer_len, temperature, TOP_P)
    return [
        (prompt + answer, len(prompt), temperature)
        for prompt, answer in zip(asked, answers, strict=True)
        if len(answer) >= MIN_ANSWER
    ]


def _devices(target: Target) -> list[Any]:
    device = target.embedding.device
    return [device] if device.type == "cuda" else []


def _asked(target: Target, prompt: Prompt) -> list[int]:
    """Return a prompt's tokens."""
    tokenizer = target.tokenizer
    if prompt.raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt.text)["input_ids"])
    return list(tokenizer(_rendered(tokenizer, prompt.text), add_special_tokens=False)["input_ids"])


def _rendered(tokenizer: Any, words: str) -> str:
    conversation = [{"role": "user", "content": words}]
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))


def _self_asked(target: Target, count: int) -> list[list[int]]:
    """Have the target write prompts, [count] of token ids."""
    tokenizer = target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id or 0
        return [[int(start), *turn] for turn in _continued(target, [[int(start)]] * count, 4, 1.0, USER_TOP_P)]
    before, after = _rendered(tokenizer, _PLACE).split(_PLACE)[:2]
    opening, closing = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after))
    ends = {*_ends(target), closing[0]}
    begun = [opening + _opened(tokenizer) for _ in range(count)]
    turns = _continued(target, begun, USER_LEN, 1.0, USER_TOP_P)
    said = [start[len(opening) :] + _until(turn, ends) for start, turn in zip(begun, turns, strict=True)]
    return [opening + turn + closing for turn in said if turn] or [opening + closing]


def _opened(tokenizer: Any) -> list[int]:
    """Return the first words of a user's turn, drawn."""
    words = OPENINGS[int(torch.randint(len(OPENINGS), ()))]
    return list(tokenizer(words, add_special_tokens=False)["input_ids"]) if words else []


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    """Return what comes before the first of some ids."""
    return tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]


def _ends(target: Target) -> tuple[int, ...]:
    return end_token_ids(target.model, target.tokenizer)


@torch.inference_mode()
def _continued(
    target: Target, starts: Sequence[list[int]], length: int, temperature: float, top_p: float
) -> list[list[int]]:
    """Let the target go on from starts of any lengths, up to an end token, which is kept, or a length."""
    device, longest, ends = target.embedding.device, max(len(start) for start in starts), _ends(target)
    padding = ends[0] if ends else 0
    ids = torch.tensor([[padding] * (longest - len(start)) + start for start in starts], device=device)
    seen = torch.tensor([[0] * (longest - len(start)) + [1] * len(start) for start in starts], device=device)
    chance: dict[str, Any] = {"do_sample": False}
    if temperature:
        processors = LogitsProcessorList([Nucleus(temperature, top_p)])
        chance = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logits_processor": processors}
    out = target.model.generate(
        ids, attention_mask=seen, max_new_tokens=length, pad_token_id=padding, eos_token_id=list(ends) or None, **chance
    )
    answers = [row[longest:].tolist() for row in out]
    return [answer[: len(_until(answer, set(ends))) + 1] for answer in answers]


class Nucleus(LogitsProcessor):
    """Temperature and top-p as the library has them, without sorting all ids, which takes as long as the target."""

    def __init__(self, temperature: float, top_p: float) -> None:
        """Take temperature, above 0, and top-p."""
        self._temperature, self._top_p = temperature, top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return logits, [rows, vocab], with -inf outside the nucleus."""
        del input_ids
        scores = scores / self._temperature
        probs = scores.softmax(-1)
        return scores.masked_fill(probs < self._least(probs), float("-inf"))

    def _least(self, probs: Tensor, count: int = _TRIED) -> Tensor:
        """Return each row's smallest probability inside, [rows, 1]; looks at `count` ids first, then at more."""
        best = probs.topk(min(count, probs.shape[-1]), dim=-1).values
        inside = best.cumsum(-1) - best < self._top_p
        if count < probs.shape[-1] and inside[:, -1].any():
            return self._least(probs, 16 * count)
        return best.masked_fill(~inside, 2.0).amin(-1, keepdim=True)
