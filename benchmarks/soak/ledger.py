"""What the clients of a soak note: counts, times, and everything that should not have happened."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.soak.hearing import Heard

GAP_EDGES_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper ends of the histogram's bins; the last bin has none."""
MAX_WORDS = 400
"""Characters of a finding that are kept."""


@dataclass(slots=True)
class Ledger:
    """Notes of all clients."""

    counts: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, heard: Heard) -> None:
        """Count a generation, whole or cut."""
        self.counts["tokens"] += len(heard.token_ids)
        self.gaps_s += heard.gaps_s
        if heard.first_s is not None:
            self.first_s.append(heard.first_s)
        for reason in heard.notices:
            self.counts[f"notice {reason}"] += 1
        if heard.finished is not None:
            self._note_figures(heard)

    def _note_figures(self, heard: Heard) -> None:
        if heard.finished is None:
            return
        figures = heard.finished.figures
        self.counts["generations heard to their end"] += 1
        for name in ("num_rounds", "num_tested", "num_accepted", "num_recovered", "num_bonus", "num_plain"):
            self.counts[name.removeprefix("num_")] += getattr(figures, name)
        self.counts["guarantee void"] += figures.guarantee_void
        self.counts[f"drafter {figures.drafter or 'none'}"] += 1

    def blame(self, words: str) -> None:
        """Note something that should not have happened."""
        self.wrong.append(words[:MAX_WORDS])


def histogram(values_s: Sequence[float]) -> list[tuple[str, int]]:
    """Return how many values lie in each bin, by the bin's name."""
    counts = Counter(next((edge for edge in GAP_EDGES_S if value <= edge), 0.0) for value in values_s)
    bins = [(f"≤ {edge:g} s", counts[edge]) for edge in GAP_EDGES_S]
    return [*bins, (f"> {GAP_EDGES_S[-1]:g} s", counts[0.0])]
