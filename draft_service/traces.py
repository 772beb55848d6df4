"""The spans of a draft worker: one for each proposal, below the round that it is for (`outrider.tracing`)."""

import time

from outrider.messages import Pass, Proposal, ProposeMessage
from outrider.tracing import TraceParent, Tracer, epoch_name, span_of_round


class DraftTrace:
    """What is told of one session's proposals."""

    def __init__(self, tracer: Tracer, trace: TraceParent) -> None:
        """Begin now.

        Args:
            tracer: of the process.
            trace: the generation's span, sampled.
        """
        self._tracer, self._trace = tracer, trace
        self._since_ns = time.time_ns()

    def told(self) -> None:
        """The session was told something that it can draft from."""
        self._since_ns = time.time_ns()

    def said(self, message: ProposeMessage) -> None:
        """A proposal, or that there is none, leaves: it began with what was told last, or behind the one before it."""
        if not isinstance(message, Proposal | Pass):
            return
        now_ns = time.time_ns()
        attributes: dict[str, str | int] = {
            "outrider.session": message.session_id,
            "outrider.epoch": epoch_name(message.epoch),
            "outrider.position": message.base_len,
            "outrider.tokens.drafted": len(message.token_ids) if isinstance(message, Proposal) else 0,
        }
        self._tracer.span("draft", span_of_round(self._trace, message.epoch), (self._since_ns, now_ns), attributes)
        self._since_ns = now_ns


def draft_trace(tracer: Tracer | None, trace: TraceParent | None) -> DraftTrace | None:
    """Return what a session's proposals are told to; None where it is not traced."""
    return DraftTrace(tracer, trace) if tracer is not None and trace is not None and trace.is_sampled else None
