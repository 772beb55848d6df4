"""Whether loading KV is worth it: both ways are measured as they are used. Pure; seconds come in from outside."""

from dataclasses import dataclass

WEIGHT = 0.3
"""Of the latest measurement in a moving average."""


@dataclass(slots=True)
class Speeds:
    """Seconds per block by either way."""

    prefill_s: float
    """Of computing 64 tokens in prompt passes."""
    load_s: float | None = None
    """Of loading a block; None: not known yet."""
    probe_every_s: float = 30.0
    """How often a tier that was found slower is tried again, with one block."""
    _probed_s: float = float("-inf")

    def prefilled(self, num_passes: int, seconds: float) -> None:
        """Note how long some prompt passes took, at least one."""
        self.prefill_s += WEIGHT * (seconds / num_passes - self.prefill_s)

    def loaded(self, num_blocks: int, seconds: float) -> None:
        """Note how long loading took; of nothing at all: that it took so long and more."""
        latest = seconds / max(1, num_blocks)
        self.load_s = latest if self.load_s is None else self.load_s + WEIGHT * (latest - self.load_s)

    def plan(self, num_blocks: int, now_s: float) -> int:
        """Return how many of so many wanted blocks to load: all, none, or one to find out."""
        if self.load_s is not None and self.load_s < self.prefill_s:
            return num_blocks
        if self.load_s is None or now_s - self._probed_s >= self.probe_every_s:
            self._probed_s = now_s
            return min(1, num_blocks)
        return 0

    def patience_s(self, num_blocks: int, most_s: float) -> float:
        """Return how long a session waits for blocks: no longer than computing them would take, or `most_s`."""
        return min(most_s, num_blocks * self.prefill_s)
