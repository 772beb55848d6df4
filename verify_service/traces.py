"""The spans of a verifier: one for each verdict with tokens, below its round (`outrider.tracing`)."""

import time

from outrider.errors import OutriderError
from outrider.messages import DecodeResponseMessage, Verdict
from outrider.tracing import TraceParent, Tracer, epoch_name, span_of_round
from verify_service.inbox import DecodeSend


def traced(send: DecodeSend, tracer: Tracer | None, trace: TraceParent | None) -> DecodeSend:
    """Return a way to send that makes spans of verdicts; the same one where a session is not traced.

    Args:
        send: to the session's stream.
        tracer: of the process; None: nothing is traced.
        trace: the generation's span; None: it has none.
    """
    if tracer is None or trace is None or not trace.is_sampled:
        return send

    def sending(item: DecodeResponseMessage | OutriderError | None) -> None:
        send(item)
        if isinstance(item, Verdict) and item.token_ids:
            _make(tracer, trace, item)

    return sending


def _make(tracer: Tracer, trace: TraceParent, verdict: Verdict) -> None:
    """Make the span of a verdict: it begins with its passes' model time before now."""
    now_ns = time.time_ns()
    attributes: dict[str, str | int | float] = {
        "outrider.session": verdict.session_id,
        "outrider.epoch": epoch_name(verdict.epoch),
        "outrider.cause": verdict.cause,
        "outrider.position": verdict.start,
        "outrider.tokens.committed": len(verdict.token_ids),
        "outrider.tokens.tested": verdict.num_tested,
        "outrider.tokens.accepted": verdict.num_accepted,
        "outrider.rows": verdict.num_rows,
        "outrider.verify_seconds": verdict.verify_s,
        "outrider.queue_seconds": verdict.queue_s,
    }
    begun_ns = now_ns - int(verdict.verify_s * 1e9)
    tracer.span("verify", span_of_round(trace, verdict.epoch), (begun_ns, now_ns), attributes)
