"""The default target with the drafts that exist for it, on the demo prompts."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from benchmarks.drafts import CAUSAL_LM, PROMPT_LOOKUP
from benchmarks.one_session.alone import AloneArm, alone_arms
from benchmarks.one_session.arms import Arm, Measured, measure
from benchmarks.one_session.report import RoundCost, Row, round_cost, row
from benchmarks.prompt_set import demo_prompts
from benchmarks.serving import Cores, real_specs
from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.gamma import PLAIN, Costs, pipelined_rate, sequential_rate
from outrider.generation import GenerationRequest, SpeculationChoice
from outrider.messages import SamplingParams, Speculation

DTYPE = "bfloat16"
NUM_TOKENS = 64
MAX_GAMMA = 8
"""Most tokens per proposal that plans may have; nine rows cost a CPU what one costs, more do not."""
TRIAL = SpeculationChoice(gamma=4, window=4)
"""What alpha, t_d and t_v are measured with before plans are made."""
DRAFTERS = (PROMPT_LOOKUP, CAUSAL_LM)
NAMES = {PROMPT_LOOKUP: "prompt lookup", CAUSAL_LM: "layer subset"}


@dataclass(frozen=True, slots=True)
class RealResults:
    """All arms of the real model."""

    rows: list[Row]
    costs: list[RoundCost]
    alone: list[AloneArm] = field(default_factory=list)
    """In one process, without any protocol."""


async def measure_real(
    repetitions: int, cores: Cores, trip_s: float, num_prompts: int, say: Callable[[str], None]
) -> RealResults:
    """Measure plain on one core and on both, each draft sequential and pipelined, and one process; all arms in turn.

    Args:
        repetitions: of each arm.
        cores: where the roles run.
        trip_s: r, as measured with the toy models.
        num_prompts: demo prompts per repetition.
        say: told what is being measured.
    """
    async with AsyncExitStack() as stack:
        say("starting the clusters")
        narrow = await _client(stack, real_specs(DTYPE, DRAFTERS, cores=cores))
        wide = await _client(stack, real_specs(DTYPE, (), threads=2, cores=Cores(cores.both, "", cores.orchestrate)))
        plain, plain_wide = Arm("plain", PLAIN, narrow), Arm("plain, both cores", PLAIN, wide)
        drafted = {drafter: await _arms(narrow, drafter, trip_s, num_prompts, say) for drafter in DRAFTERS}
        arms = [plain, plain_wide, *(arm for pair in drafted.values() for arm in pair)]
        gammas = {drafter: pair[0].plan.gamma for drafter, pair in drafted.items()}
        alone = await alone_arms(stack, cores, gammas)
        for number in range(repetitions):
            say(f"repetition {number + 1} of {repetitions}")
            for arm in arms:
                arm.repetitions.append(await measure(arm, _requests(arm.choice, arm.drafter, num_prompts)))
            for other in alone:
                await other.repeat([prompt.asked for prompt in demo_prompts()[:num_prompts]], NUM_TOKENS)
    rows = [row("default target", arm, Costs(0.0, arm.pass_s)) for arm in (plain, plain_wide)]
    costs = [_outside("default target, plain", plain)]
    for drafter, (sequential, pipelined) in drafted.items():
        rows += [
            row(NAMES[drafter], arm, Costs(arm.draft_s, sequential.pass_s, trip_s)) for arm in (sequential, pipelined)
        ]
        costs.append(_outside(f"default target, {NAMES[drafter]}, sequential", sequential))
    return RealResults(rows, costs, alone)


async def _client(stack: AsyncExitStack, specs: Sequence[ServiceSpec]) -> Client:
    cluster = await stack.enter_async_context(LocalCluster(specs))
    return await stack.enter_async_context(Client(cluster.address))


async def _arms(
    client: Client, drafter: str, trip_s: float, num_prompts: int, say: Callable[[str], None]
) -> tuple[Arm, Arm]:
    """Try a drafter, and plan a sequential and a pipelined arm from what was measured."""
    say(f"trying {NAMES[drafter]}")
    trial = Arm("trial", Speculation(4, 4, 4), client, drafter)
    trial.repetitions.append(await measure(trial, _requests(TRIAL, drafter, num_prompts)))
    costs = Costs(trial.draft_s, trial.pass_s, trip_s)
    sequential, pipelined = best_plans(trial.alpha, costs)
    return Arm("sequential", sequential, client, drafter), Arm("pipelined", pipelined, client, drafter)


def best_plans(alpha: float, costs: Costs) -> tuple[Speculation, Speculation]:
    """Return the best sequential and the best pipelined plan, also where plain decoding would be better still."""
    gammas = range(1, MAX_GAMMA + 1)
    best = max(gammas, key=lambda gamma: sequential_rate(alpha, gamma, costs))
    pairs = [(restart, gamma) for gamma in gammas for restart in range(1, gamma + 1)]
    restart, gamma = max(pairs, key=lambda pair: pipelined_rate(alpha, pair[0], pair[1], costs))
    return Speculation(best, best, best), Speculation(gamma, restart, 2 * gamma)


def _requests(choice: SpeculationChoice, drafter: str, num_prompts: int) -> list[GenerationRequest]:
    greedy = SamplingParams(temperature=0.0)
    return [
        GenerationRequest(
            prompt.asked, max_tokens=NUM_TOKENS, sampling=greedy, speculation=choice, drafter=drafter, ignore_eos=True
        )
        for prompt in demo_prompts()[:num_prompts]
    ]


def _outside(setting: str, arm: Arm) -> RoundCost:
    """Return what rounds took beyond drafting and pass, taken as the repetition's means: their spread is in it too."""
    costs_s: list[float] = []
    for each in arm.repetitions:
        costs_s += [gap - _models_s(arm, each) for gap in each.gaps_s]
    return round_cost(setting, costs_s)


def _models_s(arm: Arm, measured: Measured) -> float:
    """Return the model time of an average round of a repetition."""
    rounds = sum(figures.num_rounds for figures in measured.figures)
    verify_s = sum(figures.verify_s for figures in measured.figures)
    return verify_s / max(1, rounds) + arm.plan.gamma * arm.draft_s
