"""What the search for layers needs of a target that runs: texts that it wrote, and how long its passes take."""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from outrider.gamma import Costs, best_restart, pipelined_rate, plain_rate, sequential_rate
from outrider.generation import TextPrompt
from outrider.ids import TokenClass
from outrider.model.layer_search import Layers, Sample
from outrider.model.names import ModelSpec
from outrider.model.opening import OpenedModel, open_model
from outrider.model.runner import Feed, KvSlot, prefill_plan
from outrider.prompts import Prompt

MAX_PROMPT = 512
"""Tokens of a prompt; longer ones are skipped: each is computed once per subset."""
ANSWER = 64
"""Most tokens of an answer, so that many prompts have a say."""
POOL = 512
"""KV blocks of the target while it writes."""
PASSES = 15
"""Passes whose median is a time."""
MAX_GAMMA = 16
"""Longest proposal that is thought of."""
KNOWN_LEN = 128
"""Tokens of the text that passes are timed behind."""


def write_samples(opened: OpenedModel, prompts: Sequence[Prompt], tokens: int) -> list[Sample]:
    """Have the target answer prompts, greedily and side by side, until about so many tokens are written."""
    asked = [ids for prompt in prompts if len(ids := _ids(opened, prompt)) <= MAX_PROMPT]
    samples, written, rows = list[Sample](), 0, opened.runner.info.max_rows
    while asked and written < tokens:
        some, asked = asked[:rows], asked[rows:]
        for ids, prompt_len in _answers(opened, some, min(ANSWER, max(2, (tokens - written) // len(some)))):
            samples.append(Sample(tuple(ids), prompt_len))
            written += len(ids) - prompt_len
    return samples


def _ids(opened: OpenedModel, prompt: Prompt) -> list[int]:
    asked, tokenizer = prompt.asked, opened.tokenizer
    if isinstance(asked, TextPrompt):
        return tokenizer.encode(asked.text)
    spoken = [{"role": message.role, "content": message.content} for message in asked.messages]
    text = tokenizer.apply_chat_template(spoken, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(str(text), add_special_tokens=False)


def _answers(opened: OpenedModel, prompts: Sequence[list[int]], answer_len: int) -> list[tuple[list[int], int]]:
    """Return each prompt with its greedy answer, and the prompt's length."""
    runner, ends = opened.runner, set(opened.end_token_ids)
    texts = [(list(ids), len(ids), _filled(opened, ids)) for ids in prompts]
    going = texts
    while going:
        rows = runner.forward([Feed(slot, tuple(ids[slot.length :]), TokenClass.DECODE, 1) for ids, _, slot in going])
        for (ids, _, _), row in zip(going, rows, strict=True):
            ids.append(int(row.logits[0, : opened.vocabulary.size].argmax()))
        going = [text for text in going if len(text[0]) - text[1] < answer_len and text[0][-1] not in ends]
    for _, _, slot in texts:
        runner.free_slot(slot)
    return [(ids, prompt_len) for ids, prompt_len, _ in texts]


def _filled(opened: OpenedModel, ids: Sequence[int]) -> KvSlot:
    """Return a slot that holds all but the last token."""
    slot = opened.runner.new_slot(by_class=False)
    for start, end in prefill_plan(0, len(ids) - 1):
        opened.runner.forward([Feed(slot, tuple(ids[start:end]), TokenClass.PROMPT, 0)])
    return slot


# --- times ------------------------------------------------------------------------------------------------------------


def pass_times(opened: OpenedModel, most_rows: int) -> list[float]:
    """Return the seconds of a pass of 1, 2, 4, … rows of one session, by number of rows up to `most_rows`."""
    slot = _filled(opened, [1] * (KNOWN_LEN + 1))
    times_s: dict[int, float] = {}
    for rows in _powers(most_rows):
        taken = list[float]()
        for _ in range(PASSES):
            started_s = time.perf_counter()
            opened.runner.forward([Feed(slot, (1,) * rows, TokenClass.DECODE, rows)])
            taken.append(time.perf_counter() - started_s)
            slot.truncate(KNOWN_LEN)
        times_s[rows] = median(taken)
    opened.runner.free_slot(slot)
    measured = sorted(times_s)
    return [times_s[next(rows for rows in measured if rows >= num)] for num in range(1, most_rows + 1)]


def draft_times(spec: ModelSpec, num_layers: int, whole_s: float) -> list[float]:
    """Return the draft seconds per token with 0, 1, 2, … all layers: a line through the whole model and a half."""
    half = max(1, num_layers // 2)
    opened = open_model(replace(spec, layers=tuple(range(half))), num_blocks=8)
    half_s = pass_times(opened, 1)[0]
    per_layer_s = max(0.0, (whole_s - half_s) / (num_layers - half))
    return [max(0.0, whole_s - (num_layers - kept) * per_layer_s) for kept in range(num_layers + 1)]


def best_speed(alpha: float, costs: Costs) -> tuple[float, int, bool]:
    """Return the speed over plain decoding of the best way to draft, its gamma, and whether it is pipelined."""
    ways = [(sequential_rate(alpha, gamma, costs), gamma, False) for gamma in range(1, MAX_GAMMA + 1)]
    ways += [
        (pipelined_rate(alpha, best_restart(alpha, gamma, costs), gamma, costs), gamma, True)
        for gamma in range(1, MAX_GAMMA + 1)
    ]
    rate, gamma, pipelined = max(ways)
    return rate / plain_rate(costs), gamma, pipelined


def setting(layers: Layers) -> str:
    """Return layers as the settings and `--draft` take them."""
    return ",".join(map(str, layers))


def _powers(most: int) -> list[int]:
    powers = [1]
    while powers[-1] < most:
        powers.append(min(2 * powers[-1], most))
    return powers
