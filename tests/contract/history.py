"""What owners did to a session's log, call by call, and whether one log can explain all of it.

Every appended token is different, so that each one that is ever seen tells which call wrote it. Under that, the log is
linearizable exactly if the rules of `violations` hold, and they can be checked call by call.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["open", "done", "refused", "unknown"]


@dataclass(slots=True)
class Call:
    """One call, from its invocation to its answer; moments are numbers in the order in which things happened."""

    kind: Literal["acquire", "append", "read"]
    began: int
    fence: int = 0
    """Of the append; given by the acquisition."""
    start: int = 0
    token_ids: tuple[int, ...] = ()
    """Appended, or read."""
    length: int = 0
    """What an append answered."""
    ended: int = 0
    outcome: Outcome = "open"
    """Unknown: no answer came, so that it may have happened, even later. A refusal may be that of a repeat, too."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class History:
    """All calls on one session."""

    calls: list[Call] = field(default_factory=list)
    _clock: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def begin(self, kind: Literal["acquire", "append", "read"], **what: int | tuple[int, ...]) -> Call:
        """Note an invocation."""
        call = Call(kind, next(self._clock), **what)  # type: ignore[arg-type]
        self.calls.append(call)
        return call

    def end(self, call: Call, outcome: Outcome) -> None:
        """Note an answer."""
        call.ended, call.outcome = next(self._clock), outcome

    def done(self, kind: str) -> list[Call]:
        """Return the calls of a kind that were confirmed, in the order of their answers."""
        found = [call for call in self.calls if call.kind == kind and call.outcome == "done"]
        return sorted(found, key=lambda call: call.ended)


def violations(history: History, final: Sequence[int]) -> list[str]:
    """Return what no log that ends as `final` explains; empty if there is one that does."""
    return [
        *_broken_grants(history.done("acquire")),
        *_broken_appends(history, final),
        *_broken_reads(history, final),
        *_broken_order(history, final),
    ]


def _broken_grants(grants: Sequence[Call]) -> list[str]:
    """Every owner has a number of its own, and one that asked later has a higher one."""
    numbers = [grant.fence for grant in grants]
    found = [f"fence {number} was given twice" for number in numbers if numbers.count(number) > 1]
    for one, other in itertools.permutations(grants, 2):
        if one.ended < other.began and one.fence >= other.fence:
            found.append(f"fence {other.fence} was given after {one.fence}")
    return found


def _broken_appends(history: History, final: Sequence[int]) -> list[str]:
    """What was confirmed stays where it was put; nobody writes when another has been given a newer lease."""
    found, grants = [], history.done("acquire")
    for append in history.done("append"):
        if tuple(final[append.start : append.end]) != append.token_ids:
            found.append(f"confirmed tokens of {append} are not in the log")
        if not append.end <= append.length <= len(final):
            found.append(f"a wrong length was confirmed: {append}")
        if any(grant.ended < append.began and grant.fence > append.fence for grant in grants):
            found.append(f"a stale owner was confirmed: {append}")
    return found


def _broken_reads(history: History, final: Sequence[int]) -> list[str]:
    """Every read is a beginning of the log, and holds what was confirmed or read before it began."""
    found, known = [], [(each.ended, each.end) for each in (*history.done("append"), *history.done("read"))]
    for read in history.done("read"):
        if tuple(final[: len(read.token_ids)]) != read.token_ids:
            found.append(f"a read is not what the log became: {read}")
        if any(ended < read.began and end > read.end for ended, end in known):
            found.append(f"a read lacks what was known before: {read}")
    return found


def _broken_order(history: History, final: Sequence[int]) -> list[str]:
    """Every token was put where it is by a call that was not stale then, and was seen by nobody before that call."""
    writers = {token: call for call in history.calls if call.kind == "append" for token in call.token_ids}
    grants = history.done("acquire")
    found = []
    newest = 0
    for position, token in enumerate(final):
        call = writers.get(token)
        if call is None:
            found.append(f"nobody wrote token {token} at {position}")
            continue
        if call.start + call.token_ids.index(token) != position:
            found.append(f"token {token} is at {position}, and not where {call} put it")
        if call.fence < newest or any(g.ended < call.began and g.fence > call.fence for g in grants):
            found.append(f"fence {call.fence} wrote token {token} after a newer lease")
        newest = max(newest, call.fence)
    early = [
        read
        for read in history.done("read")
        if any(writers[token].began > read.ended for token in read.token_ids if token in writers)
    ]
    return found + [f"a token was read before it was written: {read}" for read in early]
