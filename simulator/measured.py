"""Reads what was measured: a calibration in JSON, by itself or in a file that a benchmark wrote."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outrider.errors import InvalidRequest
from simulator.costs import Costs, step_cost

ByRows = dict[int, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a cluster's times, in milliseconds; None: not measured."""

    verify_ms: ByRows | None = None
    """A pass of the target, by rows."""
    draft_ms: ByRows | None = None
    """A token step of the draft, by sessions."""
    round_trip_ms: float | None = None
    """Between draft worker and verifier, everything included."""
    zone_trip_ms: float | None = None
    """What a round trip to another zone takes longer."""
    prompt_ms: float | None = None
    """A pass of the target over 64 tokens of a prompt."""
    draft_prompt_ms: float | None = None
    store_ms: float | None = None
    """An append to the session log."""
    verdict_ms: float | None = None
    """What a verifier needs for each verdict beside the pass."""
    proposal_ms: float | None = None
    """What a draft worker needs for each proposal beside its token steps."""
    message_ms: float | None = None
    """What an orchestrator needs for each verdict."""
    alpha: tuple[float, ...] | None = None

    def over(self, other: "Measured") -> "Measured":
        """Return this, with what it does not know taken from another."""
        chosen = {each.name: getattr(self, each.name) for each in fields(self)}
        return Measured(**{
            name: getattr(other, name) if value is None else value for name, value in chosen.items()
        })  # fmt: skip

    def costs(self, max_rows: int) -> Costs:
        """Return the costs of a simulation; everything is known by now.

        Args:
            max_rows: rows of the widest pass of the target, unless times of more are known.

        Raises:
            InvalidRequest: a time is out of its range.
        """
        known = self.over(DEFAULTS)
        assert known.verify_ms is not None
        assert known.draft_ms is not None
        for name in ("round_trip_ms", "zone_trip_ms", "prompt_ms", "draft_prompt_ms", "store_ms", "verdict_ms",
                     "proposal_ms", "message_ms"):  # fmt: skip
            _require_time(name, getattr(known, name))
        return Costs(
            verify=step_cost("verify_ms", known.verify_ms, max_rows),
            draft=step_cost("draft_ms", known.draft_ms, max_rows),
            verify_prompt_s=_seconds(known.prompt_ms),
            draft_prompt_s=_seconds(known.draft_prompt_ms),
            hop_s=_seconds(known.round_trip_ms) / 2,
            zone_hop_s=_seconds(known.zone_trip_ms) / 2,
            store_s=_seconds(known.store_ms),
            verdict_s=_seconds(known.verdict_ms),
            proposal_s=_seconds(known.proposal_ms),
            message_s=_seconds(known.message_ms),
        )


DEFAULTS = Measured({1: 30.0}, {1: 2.0}, 1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, (0.7,))
MOST_TRIP_MS = 60_000.0


def by_rows(name: str, text: str) -> ByRows:
    """Read "30", or "1:30,32:34".

    Raises:
        InvalidRequest: it is neither.
    """
    try:
        if ":" not in text:
            return {1: float(text)}
        pairs = (part.split(":") for part in text.split(",") if part.strip())
        return {int(rows): float(ms) for rows, ms in pairs}
    except ValueError as error:
        raise InvalidRequest(name, text, "milliseconds, or rows:milliseconds, comma-separated") from error


def alphas(text: str) -> tuple[float, ...]:
    """Read rates of acceptance, comma-separated.

    Raises:
        InvalidRequest: one is no number; ranges are checked later.
    """
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InvalidRequest("alpha", text, "rates from 0 to 1, comma-separated") from error


def read(path: Path, arm: str = "") -> Measured:
    """Read a calibration.

    A file is an object with the names of `Measured`, or has one under "calibration", or is one of
    `benchmarks.one_session` with "arms", of which one is chosen by its setting.

    Args:
        path: of the file.
        arm: setting of the sequential arm to take, where there are arms; empty: the first.

    Raises:
        InvalidRequest: it cannot be read, or says what cannot be used.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest("measured", str(path), f"a JSON file that can be read ({error})") from error
    if not isinstance(data, dict):
        raise InvalidRequest("measured", str(path), "a JSON object")
    if "arms" in data and "calibration" not in data:
        return _of_arms(path, data["arms"], arm)
    return _of_object(path, data.get("calibration", data))


def _of_arms(path: Path, arms: Any, setting: str) -> Measured:
    if not isinstance(arms, list) or not all(isinstance(each, dict) for each in arms):
        raise InvalidRequest("measured", type(arms).__name__, f"a list of objects under arms in {path.name}")
    found = [each for each in arms if each.get("arm") == "sequential" and setting in ("", each.get("setting"))]
    if not found:
        known = sorted({str(each.get("setting")) for each in arms})
        raise InvalidRequest("arm", setting, f"the setting of a sequential arm in {path.name}: {', '.join(known)}")
    names = {"pass_ms": "verify_ms", "draft_ms": "draft_ms", "trip_ms": "round_trip_ms", "alpha": "alpha"}
    missing = [name for name in names if name not in found[0]]
    if missing:
        raise InvalidRequest("measured", f"an arm without {missing[0]}", f"arms with {', '.join(names)} in {path.name}")
    return Measured(**{known: _value(known, found[0][name]) for name, known in names.items()})


def _of_object(path: Path, data: Any) -> Measured:
    names = {each.name for each in fields(Measured)}
    unknown = sorted(set(data) - names) if isinstance(data, dict) else ["no object"]
    if unknown:
        raise InvalidRequest("measured", unknown[0], f"one of {', '.join(sorted(names))} in {path.name}")
    return Measured(**{name: _value(name, value) for name, value in data.items()})


def _value(name: str, value: Any) -> Any:
    try:
        if name == "alpha":
            return tuple(map(float, value)) if isinstance(value, list) else (float(value),)
        if name in ("verify_ms", "draft_ms"):
            table: Mapping[Any, Any] = value if isinstance(value, dict) else {1: value}
            return {int(rows): float(ms) for rows, ms in table.items()}
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(name, str(value), "a number, or numbers by rows") from error


def _require_time(name: str, ms: float) -> None:
    if not 0.0 <= ms <= MOST_TRIP_MS:
        raise InvalidRequest(name, ms, f"0 to {MOST_TRIP_MS:g} ms")


def _seconds(ms: float | None) -> float:
    return (ms or 0.0) / 1000.0
