"""The tables of `outrider top`: from descriptions and metrics to what is shown. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table

from outrider.cli.top.scrape import Sample, summed
from outrider.messages import WorkerDescription

ROLES = {"orchestrate": "orchestrator", "verify": "verifier", "draft": "draft worker"}
MAX_POSITIONS = 8
"""Distances from the start of an epoch that are shown."""
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
    return Group(workers_table(seen), speculation_table(summed(each.now for each in orchestrators)))


def workers_table(seen: Sequence[Seen]) -> Table:
    """Return one line for each process."""
    table = Table(title="workers", title_justify="left")
    for name in ("role", "id", "address", "state"):
        table.add_column(name, overflow="fold")
    for name in ("sessions", "waiting", "KV used", "tokens", "tokens/s", "accepted"):
        table.add_column(name, justify="right")
    for each in seen:
        table.add_row(*_line(each))
    if not seen:
        table.add_row("nobody is in the registry", *[""] * 9)
    return table


def _line(each: Seen) -> tuple[str, ...]:
    worker, now = each.worker, each.now
    drafts = worker.role == "draft"
    counter = "outrider_draft_drafted_tokens_total" if drafts else TOKENS
    has_tokens = bool(now.values) and worker.role != "verify"
    rate = each.rate(counter) if has_tokens else None
    waiting = f"{now.total('outrider_num_requests_waiting'):.0f}" if worker.role == "verify" and now.values else NOTHING
    usage = "outrider_kv_cache_usage_perc"
    has_pool = any(name == usage for name, _ in now.values)
    return (
        ROLES.get(worker.role, worker.role),
        worker.worker_id,
        worker.address,
        _state(each),
        f"{worker.load}/{worker.capacity}",
        waiting,
        f"{now.total(usage):.0%}" if has_pool else NOTHING,
        f"{now.total(counter):.0f}" if has_tokens else NOTHING,
        f"{rate:.1f}" if rate is not None else NOTHING,
        _ratio(now.total(f"{ACCEPTED}_total"), now.total(f"{TESTED}_total")),
    )


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
    table = Table(title="speculation", title_justify="left")
    for name in ("", "accepted", "tested", "rate"):
        table.add_column(name, justify="left" if not name else "right")
    tested, accepted = (
        sample.by(f"{TESTED}_per_pos_total", "position"),
        sample.by(f"{ACCEPTED}_per_pos_total", "position"),
    )
    for position in (str(number) for number in range(MAX_POSITIONS)):
        if tested.get(position):
            _add(table, f"position {position}", accepted.get(position, 0.0), tested[position])
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
