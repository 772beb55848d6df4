"""The flight recorder: what is recorded can be run again, says the same, and gives no client's words away."""

import gc
import json
import stat
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.events import (
    Cancelled,
    Command,
    DrafterChosen,
    DrafterLost,
    Event,
    Failed,
    Logged,
    Outcome,
    Started,
    Taken,
    Tuned,
    VerdictArrived,
    VerifierChosen,
    VerifierLost,
)
from orchestrator.flight.keeping import MAX_ENDED, Flights, FlightSettings
from orchestrator.flight.recorder import Recorder
from orchestrator.flight.replay import load, main, replay
from orchestrator.rounds import Plan, Rounds
from outrider.cli.app import app
from outrider.errors import InvalidRequest, LeaseLost, OutriderError, ProtocolError, StoreUnavailable
from outrider.generation import Chunk
from outrider.ids import Epoch, FinishReason, Generation, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import Speculation, TokenLogprobs, Verdict

FIRST_ID = 700_000
"""Ids from here on are found in a file if they are in it."""
SECRET = "the words of a client"
PROMPT = tuple(range(FIRST_ID, FIRST_ID + 4))
ON = Speculation(2, 2, 4)
VERIFIER, SPARE, WORKER, OTHER = WorkerId("v1"), WorkerId("v2"), WorkerId("d1"), WorkerId("d2")
FENCE = 3


class Words:
    """A committer that gives out text, up to a length."""

    def take(
        self, start: int, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs]
    ) -> Outcome:
        kept = min(len(token_ids), 40 - start)
        chunk = Chunk(start, tuple(token_ids[:kept]), SECRET, tuple(kinds[:kept]), tuple(logprobs[:kept]))
        return Outcome(chunk, FinishReason.LENGTH if start + kept == 40 else None, SECRET)


def verdict(start: int, num_tokens: int, round_: int, generation: Generation) -> VerdictArrived:
    epoch = Epoch(generation, round_)
    token_ids = tuple(range(FIRST_ID + start, FIRST_ID + start + num_tokens))
    kinds = (*[TokenKind.ACCEPTED] * (num_tokens - 1), TokenKind.RECOVERED)
    logprobs = tuple(TokenLogprobs(float("-inf"), ((FIRST_ID, -0.25),)) for _ in token_ids)
    said = Verdict(
        SessionId("s"),
        epoch,
        start,
        token_ids,
        kinds,
        num_tokens - 1,
        num_tokens,
        epoch.next_round(),
        logprobs=logprobs,
    )
    return VerdictArrived(Generation(FENCE, 1), said)


def files(folder: Path) -> list[Path]:
    return list(folder.glob("*.json"))


def eventful() -> list[Event]:
    """A generation with commits, a policy, a lost drafter, another one, and a lost verifier."""
    first, third = Generation(FENCE, 1), Generation(FENCE, 3)
    events: list[Event] = [Started(VERIFIER, WORKER)]
    for round_, start in enumerate(range(4, 16, 3)):
        events += [verdict(start, 3, round_, first), Logged(start + 3), Taken(start + 3)]
    events += [
        Tuned(Speculation(3, 2, 6), 0.5),
        DrafterLost(first, "slow"),
        verdict(10, 3, 1, first),  # late
        DrafterChosen(OTHER),
        verdict(16, 2, 0, third),
        VerifierLost(first, "gone"),
        VerifierChosen(SPARE),
        Logged(18),
    ]
    return events


def flown(settings: FlightSettings | None = None, events: Sequence[Event] = ()) -> tuple[Flights, Any, list[Command]]:
    """Run a machine with a record of it."""
    flights = Flights(settings)
    flight = flights.begin(SessionId("s"), FENCE, Words())
    classes = (TokenClass.PROMPT,) * len(PROMPT)
    rounds = Rounds(Plan(FENCE, PROMPT, classes, 40, Tuned(ON, 1.0)), flight.recorder)
    said = [command for event in events or eventful() for command in flight.recorder.step(rounds, event)]
    return flights, flight, said


