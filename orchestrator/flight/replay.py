"""Runs a record through the real machine: does it do the same again? `python -m orchestrator.flight.replay FILE`.

What the committer answered is taken from the record, so that no tokenizer is needed, nor any text.
"""

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.events import Outcome
from orchestrator.flight.encoding import (
    event_from_json,
    outcome_from_json,
    part_to_json,
    state_from_json,
    state_to_json,
)
from orchestrator.flight.recorder import state_of
from orchestrator.rounds import Rounds
from outrider.errors import InvalidRequest, OutriderError
from outrider.ids import TokenKind
from outrider.messages import TokenLogprobs

FORMAT = 1
"""Of a record; another one is refused."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a record."""

    num_events: int
    """Run so far."""
    num_commands: int
    """That were as recorded."""
    difference: str = ""
    """The first that was not, in words; empty: there is none."""


class _Answers:
    """A committer that answers what it answered before."""

    def __init__(self) -> None:
        self.left: deque[Outcome] = deque()

    def take(
        self, start: int, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs]
    ) -> Outcome:
        if not self.left:
            raise LookupError(f"{len(token_ids)} tokens at {start} were never committed")
        return self.left.popleft()


def load(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        InvalidRequest: the file cannot be read, or is no record of this format.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest("file", str(path), f"a record that can be read ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InvalidRequest("file", str(path), f"a record of format {FORMAT}")
    return record


def replay(record: dict[str, Any]) -> Replayed:
    """Run a record, up to the first difference.

    Raises:
        InvalidRequest: it holds what this version does not know.
    """
    try:
        return _replay(record["segments"], tokens=bool(record["tokens"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest("file", "a record", f"what this version writes ({error})") from error


def _replay(segments: list[dict[str, Any]], *, tokens: bool) -> Replayed:
    num_events = num_commands = 0
    state: dict[str, Any] | None = None
    for segment in segments:
        if state is not None and state != segment["state"]:
            return Replayed(num_events, num_commands, _states(state, segment["state"]))
        rounds, answers = _machine(segment["state"])
        for entry in segment["entries"]:
            num_events += 1
            found, said = _step(rounds, answers, entry, tokens=tokens), entry["commands"]
            same = _same(found, said)
            num_commands += same
            if same < max(len(found), len(said)):
                where = f"event {num_events} ({entry['event']['is']}, at {entry['at_s']} s), command {same + 1}"
                return Replayed(num_events, num_commands, f"{where}: {_at(found, same)}, recorded: {_at(said, same)}")
        state = state_to_json(state_of(rounds), tokens=tokens)
    return Replayed(num_events, num_commands)


def _machine(value: dict[str, Any]) -> tuple[Rounds, _Answers]:
    """Return a machine in a recorded state."""
    state, answers = state_from_json(value), _Answers()
    rounds = Rounds(state["plan"], answers)
    for name, held in state.items():
        setattr(rounds, name, held)
    return rounds, answers


def _step(rounds: Rounds, answers: _Answers, entry: dict[str, Any], *, tokens: bool) -> list[dict[str, Any]]:
    """Give the machine a recorded event; return what it answers, or what it raises."""
    answers.left = deque(map(outcome_from_json, entry["outcomes"]))
    event = event_from_json(entry["event"])
    try:
        commands = rounds.step(event)
    except (OutriderError, LookupError) as error:
        return [] if repr(error) == entry["error"] else [{"is": repr(error)}]
    found = [part_to_json(command, tokens=tokens) for command in commands]
    if answers.left:
        found.append({"is": f"{len(answers.left)} runs are left that were committed"})
    return found


def _same(found: list[dict[str, Any]], said: list[dict[str, Any]]) -> int:
    """Return how many commands agree, from the first on."""
    pairs = list(zip(found, said, strict=False))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))


def _at(commands: list[dict[str, Any]], number: int) -> str:
    return json.dumps(commands[number]) if number < len(commands) else "nothing"


def _states(found: dict[str, Any], said: dict[str, Any]) -> str:
    name = next(name for name in said if found.get(name) != said[name])
    return f"the state behind it, {name}: {json.dumps(found.get(name))}, recorded: {json.dumps(said[name])}"


def main(arguments: Sequence[str]) -> int:
    """Run the records of these files; return 0 if all came out the same, 1 if one did not, 2 if one cannot be run."""
    status = 0
    for name in arguments:
        try:
            record = load(Path(name))
            replayed = replay(record)
        except InvalidRequest as error:
            print(f"error: {error.message}", file=sys.stderr)
            return 2
        what = f"{record.get('session', '')} ({record.get('outcome', '')})"
        print(f"{what}: {replayed.num_events} events, {replayed.num_commands} commands as recorded")
        if replayed.difference:
            print(f"differs: {replayed.difference}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
