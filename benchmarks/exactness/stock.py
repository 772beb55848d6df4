"""Greedy float32 text through the whole cluster against `transformers`' own `generate`, which shares none of our code.

The two compute in different orders, so they may part where the target itself is undecided: where the two largest
logits of the stock model lie within `TIE` of each other. Such places are listed; any other difference is a mismatch.
"""

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.drafts import CAUSAL_LM, PROMPT_LOOKUP
from benchmarks.exactness.outcome import Outcome
from benchmarks.exactness.twins import GREEDY, add_counts
from benchmarks.serving import Progress, Reply, ask_all
from outrider.client import Client
from outrider.generation import GenerationRequest, SpeculationChoice
from outrider.model.loader import load
from outrider.model.names import ModelSpec
from outrider.prompts import Prompt

TIE = 1e-3
"""Logits this close count as equal."""
DTYPE = "float32"
SPECULATION = SpeculationChoice(gamma=4, window=8)
AT_ONCE = 4


class Stock:
    """The model as `transformers` runs it."""

    def __init__(self) -> None:
        """Load it; blocks for seconds."""
        self.model: PreTrainedModel
        self.tokenizer: PreTrainedTokenizerBase
        torch.set_num_threads(1)
        self.model, self.tokenizer = load(ModelSpec(dtype=DTYPE))

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn a prompt into ids without any of the orchestrator's code."""
        if prompt.raw:
            ids = self.tokenizer(prompt.text)["input_ids"]
        else:
            messages = [{"role": "user", "content": prompt.text}]
            chat = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            ids = cast(Any, chat)["input_ids"]
        return [int(token) for token in cast(Any, ids)]

    @torch.inference_mode()
    def generate(self, ids: list[int], num_tokens: int) -> list[int]:
        """Return the greedy continuation, with the end of sequence if it comes."""
        prompt = torch.tensor([ids])
        generate = cast(Any, self.model).generate
        output = generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False)
        return [int(token) for token in output[0, len(ids) :]]

    @torch.inference_mode()
    def gap(self, ids: list[int]) -> float:
        """Return how far apart the two largest logits after these ids are."""
        logits = cast(Any, self.model)(torch.tensor([ids])).logits[0, -1]
        first, second = torch.topk(logits, 2).values.tolist()
        return float(first - second)


async def check_stock(
    client: Client, prompts: Sequence[Prompt], num_tokens: int, progress: Progress = lambda *_: None
) -> Outcome:
    """Ask a float32 cluster, then the stock model, and compare ids and text.

    Args:
        client: of a float32 cluster with both kinds of drafters.
        prompts: which.
        num_tokens: most tokens of each.
        progress: told about the cluster's part, then about the stock model's.
    """
    outcome, started_s = Outcome("float32"), time.monotonic()
    requests = [
        GenerationRequest(
            prompt.asked, max_tokens=num_tokens, sampling=GREEDY, speculation=SPECULATION, drafter=drafter
        )
        for prompt, drafter in zip(prompts, _alternating(len(prompts)), strict=True)
    ]
    replies = await ask_all(client, requests, AT_ONCE, progress)
    stock = Stock()
    for prompt, request, reply in zip(prompts, requests, replies, strict=True):
        _compare(outcome, stock, prompt, request, reply)
        progress(outcome.num_checked, len(prompts))
    outcome.seconds = time.monotonic() - started_s
    return outcome


def _alternating(num: int) -> list[str]:
    return [(CAUSAL_LM, PROMPT_LOOKUP)[index % 2] for index in range(num)]


def _compare(outcome: Outcome, stock: Stock, prompt: Prompt, request: GenerationRequest, reply: Reply) -> None:
    ids = stock.encode(prompt)
    expected = stock.generate(ids, request.max_tokens or 0)
    add_counts(outcome, reply.finished.figures, len(reply.token_ids))
    got = list(reply.token_ids)
    equal = got == expected and len(ids) == reply.started.prompt_len
    outcome.check(equal, prompt.kind, request.drafter)
    if equal:
        _compare_text(outcome, stock, prompt, reply)
        return
    at = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), len(got))
    gap = stock.gap(ids + expected[:at])
    line = f"{prompt.name}: parts at token {at} of {len(expected)}, where the two largest logits are {gap:.2g} apart"
    if gap <= TIE and len(ids) == reply.started.prompt_len:
        outcome.notes.append(line)
        outcome.count("parted at a tie", 1)
    else:
        outcome.mismatches.append(f"{line}; {got[at : at + 3]}, expected {expected[at : at + 3]}, {request.drafter}")


def _compare_text(outcome: Outcome, stock: Stock, prompt: Prompt, reply: Reply) -> None:
    """The same ids have to be the same text; the end of sequence is no text."""
    end = stock.tokenizer.eos_token_id
    ids = list(reply.token_ids)
    shown = ids[:-1] if ids and ids[-1] == end else ids
    expected = stock.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if reply.text != expected:
        outcome.mismatches.append(f"{prompt.name}: text {reply.text!r}, expected {expected!r}")
