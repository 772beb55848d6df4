"""Checks of what arrives: each returns the value it was given, or raises an error that names the field.

The same checks serve two kinds of sender, who get different errors: a client is told which field is wrong
(`InvalidRequest`), a peer's message is dropped and counted (`ProtocolError`).
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from outrider.errors import InvalidRequest, OutriderError, ProtocolError

MAX_INT = 2**31 - 1
"""Largest token id, position or count."""
MAX_SESSION_TOKENS = 1 << 22
"""Most ids in one list of a session's tokens."""
MAX_NAME_CHARS = 256
"""Most characters of a name: of a model, a worker, an address, a kind of drafter, a label."""
MAX_TEXT_CHARS = 4096
"""Most characters of a sentence, a fingerprint, or an attribute's value."""
MAX_SESSION_CHARS = 128
"""Most characters of a session's name."""
MAX_GAMMA = 256
"""Most tokens of one proposal."""
MAX_WINDOW = 1024
"""Most tokens a chain may be ahead."""
MAX_PREDICTION_TOKENS = 1 << 15
"""Most tokens of a client's prediction."""
MAX_DRAFTERS = 16
"""Most kinds of drafters of one worker."""
MAX_PRIORITY = 8
"""Highest priority of a request; the lowest is as far below 0."""
MAX_LOGPROBS = 128
"""Most log-probabilities per token."""

_SESSION = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_SESSION_CHARS}}}")

_IntEnum = TypeVar("_IntEnum", bound=IntEnum)


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks that blame one kind of sender."""

    fault: Callable[[str, object, str], OutriderError]
    """Makes the error from field, value and allowed range."""

    def integer(self, field: str, value: int, low: int = 0, high: int = MAX_INT) -> int:
        """Return `value` if it is in low .. high."""
        if not low <= value <= high:
            raise self.fault(field, value, f"an integer in {low} .. {high}")
        return value

    def number(self, field: str, value: float, low: float = -math.inf, high: float = math.inf) -> float:
        """Return `value` if it is finite and in low .. high."""
        if not math.isfinite(value) or not low <= value <= high:
            raise self.fault(field, value, _interval(low, high))
        return value

    def count(self, field: str, items: Sequence[object], low: int, high: int) -> None:
        """Require low .. high items."""
        if not low <= len(items) <= high:
            raise self.fault(field, f"{len(items)} entries", f"{low} .. {high} entries")

    def ids(self, field: str, values: Sequence[int], low: int = 0, high: int = MAX_SESSION_TOKENS) -> tuple[int, ...]:
        """Return the token ids as a tuple if there are low .. high of them, each in 0 .. 2^31 - 1."""
        self.count(field, values, low, high)
        if values and (min(values) < 0 or max(values) > MAX_INT):
            index = next(i for i, value in enumerate(values) if not 0 <= value <= MAX_INT)
            raise self.fault(f"{field}[{index}]", values[index], f"a token id in 0 .. {MAX_INT}")
        return tuple(values)

    def name(self, field: str, value: str) -> str:
        """Return `value` if it is not empty, and no longer than a name."""
        if not 1 <= len(value) <= MAX_NAME_CHARS:
            shown = value if len(value) <= MAX_NAME_CHARS else f"{len(value)} characters"
            raise self.fault(field, shown, f"1 .. {MAX_NAME_CHARS} characters")
        return value

    def text(self, field: str, value: str, high: int = MAX_NAME_CHARS) -> str:
        """Return `value` if it has at most `high` characters; it may be empty."""
        if len(value) > high:
            raise self.fault(field, f"{len(value)} characters", f"at most {high} characters")
        return value

    def session(self, field: str, value: str) -> str:
        """Return `value` if it can be a session's name: such as this side makes, and safe in keys, paths and logs."""
        if not _SESSION.fullmatch(value):
            allowed = f"1 .. {MAX_SESSION_CHARS} letters, digits and - _ . : from the session's started event"
            raise self.fault(field, value, allowed)
        return value

    def enum(self, field: str, value: int, kind: type[_IntEnum]) -> _IntEnum:
        """Return the member of `kind` with this number; unspecified and unknown numbers are refused."""
        try:
            return kind(value)
        except ValueError:
            allowed = ", ".join(f"{member.name} ({member.value})" for member in kind)
            raise self.fault(field, value, f"one of {allowed}") from None

    def require(self, condition: bool, field: str, value: object, allowed: str) -> None:
        """Require a condition that is particular to one field."""
        if not condition:
            raise self.fault(field, value, allowed)

    def seconds(self, field: str, value: Duration) -> float:
        """Return a duration in seconds if it is not negative and its nanoseconds are normal."""
        result = value.seconds + value.nanos / 1e9
        if value.seconds < 0 or not 0 <= value.nanos < 10**9:
            raise self.fault(field, result, "a duration >= 0")
        return result


def _protocol_error(field: str, value: object, allowed: str) -> ProtocolError:
    """Describe a peer's bad field, shortened like a client's."""
    return ProtocolError(InvalidRequest(field, value, allowed).message)


CLIENT = Checks(InvalidRequest)
"""For what clients send: raises `InvalidRequest`."""
PEER = Checks(_protocol_error)
"""For what peer services send: raises `ProtocolError`."""


def duration(seconds: float) -> Duration:
    """Turn finite seconds into a duration, rounded to nanoseconds.

    A difference of measured times may come out slightly below 0; it is sent as 0, which every receiver accepts.
    """
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def _interval(low: float, high: float) -> str:
    """Write an interval of finite numbers for people."""
    if math.isinf(low) and math.isinf(high):
        return "a finite number"
    if math.isinf(high):
        return f"a finite number >= {low:g}"
    return f"a number in {low:g} .. {high:g}"
