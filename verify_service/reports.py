"""What goes out after a test: verdicts to the orchestrator, hidden states and rollback hints to the draft worker."""

import torch

from outrider.ids import SessionId, TokenKind
from outrider.messages import RollbackHint, TargetFeatures, Verdict
from outrider.messages import Tensor as WireTensor
from verify_service.chain import Chain
from verify_service.events import Report
from verify_service.sessions import Fresh, PassFigures, Session

_WIRE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def verdict_of(session: Session, report: Report) -> Verdict:
    """Complete a chain's report with timings and log-probabilities, and start both afresh."""
    figures, session.figures = session.figures, PassFigures()
    ahead, session.ahead = session.ahead, PassFigures()
    # Tokens that needed no pass of their own were tested on the row of the one that ran ahead of them.
    passes = ahead if ahead.num_rows and not figures.num_rows else figures
    logprobs, session.logprobs = tuple(session.logprobs), []
    return Verdict(
        session_id=session.opened.session_id,
        epoch=report.epoch,
        start=report.start,
        token_ids=report.token_ids,
        kinds=report.kinds,
        num_accepted=report.num_accepted,
        num_tested=report.num_tested,
        next_epoch=report.next_epoch,
        cause=report.cause,
        logprobs=logprobs,
        verify_s=passes.verify_s,
        queue_s=figures.queue_s,
        num_rows=passes.num_rows,
        guarantee_void=session.chain.guarantee_void,
        num_stale=session.chain.num_stale,
        num_sessions=passes.num_sessions,
        from_ahead=passes is ahead,
        num_cached=session.num_cached if report.token_ids else 0,
    )


def hint_of(chain: Chain, report: Report) -> RollbackHint | None:
    """Return the hint for a round that ended inside its generation; None where nothing is gained by it.

    Nothing is where no round ended, and where the verifier goes on without its drafter, or not at all for now: whatever
    came early would be stale, or wait.
    """
    ended, begun = report.epoch, report.next_epoch
    if ended == begun or ended.generation != begun.generation or not chain.awaits_drafter:
        return None
    end = report.start + len(report.token_ids)
    if not report.kinds or report.kinds[-1] is TokenKind.ACCEPTED:
        return RollbackHint(chain.session_id, begun, end)
    return RollbackHint(chain.session_id, begun, end - 1, report.token_ids[-1])


def features_of(session_id: SessionId, fresh: Fresh, kept: int) -> TargetFeatures:
    """Pack hidden states of committed positions for the wire; a dtype that the wire lacks is sent as float32.

    Args:
        session_id: whose they are.
        fresh: of the pass.
        kept: how many of its positions stay, from the first on.
    """
    hidden = fresh.hidden[:kept]
    rows = hidden if hidden.dtype in _WIRE_DTYPES else hidden.float()
    data = rows.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    tensor = WireTensor(str(rows.dtype).removeprefix("torch."), (1, *rows.shape), data)
    return TargetFeatures(session_id, fresh.epoch, fresh.position, tensor)
