"""Which draft worker a generation begins with, and what its client is told where that is not what was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.placement import PREDICTION, Placement, Wanted
from outrider.generation import Notice
from outrider.ids import SessionId, WorkerId
from outrider.messages import WorkerDescription
from outrider.store.records import SessionState


@dataclass(frozen=True, slots=True)
class Drafting:
    """The draft worker of a generation's begin."""

    worker: WorkerDescription | None
    off_reason: str = ""
    """Why there is none."""
    notices: tuple[Notice, ...] = ()
    """What the client is told of it."""


async def choose_drafting(
    placement: Placement,
    state: SessionState,
    length: int,
    verifier: WorkerDescription,
    resident: Mapping[WorkerId, int],
    session_id: SessionId,
) -> Drafting:
    """Choose a draft worker for what is left of a generation, or say why there is none.

    Args:
        placement: knows the draft workers.
        state: of the session.
        length: tokens of its log.
        verifier: its verifier.
        resident: tokens of the session's KV by worker.
        session_id: decides where sessions are split between drafters.

    Raises:
        StoreUnavailable: the registry is not reached.
    """
    if state.speculation.off:
        return Drafting(None, "requested")
    if state.prompt_len + state.max_tokens - length <= 1:
        return Drafting(None, "max_tokens")
    wanted = Wanted(
        state.drafter_kind,
        length,
        resident=resident,
        predicted=bool(state.prediction),
        session_id=session_id,
        new=True,
        insists=state.speculation.gamma is not None,
    )
    worker, off_reason = await placement.choose_drafter(verifier, wanted)
    return Drafting(worker, off_reason, await _notices(placement, state, verifier, worker, off_reason))


async def _notices(
    placement: Placement,
    state: SessionState,
    verifier: WorkerDescription,
    worker: WorkerDescription | None,
    off_reason: str,
) -> tuple[Notice, ...]:
    """Say what of a request cannot be had at present: it costs speed, so the generation goes on all the same."""
    if off_reason == "vocabulary":
        return (Notice("vocabulary", placement.refusal(verifier)),)
    if off_reason == "drafter_not_offered":
        offered = await placement.offered(verifier)
        text = f"no draft worker offers {state.drafter_kind!r}; offered are {', '.join(offered)}"
        return (Notice(off_reason, f"{text}. Decoding goes on without drafts"),)
    if state.prediction and (worker is None or not worker.offers(PREDICTION)):
        drafter = f"{worker.drafter} drafts" if worker is not None else "nobody drafts"
        return (Notice("prediction_unused", f"the prediction is not looked at: {drafter} at present"),)
    return ()


def only(worker: WorkerDescription, drafter: str) -> str:
    """Return the one kind that may draft on a worker that offers several; empty: its own rule holds."""
    return drafter if drafter in worker.drafters else ""
