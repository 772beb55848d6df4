"""Text identity in bfloat16: a speculating request says what its twin says, the same request without drafts.

Every prompt gets one setting out of gamma 1, 2, 4, 8, window 1, 2, 4 times gamma, alone or among seven others, and a
drafter that is a language model or a lookup. The settings go round, so each meets about the same number of prompts of
every kind. The twins run eight at a time: whatever depends on neighbours shows as a difference to those that run alone.
"""

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.drafts import CAUSAL_LM, PROMPT_LOOKUP
from benchmarks.exactness.outcome import Outcome
from benchmarks.serving import Progress, Reply, ask_all
from outrider.client import Client
from outrider.generation import Figures, GenerationRequest, SpeculationChoice
from outrider.ids import Mode
from outrider.messages import SamplingParams
from outrider.prompts import Prompt

GAMMAS = (1, 2, 4, 8)
WINDOW_FACTORS = (1, 2, 4)
AT_ONCE = (1, 8)
DRAFTERS = (CAUSAL_LM, PROMPT_LOOKUP)
GREEDY = SamplingParams(temperature=0.0)
COUPLED = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=40, repetition_penalty=1.1),
)
"""Parameters of coupled requests, in turn."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a prompt is asked."""

    gamma: int
    window: int
    at_once: int
    drafter: str

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of results it belongs to."""
        return (
            f"gamma {self.gamma}",
            f"window {self.window // self.gamma} x gamma",
            f"{self.at_once} at once",
            self.drafter,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt under a setting."""

    prompt: Prompt
    setting: Setting
    request: GenerationRequest

    @property
    def twin(self) -> GenerationRequest:
        """The same request without speculation."""
        return replace(self.request, speculation=SpeculationChoice(off=True), drafter="")


def settings() -> list[Setting]:
    """Return all settings, in a fixed shuffled order: any stretch of it is a mixture."""
    every = [
        Setting(gamma, gamma * factor, at_once, drafter)
        for gamma, factor, at_once, drafter in itertools.product(GAMMAS, WINDOW_FACTORS, AT_ONCE, DRAFTERS)
    ]
    random.Random(1).shuffle(every)
    return every


def make_cases(prompts: Sequence[Prompt], mode: Mode, num_tokens: int) -> list[Case]:
    """Give every prompt a setting, and in coupled mode parameters and a seed.

    Raises:
        ValueError: another mode than greedy or coupled, which promise no text.
    """
    if mode not in (Mode.GREEDY, Mode.COUPLED):
        raise ValueError(f"mode {mode.name} promises a law, not a text")
    cases = []
    for index, (prompt, setting) in enumerate(zip(prompts, itertools.cycle(settings()), strict=False)):
        coupled = mode is Mode.COUPLED
        request = GenerationRequest(
            prompt.asked,
            max_tokens=num_tokens,
            sampling=COUPLED[index % len(COUPLED)] if coupled else GREEDY,
            seed=1000 + index if coupled else None,
            speculation=SpeculationChoice(gamma=setting.gamma, window=setting.window),
            drafter=setting.drafter,
            return_token_origin=True,
        )
        cases.append(Case(prompt, setting, request))
    return cases


async def check_twins(
    client: Client,
    prompts: Sequence[Prompt],
    mode: Mode,
    num_tokens: int,
    progress: Progress = lambda *_: None,
) -> Outcome:
    """Run every prompt and its twin, and compare ids, text and finish reason.

    Args:
        client: of a cluster with both kinds of drafters.
        prompts: which.
        mode: greedy or coupled.
        num_tokens: most tokens of each.
        progress: told about each of several stretches.
    """
    outcome, started_s = Outcome(mode.name.lower()), time.monotonic()
    cases = make_cases(prompts, mode, num_tokens)
    twins = await ask_all(client, [case.twin for case in cases], max(AT_ONCE), progress)
    for at_once in AT_ONCE:
        chosen = [(case, twin) for case, twin in zip(cases, twins, strict=True) if case.setting.at_once == at_once]
        replies = await ask_all(client, [case.request for case, _ in chosen], at_once, progress)
        for (case, twin), reply in zip(chosen, replies, strict=True):
            _compare(outcome, case, reply, twin)
    outcome.seconds = time.monotonic() - started_s
    return outcome


def _compare(outcome: Outcome, case: Case, reply: Reply, twin: Reply) -> None:
    equal = reply.said == twin.said
    outcome.check(equal, *case.setting.groups, case.prompt.kind)
    add_counts(outcome, reply.finished.figures, len(reply.token_ids))
    if not equal:
        outcome.mismatches.append(f"{case.prompt.name} {case.request.sampling} {case.setting}: {parting(reply, twin)}")


def add_counts(outcome: Outcome, figures: Figures, num_tokens: int) -> None:
    """Add a generation's counts to those of its part."""
    outcome.count("tokens", num_tokens)
    outcome.count("accepted", figures.num_accepted)
    outcome.count("rejected", figures.num_tested - figures.num_accepted)
    outcome.count("recovered", figures.num_recovered)
    outcome.count("bonus", figures.num_bonus)
    outcome.count("plain", figures.num_plain)
    outcome.count("generations without a test", figures.num_tested == 0)


def parting(reply: Reply, twin: Reply) -> str:
    """Say where two replies part."""
    pairs = zip(reply.token_ids, twin.token_ids, strict=False)
    at = next((index for index, (own, other) in enumerate(pairs) if own != other), None)
    if at is None and len(reply.token_ids) == len(twin.token_ids):
        return f"same ids, but {reply.text!r} ({reply.finished.reason.name}), twin {twin.text!r}"
    at = min(len(reply.token_ids), len(twin.token_ids)) if at is None else at
    kind = reply.kinds[at].name if at < len(reply.kinds) else "no token"
    return (
        f"token {at}: {reply.token_ids[at : at + 3]} ({kind}), twin {twin.token_ids[at : at + 3]}; "
        f"prompt of {reply.started.prompt_len} tokens; finished {reply.finished.reason.name}, twin "
        f"{twin.finished.reason.name}"
    )
