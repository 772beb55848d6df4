"""What `outrider shadow` says: by kind of session, what it means, and what the latency model makes of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table as ShownTable

from outrider.cli.drafters.tally import predicted
from outrider.gamma import Costs, best_plan
from outrider.ids import Mode
from outrider.report.page import Section, Table, page
from outrider.report.plots import Series, line_plot
from outrider.shadowing import Logged, Shadowed, total

HEADER = ("sessions", "number", "tokens", "alpha", "words per round", "undrafted")
NOTHING = "–"
MEANINGS = {
    "greedy": "greedy: the tests are those of a live session, token by token; alpha is its acceptance",
    "seeded": "seeded: the key is that of the session's state, the noise is shared, the tests are those of a live "
    "session; alpha is its acceptance",
    "unseeded": "unseeded: agreement with the logged token, which is one draw of the target's. For copied tokens "
    "(lookup) it estimates acceptance without bias; for drafts that draw from a row of their own it is at most the "
    "acceptance of rejection sampling: the sum over tokens of draft x target is at most that of the smaller of the two",
}
"""What the figures of each kind of session are."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that came out."""

    drafter: str
    features: bool
    """Whether the drafter was given hidden states of the target."""
    gamma: int
    max_gamma: int
    draft_s: float
    """t_d."""
    costs: Costs | None
    """None where nothing is known of the target's passes."""
    sessions: tuple[tuple[Logged, Shadowed], ...]

    def groups(self) -> dict[str, Shadowed]:
        """Return the sums of each kind of session that there is, and of all if there are several kinds."""
        kept = [(kind_of(session), result) for session, result in self.sessions if not result.skipped]
        sums = {kind: total(result for each, result in kept if each == kind) for kind in MEANINGS}
        known = {kind: each for kind, each in sums.items() if each.num_tokens}
        return known if len(known) < 2 else {**known, "all": total(result for _, result in kept)}

    def number_of(self, group: str) -> int:
        """Return how many sessions a group has."""
        return sum(group in ("all", kind_of(each)) for each, result in self.sessions if not result.skipped)


def kind_of(session: Logged) -> str:
    """Return which of `MEANINGS` a session's figures have."""
    if session.mode is Mode.GREEDY:
        return "greedy"
    return "seeded" if session.exact else "unseeded"


def alpha_of(result: Shadowed) -> float | None:
    """Return accepted of tested; None where nothing was tested."""
    tested = sum(result.tested)
    return sum(result.accepted) / tested if tested else None


def tables(summary: Summary) -> list[ShownTable]:
    """Return what a terminal shows."""
    shown = []
    for each in (_groups(summary), _positions(summary)):
        table = ShownTable(*each.header, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for row in each.rows:
            table.add_row(*row)
        table.add_row()
        shown.append(table)
    return shown


def lines(summary: Summary) -> list[str]:
    """Return what is said beneath the tables."""
    skipped = [f"left out: {result.session_id}: {result.skipped}" for _, result in summary.sessions if result.skipped]
    meant = [MEANINGS[kind] for kind in summary.groups() if kind in MEANINGS]
    given = ["hidden states of the target were computed over the logged texts, as prompts are"] * summary.features
    return [*meant, *given, *skipped, *_prediction(summary)]


def report(summary: Summary) -> str:
    """Return the report as HTML."""
    plot = line_plot(
        "Accepted of tested",
        ("position in the proposal", "share"),
        [Series(name, range(1, len(each.tested) + 1), _rates(each)) for name, each in summary.groups().items()],
    )
    sections = [
        Section("Sessions", "\n\n".join(lines(summary)), _groups(summary)),
        Section("Acceptance by position", "", _positions(summary), (plot,)),
    ]
    models = sorted({session.model for session, _ in summary.sessions if session.model})
    facts = {"drafter": summary.drafter, "tokens per proposal": str(summary.gamma), "models": ", ".join(models)}
    return page(f"Shadowing: {summary.drafter}", sections, {name: value for name, value in facts.items() if value})


def _groups(summary: Summary) -> Table:
    return Table(HEADER, tuple(_row(summary, name, each) for name, each in summary.groups().items()))


def _row(summary: Summary, name: str, result: Shadowed) -> tuple[str, ...]:
    alpha = alpha_of(result)
    return (
        name,
        str(summary.number_of(name)),
        str(result.num_tokens),
        NOTHING if alpha is None else f"{alpha:.3f}",
        f"{result.num_tokens / result.num_rounds:.2f}",
        f"{result.num_undrafted / result.num_tokens:.2f}",
    )


def _positions(summary: Summary) -> Table:
    header = ("accepted by position", *(str(place + 1) for place in range(summary.gamma)))
    rows = [(name, [f"{rate:.2f}" for rate in _rates(each)]) for name, each in summary.groups().items()]
    return Table(header, tuple((name, *_padded(cells, summary.gamma)) for name, cells in rows))


def _padded(cells: Sequence[str], length: int) -> Iterable[str]:
    return [*cells, *[""] * (length - len(cells))]


def _rates(result: Shadowed) -> list[float]:
    return [accepted / tested for tested, accepted in zip(result.tested, result.accepted, strict=True)]


def _prediction(summary: Summary) -> list[str]:
    """Say what the latency model makes of all sessions together."""
    everything = total(result for _, result in summary.sessions)
    drafted = f"t_d {1000 * summary.draft_s:.2f} ms"
    costs = summary.costs
    if costs is None:
        return [f"{drafted}; no prediction without the time of a pass: give --verify-ms, or --target to measure it"]
    if not everything.num_tokens:
        return []
    alpha = alpha_of(everything) or 0.0
    undrafted = everything.num_undrafted / everything.num_tokens
    plan = best_plan(alpha, costs, summary.max_gamma, pipelined=True)
    passes = (
        f"t_v {1000 * costs.pass_s(1):.1f} ms ({summary.gamma + 1} rows: {1000 * costs.pass_s(summary.gamma + 1):.1f})"
    )
    figures = f"{drafted}, {passes}, cost {costs.draft_s / costs.pass_s(1):.3f}"
    if not plan.enabled:
        return [f"{figures}: predicted to be slower than plain decoding at any length; leave it off"]
    speed_up = predicted(alpha, undrafted, plan, costs)
    least = "" if everything.exact else " (unseeded sessions: at least, unless drafts are copied)"
    return [f"{figures}: predicted {speed_up:.2f} times plain at gamma {plan.gamma}, first {plan.restart_gamma}{least}"]
