"""Toy models whose passes sleep for a known time: what a round takes beyond that is the protocol's own cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.one_session.arms import Arm, measure
from benchmarks.one_session.report import RoundCost, Row, round_cost, row
from benchmarks.serving import Cores, toy_specs
from outrider.client import Client
from outrider.cluster import LocalCluster
from outrider.gamma import PLAIN, Costs, choose
from outrider.generation import GenerationRequest, TextPrompt
from outrider.messages import SamplingParams

VERIFY_S = 0.030
CASES = ((0.6, 0.002), (0.6, 0.006), (0.8, 0.002), (0.8, 0.006))
"""(agreement of the draft, draft seconds per token)."""
EXPECTED_TRIP_S = 0.001
"""Round trip that plans are made for, before one was measured."""
MAX_GAMMA = 16
NUM_TOKENS = 80
PROMPTS = ("the cat sat on the mat. ", "a mat sat on the cat. ")


@dataclass(frozen=True, slots=True)
class ToyResults:
    """All toy arms."""

    rows: list[Row]
    costs: list[RoundCost]
    trip_s: float
    """Median cost of a sequential round outside the models."""


async def measure_toys(repetitions: int, cores: Cores, say: Callable[[str], None]) -> ToyResults:
    """Measure every case; takes about eight seconds per case and repetition.

    The plain arm is the same in every case, and runs in the first only.

    Args:
        repetitions: of each arm.
        cores: where the roles run.
        say: told what is being measured.
    """
    rows: list[Row] = []
    costs: list[RoundCost] = []
    every_s: list[float] = []
    for agreement, draft_s in CASES:
        setting = f"toy, {agreement:g}, {1000 * draft_s:g} ms"
        say(setting)
        arms = await _measure_case(agreement, draft_s, repetitions, cores)
        *plain, sequential, pipelined = arms
        outside_s = outside(sequential)
        every_s += outside_s
        costs.append(round_cost(setting, outside_s))
        trip_s = costs[-1].p50_ms / 1000
        rows += [row(setting, arm, Costs(0.0, arm.pass_s)) for arm in plain]
        # A pipelined arm has rounds without a pass, so both take the pass time of the sequential one.
        costs_of = Costs(sequential.draft_s, sequential.pass_s, trip_s)
        rows += [row(setting, arm, costs_of) for arm in (sequential, pipelined)]
    total = round_cost("toy, all of them", every_s)
    return ToyResults(rows, [*costs, total], total.p50_ms / 1000)


async def _measure_case(agreement: float, draft_s: float, repetitions: int, cores: Cores) -> list[Arm]:
    specs = toy_specs(agreement, draft_s, VERIFY_S, cores)
    async with LocalCluster(specs) as cluster, Client(cluster.address) as client:
        sequential, pipelined = (
            choose(agreement, draft_s, VERIFY_S, EXPECTED_TRIP_S, MAX_GAMMA, way) for way in (False, True)
        )
        arms = [Arm("sequential", sequential, client), Arm("pipelined", pipelined, client)]
        if (agreement, draft_s) == CASES[0]:
            arms.insert(0, Arm("plain", PLAIN, client))
        await measure_arms(arms, repetitions)
        return arms


async def measure_arms(arms: Sequence[Arm], repetitions: int) -> None:
    """Run all arms in turn, so many times after a first round that warms up."""
    for number in range(repetitions + 1):
        for arm in arms:
            measured = await measure(arm, _requests(arm))
            if number:
                arm.repetitions.append(measured)


def _requests(arm: Arm) -> list[GenerationRequest]:
    greedy = SamplingParams(temperature=0.0)
    return [
        GenerationRequest(
            TextPrompt(text), max_tokens=NUM_TOKENS, sampling=greedy, ignore_eos=True, speculation=arm.choice
        )
        for text in PROMPTS
    ]


def outside(arm: Arm) -> list[float]:
    """Return what each sequential round took beyond its drafting and its pass, both as measured on average."""
    models_s = arm.plan.gamma * arm.draft_s + arm.pass_s
    return [gap - models_s for each in arm.repetitions for gap in each.gaps_s]
