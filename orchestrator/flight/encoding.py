"""A record as JSON and back: what the machine saw and said, by default without a token or a word of the client's.

Without tokens every id is written as 0, and text and log-probabilities are left out. That changes nothing that the
machine decides: it never looks at an id. What is left are lengths, kinds, epochs, workers' names and errors.
"""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter

from orchestrator.events import Command, Event, Fail, Failed, Outcome
from orchestrator.flight.recorder import NOT_STATE, Entry, Segment
from orchestrator.rounds import Rounds
from outrider.errors import Internal, OutriderError, class_of
from outrider.redaction import redacted
from outrider.store import errors as store_errors

IDS = frozenset({"token_ids", "tokens"})
"""Names of fields that hold token ids."""
CONTENTS: Mapping[str, Any] = {"text": "", "matched": "", "logprobs": []}
"""Names of fields that hold what a client was told, and what is written instead."""
KINDS: Mapping[str, type] = {each.__name__: each for each in (*get_args(Event), *get_args(Command))}
STORE_ERRORS = store_errors.Fenced
"""Imported so that the store's errors are known by their reasons."""


def segment_to_json(segment: Segment, *, tokens: bool) -> dict[str, Any]:
    """Return a segment as JSON values; `tokens` says whether ids and text are in it."""
    return {
        "state": state_to_json(segment.state, tokens=tokens),
        "entries": [entry_to_json(entry, tokens=tokens) for entry in segment.entries],
    }


def state_to_json(state: Mapping[str, Any], *, tokens: bool) -> dict[str, Any]:
    """Return the machine's state as JSON values."""
    adapters = _state_adapters()
    found = {name: adapters[name].dump_python(value) for name, value in state.items()}
    return {name: _value(name, held, tokens=tokens) for name, held in found.items()}


def state_from_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Read the machine's state.

    Raises:
        ValueError: a field is missing, unknown, or holds what it cannot.
    """
    adapters = _state_adapters()
    if adapters.keys() != value.keys():
        raise ValueError(f"the state's fields differ from this version's: {sorted(adapters.keys() ^ value.keys())}")
    return {name: adapter.validate_python(value[name]) for name, adapter in adapters.items()}


def entry_to_json(entry: Entry, *, tokens: bool) -> dict[str, Any]:
    """Return a step as JSON values."""
    return {
        "at_s": round(entry.at_s, 6),
        "event": part_to_json(entry.event, tokens=tokens),
        "outcomes": [_dumped(outcome, tokens=tokens) for outcome in entry.outcomes],
        "commands": [part_to_json(command, tokens=tokens) for command in entry.commands],
        "error": redacted(entry.error),
    }


def part_to_json(part: Event | Command, *, tokens: bool) -> dict[str, Any]:
    """Return an event or a command as JSON values, under the name of its class."""
    if isinstance(part, Failed | Fail):
        error = part.error
        return {"is": type(part).__name__, "reason": error.reason, "message": redacted(error.message)}
    return {"is": type(part).__name__, **_dumped(part, tokens=tokens)}


def event_from_json(value: Mapping[str, Any]) -> Event:
    """Read an event.

    Raises:
        ValueError: there is no such event, or it holds what it cannot.
    """
    kind = KINDS.get(str(value.get("is")))
    if kind is None or kind not in get_args(Event):
        raise ValueError(f"no event is called {value.get('is')!r}")
    if kind is Failed:
        return Failed(_error(str(value.get("reason")), str(value.get("message"))))
    event: Event = _adapter(kind).validate_python({name: held for name, held in value.items() if name != "is"})
    return event


def outcome_from_json(value: Mapping[str, Any]) -> Outcome:
    """Read what the committer answered.

    Raises:
        ValueError: it holds what it cannot.
    """
    outcome: Outcome = _adapter(Outcome).validate_python(value)
    return outcome


def _error(reason: str, message: str) -> OutriderError:
    return (class_of(reason) or Internal).rebuild(message, {})


def _dumped(part: Any, *, tokens: bool) -> dict[str, Any]:
    kind: Any = type(part)
    found: dict[str, Any] = _plain(_adapter(kind).dump_python(part), tokens=tokens)
    return found


def _plain(value: Any, *, tokens: bool) -> Any:
    """Return a value in JSON's own terms, sets in order."""
    match value:
        case dict():
            return {name: _value(name, held, tokens=tokens) for name, held in value.items()}
        case set() | frozenset():
            return sorted(value)
        case list() | tuple() | deque():
            return [_plain(each, tokens=tokens) for each in value]
        case Enum():
            return value.value
        case _:
            return value


def _value(name: str, value: Any, *, tokens: bool) -> Any:
    """Return the value of a field, blank if it is what a client wrote or was told."""
    if not tokens and name in IDS:
        return [0] * len(value)
    return CONTENTS[name] if not tokens and name in CONTENTS else _plain(value, tokens=tokens)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _state_adapters() -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(Rounds)
    return {name: TypeAdapter(hint) for name, hint in hints.items() if name != NOT_STATE}