async def written(folder: Path, events: Sequence[Event] = (), **settings: Any) -> dict[str, Any]:
    flights, flight, _ = flown(FlightSettings(folder=str(folder), **settings), events)
    await flights.end(flight, "store_unavailable", StoreUnavailable("away"))
    (path,) = files(folder)
    return load(path)


@pytest.mark.parametrize("tokens", [False, True], ids=["blank", "with_tokens"])
async def test_a_record_run_again_says_the_same(tmp_path: Path, tokens: bool) -> None:
    record = await written(tmp_path, tokens=tokens)
    replayed = replay(record)
    assert (replayed.difference, replayed.num_events) == ("", len(eventful()))
    assert replayed.num_commands == len(flown()[2])
    kinds = {
        command["is"] for segment in record["segments"] for each in segment["entries"] for command in each["commands"]
    }
    assert {"OpenVerifier", "OpenDrafter", "TellDrafter", "AppendLog", "Emit", "ChooseVerifier", "Count"} <= kinds


async def test_no_id_and_no_word_is_in_a_record_unless_it_is_wanted(tmp_path: Path) -> None:
    blank = json.dumps(await written(tmp_path / "blank"))
    full = json.dumps(await written(tmp_path / "full", tokens=True))
    assert SECRET in full
    assert f"{FIRST_ID + 17}" in full
    assert SECRET not in blank
    assert str(FIRST_ID)[:3] not in blank.replace(".700", "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entries: entries[1]["event"]["verdict"].update(start=9), "event 2 (VerdictArrived"),
        (lambda entries: entries[2]["event"].update(length=5), "event 3 (Logged"),
        (lambda entries: entries.pop(4), "event 5"),
        (lambda entries: entries[0]["event"].update(drafter_id="d9"), "event 1 (Started"),
        (lambda entries: entries[1]["commands"].pop(), "command 2"),
        (lambda entries: entries[1]["outcomes"].clear(), "never committed"),
    ],
    ids=["another_start", "another_length", "one_is_missing", "another_drafter", "a_command_less", "no_outcome"],
)
async def test_a_changed_record_is_noticed_at_the_first_difference(tmp_path: Path, change: Any, says: str) -> None:
    record = await written(tmp_path)
    change(record["segments"][0]["entries"])
    assert says in replay(record).difference


async def test_a_full_ring_forgets_the_beginning_and_can_still_be_run(tmp_path: Path) -> None:
    record = await written(tmp_path, num_events=8)
    assert not record["from_the_beginning"]
    assert [len(segment["entries"]) for segment in record["segments"]] == [4, len(eventful()) % 4]
    assert replay(record).difference == ""
    record["segments"][1]["state"]["logged_len"] += 1
    assert "the state behind it, logged_len" in replay(record).difference


async def test_what_a_step_raises_is_part_of_the_record(tmp_path: Path) -> None:
    flights, flight, _ = flown(FlightSettings(folder=str(tmp_path)), [Started(VERIFIER, None)])
    rounds = Rounds(Plan(FENCE, PROMPT, (TokenClass.PROMPT,) * 4, 40, Tuned(ON, 1.0)), flight.recorder)
    recorder = Recorder(Words(), 8, lambda: 1.0)
    recorder.step(rounds, Started(VERIFIER, None))
    with pytest.raises(ProtocolError):
        recorder.step(rounds, Started(VERIFIER, None))
    flight.recorder = recorder
    await flights.end(flight, "internal", ProtocolError("twice"))
    (path,) = files(tmp_path)
    record = load(path)
    assert "Started twice" in record["segments"][0]["entries"][1]["error"]
    assert replay(record).difference == ""


async def test_errors_come_back_as_what_they_were(tmp_path: Path) -> None:
    record = await written(tmp_path, [Started(VERIFIER, WORKER), Failed(StoreUnavailable("no answer in 5 s"))])
    last = record["segments"][0]["entries"][-1]
    assert last["commands"][-1] == {"is": "Fail", "reason": "STORE_UNAVAILABLE", "message": "no answer in 5 s"}
    assert replay(record).difference == ""


