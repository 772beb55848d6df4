"""One way of decoding, measured again and again: what is asked, and what came of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from outrider.client import Client
from outrider.gamma import Costs, pipelined_rate, plain_rate, sequential_rate
from outrider.generation import Chunk, Figures, Finished, GenerationRequest, SpeculationChoice
from outrider.messages import Speculation


@dataclass(slots=True)
class Measured:
    """Sums over the generations of one repetition."""

    num_tokens: int = 0
    """Tokens after each generation's first chunk."""
    seconds: float = 0.0
    """From each generation's first chunk to its last, on the client's clock."""
    gaps_s: list[float] = field(default_factory=list)
    """From each chunk to the next; without each generation's last, whose round the end may have cut short."""
    figures: list[Figures] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Arm:
    """A way of decoding, and its repetitions."""

    name: str
    plan: Speculation
    """All zero: plain."""
    client: Client
    drafter: str = ""
    repetitions: list[Measured] = field(default_factory=list)

    @property
    def choice(self) -> SpeculationChoice:
        """The plan as a request states it."""
        if not self.plan.enabled:
            return SpeculationChoice(off=True)
        return SpeculationChoice(gamma=self.plan.gamma, restart_gamma=self.plan.restart_gamma, window=self.plan.window)

    # -- results ---------------------------------------------------------------------------------------------------

    @property
    def rates(self) -> list[float]:
        """Tokens per second of every repetition."""
        return [each.rate for each in self.repetitions]

    @property
    def rate(self) -> float:
        """Median over the repetitions."""
        return median(self.rates)

    @property
    def gaps_s(self) -> list[float]:
        """All gaps between chunks."""
        return [gap for each in self.repetitions for gap in each.gaps_s]

    def total(self, name: str) -> float:
        """Return a figure, summed over all generations."""
        return float(sum(getattr(figures, name) for each in self.repetitions for figures in each.figures))

    @property
    def alpha(self) -> float:
        """Accepted of tested."""
        tested = self.total("num_tested")
        return self.total("num_accepted") / tested if tested else 0.0

    @property
    def draft_s(self) -> float:
        """Draft seconds per token."""
        drafted = self.total("num_drafted")
        return self.total("draft_s") / drafted if drafted else 0.0

    @property
    def pass_s(self) -> float:
        """Model seconds per round; in plain and sequential arms every round is one pass."""
        return self.total("verify_s") / max(1.0, self.total("num_rounds"))

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens per round."""
        kinds = sum(self.total(f"num_{kind}") for kind in ("accepted", "recovered", "bonus", "plain"))
        return kinds / max(1.0, self.total("num_rounds"))

    @property
    def plain_share(self) -> float:
        """Tokens that nobody had drafted, of all."""
        kinds = sum(self.total(f"num_{kind}") for kind in ("accepted", "recovered", "bonus", "plain"))
        return self.total("num_plain") / max(1.0, kinds)


async def measure(arm: Arm, requests: Sequence[GenerationRequest]) -> Measured:
    """Run the requests one after the other."""
    measured = Measured()
    for request in requests:
        await _one(arm, request, measured)
    return measured


async def _one(arm: Arm, request: GenerationRequest, measured: Measured) -> None:
    times_s: list[float] = []
    counts: list[int] = []
    async for event in arm.client.generate(request):
        if isinstance(event, Chunk):
            times_s.append(time.perf_counter())
            counts.append(len(event.token_ids))
        elif isinstance(event, Finished):
            measured.figures.append(event.figures)
    if len(times_s) > 1:
        measured.num_tokens += sum(counts[1:])
        measured.seconds += times_s[-1] - times_s[0]
        measured.gaps_s += [after - before for before, after in pairwise(times_s[:-1])]


def modelled_rate(arm: Arm, costs: Costs) -> float:
    """Return the latency model's tokens per second for an arm.

    Tokens that the drafter offered nothing for (prompt lookup without a match) take a pass and a trip each; the others
    go by the formula of the arm's plan.

    Args:
        arm: with its repetitions.
        costs: t_d, t_v and r.
    """
    if not arm.plan.enabled:
        return plain_rate(costs)
    plan = arm.plan
    if plan.window > plan.gamma:
        rate = pipelined_rate(arm.alpha, plan.restart_gamma, plan.gamma, costs)
    else:
        rate = sequential_rate(arm.alpha, plan.gamma, costs)
    share = arm.plain_share
    return 1.0 / (share * (costs.verify_s + costs.round_trip_s) + (1.0 - share) / rate)
