"""Does a sample of token sequences follow the target's law? Pure.

A sample of sequences is tested as a tree: the first tokens against the law after the prompt, and, behind every prefix
that is frequent enough, the next tokens against the law after that prefix. Behind a given prefix the next tokens are
independent draws of that law, so the statistics of all nodes add up to one chi-square.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

MIN_EXPECTED = 5.0
"""Cells with a smaller expected count are pooled: the chi-square approximation needs about that many."""

Prefix = tuple[int, ...]
Law = Callable[[Prefix], npt.NDArray[np.float64]]
"""From tokens after the prompt to the exact law [vocab] of the next one."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Outcome of a test; fits of independent samples add up."""

    statistic: float = 0.0
    degrees: int = 0
    num_nodes: int = 0
    """Prefixes whose next tokens were tested."""
    num_impossible: int = 0
    """Observed tokens to which the law gives no mass at all; one is enough to refuse it."""

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least as large if the law is right; 0 where the impossible happened."""
        if self.num_impossible:
            return 0.0
        return float(chi2.sf(self.statistic, self.degrees)) if self.degrees else 1.0

    def __add__(self, other: "Fit") -> "Fit":
        return Fit(
            self.statistic + other.statistic,
            self.degrees + other.degrees,
            self.num_nodes + other.num_nodes,
            self.num_impossible + other.num_impossible,
        )


def fit_sequences(sequences: Sequence[Prefix], law: Law, min_visits: int) -> Fit:
    """Test a sample of sequences.

    Args:
        sequences: equally long.
        law: the law they should follow.
        min_visits: prefixes seen less often are left out; which ones are looked at depends on earlier tokens only, so
            leaving them out biases nothing.
    """
    total = Fit()
    for length in range(len(sequences[0])):
        visits = Counter(sequence[:length] for sequence in sequences)
        for prefix, count in sorted(visits.items()):
            if count >= min_visits:
                following = Counter(sequence[length] for sequence in sequences if sequence[:length] == prefix)
                total += fit_tokens(following, law(prefix))
    return total


def fit_tokens(observed: Counter[int], law: npt.NDArray[np.float64]) -> Fit:
    """Test counts of tokens against their law [vocab].

    Source: Pearson 1900; pooling of small cells as in Cochran 1954.
    """
    num = observed.total()
    expected = law * (num / law.sum())
    counts = np.zeros(len(law))
    counts[list(observed)] = list(observed.values())
    impossible = int(counts[law == 0.0].sum())
    large = expected >= MIN_EXPECTED
    cells = list(zip(counts[large], expected[large], strict=True))
    rest = float(expected[~large].sum())
    if rest >= MIN_EXPECTED:
        cells.append((float(counts[~large].sum()), rest))
    elif cells:
        # Too little for a cell of its own: it joins the smallest, so that no observation is lost.
        smallest = min(range(len(cells)), key=lambda index: cells[index][1])
        seen, wanted = cells[smallest]
        cells[smallest] = (seen + float(counts[~large].sum()), wanted + rest)
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return Fit(float(statistic), max(0, len(cells) - 1), 1, impossible)
