"""The sessions of this process that share a verifier's passes, and how its rows are divided between them. Pure.

Every session joins with what it has measured, which the division reads anew a few times a second. It changes only where
another one promises more by a margin, so that noise moves nothing.
It sees rates and times only, never tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from outrider.ahead import Claim, divide_rows

MIN_LOAD = 2.0
"""Sessions in a pass from which on they are neighbours."""
DIVIDE_S = 0.25
"""Least time between two divisions."""
GAIN = 1.04
"""What a division that drafts must promise of plain decoding's tokens before rows are given."""
KEEP = 1.01
"""What it must still promise for rows to stay given."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Member:
    """One session."""

    alpha: float = 0.6
    undrafted: float = 0.0
    most: int = 1
    """Most rows of a pass that it could use; 1: it has no drafter, or a plan of its own."""
    rows: int = 1
    """Rows of a pass that are given to it."""
    drafted: bool = False
    """Whether it is drafted for at present, if only on trial."""


class Company:
    """The members, and the division."""

    def __init__(self) -> None:
        """Have no members."""
        self._members: WeakKeyDictionary[Member, None] = WeakKeyDictionary()
        self._divided_s = -DIVIDE_S
        self.gain = 1.0
        """Tokens per second of all, in those of plain decoding, that the last division promised."""
        self.drafts = False
        """Whether it gave anybody more than the first row."""

    def __len__(self) -> int:
        return len(self._members)

    def join(self) -> Member:
        """Add a member."""
        member = Member()
        self._members[member] = None
        return member

    def claim(self, member: Member, most: int) -> None:
        """Let a member have up to so many rows; one that has not claimed any is not kept waiting for a division."""
        if member.most == 1 < most:
            self._divided_s = -DIVIDE_S
        member.most = most

    def leave(self, member: Member) -> None:
        """Take a member out; idempotent."""
        self._members.pop(member, None)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to divide again; `now_s` is of a clock that all members share."""
        return now_s - self._divided_s >= DIVIDE_S

    @property
    def members(self) -> tuple[Member, ...]:
        """All sessions."""
        return tuple(self._members)

    @property
    def num_drafted(self) -> int:
        """Members that are drafted for."""
        return sum(member.drafted for member in self.members)

    def divide(
        self,
        num_sessions: int,
        pass_s: Callable[[int], float],
        now_s: float,
        per_draft_s: float = 0.0,
        plain_s: float | None = None,
    ) -> None:
        """Divide the rows again.

        Args:
            num_sessions: in a pass, others' than this process's included.
            pass_s: seconds from pass to pass by rows, without `per_draft_s`.
            now_s: of a clock that all members share.
            per_draft_s: what each that is drafted for adds.
            plain_s: seconds from pass to pass where nobody is drafted for; None: by `pass_s`.
        """
        self._divided_s = now_s
        members = [member for member in self.members if member.most > 1]
        claims = [Claim(member.alpha, member.undrafted, member.most) for member in members]
        division = divide_rows(claims, max(0, num_sessions - len(members)), pass_s, per_draft_s, plain_s)
        kept = any(member.rows > 1 for member in members)
        self.gain = division.gain
        given = division.rows if division.gain >= (KEEP if kept else GAIN) else (1,) * len(members)
        self.drafts = any(rows > 1 for rows in given)
        for member, rows in zip(members, given, strict=True):
            member.rows = rows
