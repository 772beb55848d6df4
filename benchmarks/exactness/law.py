"""Rejection mode follows the target's law: chi-square tests on the real model, with planted mistakes beside them.

For the token rule and the block rule, at temperature 1 and with top-p .9, some thousand generations of three tokens are
compared with the exact law, which is read off the target's own rows. Then the same test has to reject a rule that
replaces from the target's row, and a drafter that takes its likeliest token and sends an honest row beside it.

A right implementation fails one test with probability `LEVEL`. Keys are fixed and time is counted in steps, so a run on
the same engine gives the same outcome again.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.drafts import CLOSE_SUBSET
from benchmarks.exactness.chi_square import Fit, Law, Prefix, fit_sequences
from benchmarks.exactness.outcome import Outcome
from benchmarks.exactness.planted import replacing_from_target
from benchmarks.exactness.sampler import Recipe, Sample, Sampler
from draft_service.drafters.causal_lm import CausalLm
from outrider.ids import Mode, TokenClass
from outrider.messages import SamplingParams
from outrider.model.names import ModelSpec
from outrider.model.opening import OpenedModel, open_model
from outrider.model.runner import BLOCK_LEN, Feed, ModelRunner, prefill_plan
from outrider.sampling import probabilities

LEVEL = 1e-3
"""False-alarm rate of each test."""
PROMPT = """The ferry had left an hour ago, and the three of them sat on their bags in the empty hall. Outside it had
begun to rain. The old man opened a tin of biscuits and passed it round without a word. The girl took two, her brother
none. He was looking at the clock above the ticket window, which had stopped at ten past four, and then he said that he
had once heard a story about a"""
PROMPT_LEN = BLOCK_LEN + 1
"""Its last tokens are used: a whole block of KV, which all generations share, and the one token that each feeds."""
SAMPLINGS = {"temperature 1": SamplingParams(), "top-p .9": SamplingParams(top_p=0.9)}
MODES = (Mode.REJECTION, Mode.BLOCK)
PLANTED_SHARE = 0.5
"""Size of a sample with a mistake in it, in sizes of one without: mistakes this large show sooner."""
MIN_VISITS = 100
"""Generations that must share a prefix before the tokens behind it are tested."""
NUM_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Bench:
    """Models that are open, and the prompt all samples start from."""

    target: OpenedModel
    sampler: Sampler
    prompt: tuple[int, ...]

    def fit(self, sample: Sample, sampling: SamplingParams) -> Fit:
        """Test a sample against the law, from rows of the same engine and classes."""
        runner, vocab_len = self.target.runner, self.target.vocabulary.size
        with teacher_forced_law(runner, vocab_len, self.prompt, sampling) as law:
            return fit_sequences(sample.sequences, law, MIN_VISITS)


def check_law(num: int, *, threads: int = 1) -> Outcome:
    """Run all samples, right and planted; blocks for minutes.

    Args:
        num: generations of each sample.
        threads: of the models.
    """
    outcome, started_s = Outcome("law"), time.monotonic()
    torch.set_num_threads(threads)
    with torch.inference_mode():
        bench = open_bench()
        for mode in MODES:
            for name, sampling in SAMPLINGS.items():
                recipe = Recipe(bench.prompt, mode, sampling)
                check_right(outcome, bench, recipe, name, num)
        for mode in MODES:
            check_planted(
                outcome, bench, Recipe(bench.prompt, mode, SAMPLINGS["temperature 1"]), round(num * PLANTED_SHARE)
            )
    outcome.seconds = time.monotonic() - started_s
    return outcome


def open_bench() -> Bench:
    """Open target and draft; blocks for seconds."""
    target = open_model(ModelSpec(), num_blocks=NUM_BLOCKS, context_len=256)
    draft = open_model(ModelSpec(layers=CLOSE_SUBSET), num_blocks=NUM_BLOCKS, context_len=256)
    drafter = CausalLm(draft.runner, vocab_len=draft.vocabulary.size)
    prompt = tuple(target.tokenizer.encode(PROMPT)[-PROMPT_LEN:])
    return Bench(target, Sampler(target.runner, drafter, target.vocabulary.size), prompt)


def check_right(outcome: Outcome, bench: Bench, recipe: Recipe, name: str, num: int) -> None:
    """Draw a sample of so many generations, and test it."""
    sample = bench.sampler.sample(recipe, num, seed=recipe.mode)
    fit = bench.fit(sample, recipe.sampling)
    for kind, amount in sample.kinds.items():
        outcome.count(kind.name.lower(), amount)
    label = f"{recipe.mode.name.lower()}, {name}"
    outcome.check(fit.p_value >= LEVEL, label)
    outcome.notes.append(f"{label}: {_describe(fit, sample)}")
    if fit.p_value < LEVEL:
        outcome.mismatches.append(f"{label}: the law is refused, {_describe(fit, sample)}")


def check_planted(outcome: Outcome, bench: Bench, recipe: Recipe, num: int) -> None:
    """Draw a sample with each planted mistake; the test has to refuse it."""
    plans = {
        "replacement from the target's row": (recipe, True),
        "likeliest token sent as drawn": (replace(recipe, takes_likeliest=True), False),
    }
    for name, (planted, faulty) in plans.items():
        with _faulty_rule(faulty):
            sample = bench.sampler.sample(planted, num, seed=100 + recipe.mode)
        fit = bench.fit(sample, recipe.sampling)
        label = f"{recipe.mode.name.lower()}, planted: {name}"
        outcome.check(fit.p_value < LEVEL, label)
        outcome.notes.append(f"{label}: {_describe(fit, sample)}")
        if fit.p_value >= LEVEL:
            outcome.mismatches.append(f"{label}: the mistake is not noticed, {_describe(fit, sample)}")


@contextmanager
def _faulty_rule(faulty: bool) -> Iterator[None]:
    with replacing_from_target() if faulty else nullcontext():
        yield


def _describe(fit: Fit, sample: Sample) -> str:
    kinds = ", ".join(f"{amount} {kind.name.lower()}" for kind, amount in sample.kinds.items() if amount)
    impossible = f", {fit.num_impossible} tokens outside the support" if fit.num_impossible else ""
    return (
        f"chi-square {fit.statistic:.1f} with {fit.degrees} degrees of freedom over {fit.num_nodes} prefixes, "
        f"p = {fit.p_value:.2g}{impossible}; {len(sample.sequences)} generations ({kinds})"
    )


@contextmanager
def teacher_forced_law(
    runner: ModelRunner, vocab_len: int, prompt: tuple[int, ...], sampling: SamplingParams
) -> Iterator[Law]:
    """Give a function from tokens after the prompt to the law [vocab_len] of the next one.

    The prompt but its last token is fed as prompt, everything after it as decode rows, as the engine does.
    """
    slot = runner.new_slot()
    for first, last in prefill_plan(0, len(prompt) - 1):
        runner.forward([Feed(slot, prompt[first:last], TokenClass.PROMPT, 0)])

    def law(prefix: Prefix) -> npt.NDArray[np.float64]:
        slot.truncate(len(prompt) - 1)
        rows = runner.forward([Feed(slot, (prompt[-1], *prefix), TokenClass.DECODE, 1)])[0]
        exact: npt.NDArray[np.float64] = probabilities(rows.logits, sampling, vocab_len)[0].double().numpy()
        return exact

    try:
        yield law
    finally:
        # The engine counts all blocks of its pool after every session.
        runner.free_slot(slot)
