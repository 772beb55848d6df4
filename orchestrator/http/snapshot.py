"""The cluster as a value that can be sent to a browser: workers, sessions, acceptance, rounds. Pure.

It has no prompt, no token and no text, no address of a worker, and of sessions only those of whoever asks.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from orchestrator.acceptance import Acceptance
from orchestrator.lately import Course, RoundTimes
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription

MAX_SESSIONS = 50
"""Sessions that are listed; of more, those that began last."""
MAX_TIMELINES = 4
"""Generations whose rounds are told, those that began last."""
ROLES = ("verify", "draft", "orchestrate")

NO_WORKER = "no_worker"
"""Why nothing is drafted where there is no draft worker at all; other reasons are those of generations."""


@dataclass(frozen=True, slots=True)
class Running:
    """A generation under way, and where."""

    course: Course
    verifier_id: WorkerId
    drafter_id: WorkerId


@dataclass(frozen=True, slots=True)
class Seen:
    """What the process knows at one moment."""

    model: str
    now_s: float
    """On the monotonic clock."""
    workers: Sequence[WorkerDescription]
    left_out: Set[WorkerId]
    """Those that have failed, and are not chosen at present."""
    running: Sequence[Running]
    lately: Sequence[Course]
    """Generations that began last, the oldest first, whether they run or not."""
    acceptance: Acceptance
    problem: str = ""
    """Why the workers are not known; empty: they are."""


def snapshot(seen: Seen, owner: str) -> dict[str, Any]:
    """Return what a caller may see.

    Args:
        seen: what the process knows.
        owner: id of the caller's key; empty: nobody needs one.
    """
    own = [each for each in seen.running if each.course.owner == owner]
    return {
        "model": seen.model,
        "problem": seen.problem,
        "workers": [_worker(each, seen) for role in ROLES for each in seen.workers if each.role == role],
        "num_sessions": len(seen.running),
        "sessions": [_session(each, seen.now_s) for each in own[-MAX_SESSIONS:]],
        "acceptance": [
            {"drafter": drafter, "positions": [{"tested": tested, "accepted": accepted} for tested, accepted in pairs]}
            for drafter, pairs in seen.acceptance.by_drafter().items()
        ],
        "timelines": _timelines(seen, owner),
        "off": _off(seen, own),
    }


def _worker(worker: WorkerDescription, seen: Seen) -> dict[str, Any]:
    state = "stopping" if worker.draining else "left out" if worker.worker_id in seen.left_out else "ready"
    return {
        "id": worker.worker_id,
        "role": worker.role,
        "state": state,
        "model": worker.model,
        "drafters": list(worker.drafters or ((worker.drafter,) if worker.drafter else ())),
        "label": worker.label,
        "load": worker.load,
        "capacity": worker.capacity,
        "context_len": worker.context_len,
        "exactness": worker.exactness if worker.role == "verify" else "",
    }


def _session(running: Running, now_s: float) -> dict[str, Any]:
    course = running.course
    first = course.rounds[0] if course.rounds else None
    return {
        "id": course.session_id,
        "verifier": running.verifier_id,
        "draft_worker": running.drafter_id,
        "drafter": course.drafter,
        "seconds": round(now_s - course.started_s, 3),
        "tokens": course.num_tokens,
        "tokens_per_second": round(_rate(course, first), 2),
        "tested": course.num_tested,
        "accepted": course.num_accepted,
        "off": course.off_reason,
    }


def _rate(course: Course, first: RoundTimes | None) -> float:
    """Return tokens per second over the rounds that are remembered, the first of them left out; 0 for too few."""
    if first is None or course.last_s <= first.at_s:
        return 0.0
    return (course.rounds[-1].end - first.end) / (course.last_s - first.at_s)


def _timelines(seen: Seen, owner: str) -> list[dict[str, Any]]:
    """Return the last rounds of the generations that began last, the newest first."""
    running = {id(each.course) for each in seen.running}
    shown = [course for course in seen.lately if course.owner == owner and course.rounds][-MAX_TIMELINES:]
    return [
        {
            "session": course.session_id,
            "running": id(course) in running,
            "rounds": [_round(each, seen.now_s) for each in course.rounds],
        }
        for course in reversed(shown)
    ]


def _round(each: RoundTimes, now_s: float) -> dict[str, Any]:
    """Return a round; times in milliseconds, `ago` of its verdict; None where one is not known."""
    committed = each.committed
    return {
        "ago_ms": _ms(now_s - each.at_s),
        "took_ms": _ms(each.took_s),
        "draft_ms": _ms(each.draft_s or None),
        "network_ms": _ms(each.network_s),
        "queue_ms": _ms(committed.queue_s),
        "verify_ms": _ms(committed.verify_s),
        "commit_ms": _ms(each.commit_s),
        "tested": committed.num_tested,
        "accepted": committed.num_accepted,
        "tokens": len(committed.kinds),
        "cause": committed.cause,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)


def _off(seen: Seen, own: Sequence[Running]) -> list[dict[str, Any]]:
    """Return why nothing is drafted: for all if there is no draft worker, else for the sessions it concerns."""
    if not seen.problem and not any(worker.role == "draft" for worker in seen.workers):
        return [{"reason": NO_WORKER, "sessions": len(own)}]
    reasons = [each.course.off_reason for each in own if each.course.off_reason]
    return [{"reason": reason, "sessions": reasons.count(reason)} for reason in dict.fromkeys(reasons)]
