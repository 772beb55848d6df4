"""What the services' metrics say: one scrape of each, and what two of them say of the time between. Blocks."""

import http.client
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 2.0
"""Of one scrape."""
MAX_BYTES = 16 << 20
"""Of one answer; what is longer is no metrics page."""
MAX_AT_ONCE = 16

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of one process at one moment."""

    at_s: float = 0.0
    values: Mapping[tuple[str, Labels], float] = field(default_factory=dict)
    """By name and labels."""
    trouble: str = ""
    """Why there are none."""

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all series with these labels; 0 where there is none."""
        wanted = frozenset(labels.items())
        return sum(value for (known, held), value in self.values.items() if known == name and wanted <= held)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return a metric summed by a label's values."""
        sums: dict[str, float] = {}
        for (known, held), value in self.values.items():
            if known == name:
                key = dict(held).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums


def summed(samples: Iterable[Sample]) -> Sample:
    """Return several processes' metrics as one."""
    values: dict[tuple[str, Labels], float] = {}
    for sample in samples:
        for key, value in sample.values.items():
            values[key] = values.get(key, 0.0) + value
    return Sample(0.0, values)


def scrape_all(urls: Sequence[str]) -> list[Sample]:
    """Ask each address once, several at a time; one that does not answer has its `trouble`."""
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        return list(pool.map(scrape, urls))


def scrape(url: str) -> Sample:
    """Return what a metrics page says now; an empty address has none."""
    if not url:
        return Sample(trouble="no metrics")
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:
            text = answer.read(MAX_BYTES).decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Sample(trouble=f"no metrics: {getattr(error, 'reason', error)}")
    values = {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}
    return Sample(time.monotonic(), values)
