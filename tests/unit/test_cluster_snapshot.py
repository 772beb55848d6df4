"""The cluster view's snapshot: what it shows, to whom, and what never gets into it."""

import json
from typing import Any

from orchestrator.http.snapshot import MAX_SESSIONS, MAX_TIMELINES, Running, Seen, snapshot
from orchestrator.lately import Lately
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription
from tests.unit.test_lately import Followed, begun
from tests.unit.test_placement import worker

VERIFIER = worker("v1", load=3)
DRAFTER = worker("d1", "draft", drafter="prompt_lookup", load=1)


def running(followed: Followed) -> Running:
    return Running(followed.course, WorkerId("v1"), WorkerId("d1"))


def seen(lately: Lately, *follows: Followed, workers: tuple[WorkerDescription, ...] = (VERIFIER, DRAFTER)) -> Seen:
    return Seen(
        "m", 101.0, workers, frozenset(), [running(each) for each in follows], lately.courses, lately.acceptance
    )


def shown(what: Seen, owner: str = "") -> dict[str, Any]:
    made = snapshot(what, owner)
    parsed: dict[str, Any] = json.loads(json.dumps(made, allow_nan=False))  # what a browser gets
    return parsed


def test_workers_are_shown_with_role_state_and_load_and_without_address() -> None:
    found = shown(seen(Lately()))["workers"]
    assert [(each["id"], each["role"], each["state"], each["load"], each["capacity"]) for each in found] == [
        ("v1", "verify", "ready", 3, 8),
        ("d1", "draft", "ready", 1, 8),
    ]
    assert found[1]["drafters"] == ["prompt_lookup"]
    assert "127.0.0.1" not in json.dumps(found)


def test_a_stopping_worker_and_one_that_failed_are_told_apart() -> None:
    stopping, failed = worker("a", draining=True), worker("b")
    what = Seen("m", 1.0, [stopping, failed], {WorkerId("b")}, [], [], Lately().acceptance)
    assert [each["state"] for each in snapshot(what, "")["workers"]] == ["stopping", "left out"]


def test_a_session_is_shown_with_its_counts_and_rate() -> None:
    lately = Lately()
    followed = begun(lately)
    followed.meter.drafter = "prompt_lookup"
    for at_s in (100.2, 100.4, 100.6):
        followed.round("aar", 3, at_s)
    session = shown(seen(lately, followed))["sessions"][0]
    assert session["tokens"] == 9
    assert (session["tested"], session["accepted"]) == (9, 6)
    assert session["tokens_per_second"] == 15.0  # six tokens in .4 s: the first round has no beginning to count from
    assert (session["verifier"], session["draft_worker"], session["drafter"]) == ("v1", "d1", "prompt_lookup")


def test_a_key_sees_its_own_sessions_and_rounds_and_only_the_number_of_the_others() -> None:
    lately = Lately()
    mine, other = begun(lately, "mine", "key-a"), begun(lately, "other", "key-b")
    for each in (mine, other):
        each.round("p", 0, 100.5)
    found = shown(seen(lately, mine, other), "key-a")
    assert [each["id"] for each in found["sessions"]] == ["mine"]
    assert [each["session"] for each in found["timelines"]] == ["mine"]
    assert found["num_sessions"] == 2
    assert "other" not in json.dumps(found)
    assert "key-" not in json.dumps(found)


def test_without_keys_no_session_of_a_key_is_shown() -> None:
    lately = Lately()
    assert shown(seen(lately, begun(lately, "hers", "key-a")))["sessions"] == []


def test_rounds_are_told_in_milliseconds_and_unknown_times_as_null() -> None:
    lately = Lately()
    followed = begun(lately)
    followed.tuning.pace.draft_s = 0.004
    followed.round("aar", 3, 100.5)
    assert shown(seen(lately, followed))["timelines"] == [
        {
            "session": "s",
            "running": True,
            "rounds": [
                {
                    "ago_ms": 500.0, "took_ms": 500.0, "draft_ms": 12.0, "network_ms": None, "queue_ms": 3.0,
                    "verify_ms": 20.0, "commit_ms": None, "tested": 3, "accepted": 2, "tokens": 3, "cause": "tested",
                }
            ],
        }
    ]  # fmt: skip


def test_generations_that_are_over_are_still_told_the_newest_first() -> None:
    lately = Lately()
    for name in range(MAX_TIMELINES + 2):
        begun(lately, str(name)).round("p", 0, 100.5)
    found = shown(seen(lately))["timelines"]
    assert [each["session"] for each in found] == [str(n) for n in reversed(range(2, MAX_TIMELINES + 2))]
    assert not any(each["running"] for each in found)


def test_acceptance_is_told_by_drafter_and_position() -> None:
    lately = Lately()
    lately.acceptance.add("prompt_lookup", 0, 2, 1)
    assert shown(seen(lately))["acceptance"] == [
        {"drafter": "prompt_lookup", "positions": [{"tested": 1, "accepted": 1}, {"tested": 1, "accepted": 0}]}
    ]


def test_a_cluster_without_draft_workers_says_so() -> None:
    lately = Lately()
    followed = begun(lately)
    followed.course.off_reason = "no_drafter"
    assert shown(seen(lately, followed, workers=(VERIFIER,)))["off"] == [{"reason": "no_worker", "sessions": 1}]


def test_reasons_to_draft_nothing_are_counted_over_the_callers_sessions() -> None:
    lately = Lately()
    follows = [begun(lately, str(n)) for n in range(4)]
    for followed, reason in zip(follows, ("below_plain", "", "requested", "below_plain"), strict=True):
        followed.course.off_reason = reason
    assert shown(seen(lately, *follows))["off"] == [
        {"reason": "below_plain", "sessions": 2},
        {"reason": "requested", "sessions": 1},
    ]


def test_of_many_sessions_the_newest_are_listed_and_all_are_counted() -> None:
    lately = Lately()
    follows = [begun(lately, str(n)) for n in range(MAX_SESSIONS + 3)]
    found = shown(seen(lately, *follows))
    assert [each["id"] for each in found["sessions"]] == [str(n) for n in range(3, MAX_SESSIONS + 3)]
    assert found["num_sessions"] == MAX_SESSIONS + 3


def test_workers_that_cannot_be_listed_are_a_problem_and_no_reason_to_draft_nothing() -> None:
    what = Seen("m", 1.0, [], frozenset(), [], [], Lately().acceptance, "the workers cannot be listed: away")
    found = shown(what)
    assert found["problem"] == "the workers cannot be listed: away"
    assert found["off"] == []