def test_nothing_is_kept_where_nothing_is_to_be_recorded() -> None:
    for settings in (FlightSettings(num_events=0, folder="some"), FlightSettings()):
        _, flight, said = flown(settings)
        assert flight.recorder.segments == []
        assert said == flown(FlightSettings(folder="some"))[2]
        assert not [each for each in gc.get_referents(flight.recorder) if each and isinstance(each, list | deque)]


async def test_what_ended_long_ago_is_let_go_of_whoever_holds_it(tmp_path: Path) -> None:
    flights, first, _ = flown(FlightSettings(folder=str(tmp_path)))
    await flights.end(first, "stop", None)
    for number in range(MAX_ENDED):
        assert first.recorder.segments, number
        await flights.end(flights.begin(SessionId(f"s{number}"), 1, Words()), "stop", None)
    assert first.recorder.segments == []


def test_recording_changes_no_command_and_no_state() -> None:
    plan = Plan(FENCE, PROMPT, (TokenClass.PROMPT,) * 4, 40, Tuned(ON, 1.0))
    alone = Rounds(plan, Words())
    assert [command for event in eventful() for command in alone.step(event)] == flown(FlightSettings(folder="some"))[2]


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "number"),
    [(None, 0), (LeaseLost("elsewhere"), 0), (StoreUnavailable("away"), 1)],
    ids=["fine", "moved", "failed"],
)
async def test_only_a_failure_leaves_a_file(tmp_path: Path, error: OutriderError | None, number: int) -> None:
    flights, flight, _ = flown(FlightSettings(folder=str(tmp_path / "made")))
    await flights.end(flight, "x", error)
    assert len(files(tmp_path / "made")) == number


async def test_a_file_is_for_nobody_else_to_read(tmp_path: Path) -> None:
    await written(tmp_path / "made")
    (path,) = (tmp_path / "made").glob("*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_name_of_a_session_leads_nowhere_else(tmp_path: Path) -> None:
    flights = Flights(FlightSettings(folder=str(tmp_path)))
    await flights.end(flights.begin(SessionId("../../x/y"), 1, Words()), "x", StoreUnavailable("away"))
    assert [path.name for path in files(tmp_path)] == ["..%2F..%2Fx%2Fy-1.json"]


async def test_the_oldest_files_go(tmp_path: Path) -> None:
    flights = Flights(FlightSettings(folder=str(tmp_path), max_files=3))
    for number in range(5):
        await flights.end(flights.begin(SessionId(f"s{number}"), 1, Words()), "x", StoreUnavailable("away"))
    assert len(files(tmp_path)) == 3


async def test_all_that_runs_and_some_that_ended_are_written_on_demand(tmp_path: Path) -> None:
    flights = Flights(FlightSettings(folder=str(tmp_path)))
    running, numbers = flights.begin(SessionId("running"), 1, Words()), count()
    for _ in range(MAX_ENDED + 2):
        await flights.end(flights.begin(SessionId(f"s{next(numbers)}"), 1, Words()), "stop", None)
    assert await flights.write_all() == MAX_ENDED + 1
    names = {path.stem for path in files(tmp_path)}
    assert "running-1" in names
    assert "s0-1" not in names
    assert running.outcome == "running"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 99}', '{"format": 1, "tokens": false, "segments": [{"state": {}}]}']
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest):
        replay(load(path))
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: file: ")
    assert "is not allowed" in said


def test_the_command_runs_files_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> Any:
        ran.append(command)
        return SimpleNamespace(returncode=main(command[3:]))

    monkeypatch.setattr("outrider.cli.replay.subprocess.run", run)
    command, bound, _ = app.parse_args(["replay", str(tmp_path / "nothing.json")])
    with pytest.raises(SystemExit) as ended:
        command(*bound.args, **bound.kwargs)
    assert ended.value.code == 2
    assert ran[0][1:3] == ["-m", "orchestrator.flight.replay"]


async def test_an_event_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    record = await written(tmp_path, [Started(VERIFIER, None), Cancelled()])
    record["segments"][0]["entries"][1]["event"]["is"] = "Teleported"
    with pytest.raises(InvalidRequest, match="Teleported"):
        replay(record)
