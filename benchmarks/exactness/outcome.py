"""What a part of the exactness run found."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Counts of one part; it passed if nothing is in `mismatches`."""

    part: str
    num_checked: int = 0
    num_equal: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    """Tokens by origin and the like, which show that the check was not an empty one."""
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(equal, checked) of every setting."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know, such as texts that part where the target is undecided."""
    mismatches: list[str] = field(default_factory=list)
    """One line each, enough to repeat it."""

    @property
    def passed(self) -> bool:
        """Whether the promise held everywhere."""
        return not self.mismatches and self.num_checked > 0

    def check(self, equal: bool, *groups: str) -> None:
        """Count one comparison, in all its groups."""
        self.num_checked += 1
        self.num_equal += equal
        for group in groups:
            before = self.groups.get(group, (0, 0))
            self.groups[group] = (before[0] + equal, before[1] + 1)

    def count(self, name: str, amount: int) -> None:
        """Add to a counter."""
        self.counts[name] = self.counts.get(name, 0) + amount
