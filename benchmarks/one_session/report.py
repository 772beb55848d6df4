"""Results of the arms as rows, for the terminal and for the page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.one_session.arms import Arm, modelled_rate
from outrider.gamma import Costs


@dataclass(frozen=True, slots=True)
class Row:
    """One arm, measured and modelled."""

    setting: str
    arm: str
    plan: str
    rate: float
    low: float
    high: float
    model: float
    alpha: float
    draft_ms: float
    pass_ms: float
    trip_ms: float
    tokens_per_round: float
    plain_share: float

    @property
    def cells(self) -> tuple[str, ...]:
        """As text, in the order of `HEADER`."""
        return (
            self.setting,
            self.arm,
            self.plan,
            f"{self.rate:.1f} ({self.low:.1f} … {self.high:.1f})",
            f"{self.model:.1f}",
            f"{self.rate / self.model:.2f}",
            f"{self.alpha:.2f}" if self.plan else "",
            f"{self.draft_ms:.2f}" if self.plan else "",
            f"{self.pass_ms:.1f}",
            f"{self.trip_ms:.2f}" if self.plan else "",
            f"{self.tokens_per_round:.2f}",
            f"{self.plain_share:.2f}" if self.plan else "",
        )


HEADER = (
    "models", "decoding", "g0, g, window", "tokens/s: median (lowest … highest)", "model", "measured / model", "alpha",
    "t_d ms", "t_v ms", "r ms", "tokens per round", "undrafted",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What rounds of one kind cost outside the model passes."""

    setting: str
    num_rounds: int
    p50_ms: float
    p99_ms: float


COST_HEADER = ("models", "rounds", "p50 ms", "p99 ms")


def row(setting: str, arm: Arm, costs: Costs) -> Row:
    """Return an arm's results beside the model's value."""
    plan = arm.plan
    text = f"{plan.restart_gamma}, {plan.gamma}, {plan.window}" if plan.enabled else ""
    return Row(
        setting, arm.name, text, arm.rate, min(arm.rates), max(arm.rates), modelled_rate(arm, costs), arm.alpha,
        1000 * costs.draft_s, 1000 * costs.verify_s, 1000 * costs.round_trip_s, arm.tokens_per_round, arm.plain_share,
    )  # fmt: skip


def round_cost(setting: str, costs_s: Sequence[float]) -> RoundCost:
    """Return median and 99th percentile."""
    ordered = sorted(costs_s)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)]
    return RoundCost(setting, len(ordered), 1000 * at[0], 1000 * at[1])


def as_data(rows: Sequence[Row], costs: Sequence[RoundCost]) -> dict[str, object]:
    """Return everything as plain values."""
    return {"arms": [asdict(each) for each in rows], "round_costs": [asdict(each) for each in costs]}
