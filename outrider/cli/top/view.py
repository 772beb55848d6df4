"""The tables of `outrider top`: from descriptions and metrics to what is shown. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table

from outrider.cli.top.scrape import Sample, summed
from outrider.messages import WorkerDescription

ROLES = {"orchestrate": "orchestrators", "verify": "verifiers", "draft": "draft workers"}
COLUMNS = {
    "orchestrate": ("sessions", "tokens", "per s", "accepted"),
    "verify": ("sessions", "waiting", "KV used"),
    "draft": ("sessions", "KV used", "tokens", "per s"),
}
"""Figures of each role."""
MAX_POSITIONS = 8
"""Distances from the start of an epoch that are shown; people count them from 1, the metric's label from 0."""
TOKENS = "outrider_generation_tokens_total"
TESTED, ACCEPTED = "outrider_spec_decode_num_tested_tokens", "outrider_spec_decode_num_accepted_tokens"
NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Seen:
    """One process: what it says of itself, and its metrics now and a while ago."""

    worker: WorkerDescription
    now: Sample
    before: Sample | None = None

    def rate(self, name: str) -> float | None:
        """Return how much a counter rose per second; None before the second scrape."""
        if self.before is None or not self.before.values or self.now.at_s <= self.before.at_s:
            return None
        rise = self.now.total(name) - self.before.total(name)
        return max(0.0, rise) / (self.now.at_s - self.before.at_s)


def page(seen: Sequence[Seen]) -> Group:
    """Return all tables."""
    orchestrators = [each for each in seen if each.worker.role == "orchestrate"]
    tables = [table_of(role, [each for each in seen if each.worker.role == role]) for role in ROLES]
    if not seen:
        return Group("nobody is in the registry")
    return Group(
        *(table for table in tables if table.row_count), speculation_table(summed(each.now for each in orchestrators))
    )


def table_of(role: str, seen: Sequence[Seen]) -> Table:
    """Return one line for each process of a role; the figures are wide enough for a terminal of 80 columns."""
    table = Table(title=ROLES[role], title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("id", "address"):
        table.add_column(name, overflow="fold")
    for name in COLUMNS[role]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for each in seen:
        figures = _figures(each)
        table.add_row(
            each.worker.worker_id, each.worker.address, *(figures[name] for name in COLUMNS[role]), _state(each)
        )
    return table


def _figures(each: Seen) -> dict[str, str]:
    """Return what columns can show of a process."""
    worker, now = each.worker, each.now
    counter = "outrider_draft_drafted_tokens_total" if worker.role == "draft" else TOKENS
    has_tokens = bool(now.values) and worker.role != "verify"
    rate = each.rate(counter) if has_tokens else None
    usage = "outrider_kv_cache_usage_perc"
    has_pool = any(name == usage for name, _ in now.values)
    return {
        "sessions": f"{worker.load}/{worker.capacity}",
        "waiting": f"{now.total('outrider_num_requests_waiting'):.0f}" if now.values else NOTHING,
        "KV used": f"{now.total(usage):.0%}" if has_pool else NOTHING,
        "tokens": f"{now.total(counter):.0f}" if has_tokens else NOTHING,
        "per s": f"{rate:.1f}" if rate is not None else NOTHING,
        "accepted": _ratio(now.total(f"{ACCEPTED}_total"), now.total(f"{TESTED}_total")),
    }


def _state(each: Seen) -> str:
    """Say what is out of the ordinary."""
    worker = each.worker
    said = [name for name, holds in (("draining", worker.draining), ("degraded", _is_degraded(each.now))) if holds]
    said += [text for text in (worker.attributes.get("trouble", ""), each.now.trouble) if text]
    return ", ".join(said) or "up"


def _is_degraded(sample: Sample) -> bool:
    return sample.total("outrider_draft_degraded") > 0


def speculation_table(sample: Sample) -> Table:
    """Return what speculation did since the orchestrators started, by position, by drafter, and why it was off."""
    table = Table(title="speculation", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("", "accepted", "tested", "rate"):
        table.add_column(name, justify="left" if not name else "right")
    tested, accepted = (
        sample.by(f"{TESTED}_per_pos_total", "position"),
        sample.by(f"{ACCEPTED}_per_pos_total", "position"),
    )
    positions = sorted(int(position) for position, number in tested.items() if number and position.isdecimal())
    for position in positions[:MAX_POSITIONS]:
        _add(table, f"position {position + 1}", accepted.get(str(position), 0.0), tested[str(position)])
    if len(positions) > MAX_POSITIONS:
        further = [str(position) for position in positions[MAX_POSITIONS:]]
        name = f"{len(further)} further ones, up to {positions[-1] + 1}"
        _add(table, name, sum(accepted.get(each, 0.0) for each in further), sum(tested[each] for each in further))
    by_drafter = sample.by("outrider_drafter_accepted_tokens_total", "drafter")
    for drafter, number in sorted(sample.by("outrider_drafter_tested_tokens_total", "drafter").items()):
        _add(table, f"drafter {drafter}", by_drafter.get(drafter, 0.0), number)
    _add(table, "all", sample.total(f"{ACCEPTED}_total"), sample.total(f"{TESTED}_total"))
    for reason, number in sorted(sample.by("outrider_speculation_off_total", "reason").items()):
        table.add_row(f"off: {reason}", f"{number:.0f} times", "", "")
    return table


def _add(table: Table, name: str, accepted: float, tested: float) -> None:
    table.add_row(name, f"{accepted:.0f}", f"{tested:.0f}", _ratio(accepted, tested))


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else NOTHING
