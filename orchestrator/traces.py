"""The spans of one generation: the generation itself, and its rounds (`outrider.tracing`)."""

import time

from orchestrator.figures import Round
from orchestrator.job import Job
from outrider.generation import Figures
from outrider.ids import Epoch
from outrider.tracing import TraceParent, Tracer, ago_ns, arrived, epoch_name, leaving, span_of_round


class GenerationTrace:
    """What is told of one generation; where it is not traced, that is nothing, at no cost."""

    def __init__(self, tracer: Tracer | None, job: Job) -> None:
        """Begin the generation's span, below the one that its call came with.

        Args:
            tracer: of the process; None: nothing is traced here, and what the call came with is passed on.
            job: the generation.
        """
        self.place: TraceParent | None = arrived.get()
        """What the spans of other processes hang below; None: there is no trace."""
        self._span = None
        self._is_sampled = False
        if tracer is None:
            return
        state = job.state
        attributes: dict[str, str | int] = {
            "outrider.session": job.session_id,
            "outrider.model": state.model,
            "outrider.mode": state.mode.name.lower(),
            "outrider.tokens.prompt": state.prompt_len,
            "outrider.tokens.max": state.max_tokens,
            "outrider.verifier": job.verifier.worker_id,
        }
        start_ns = ago_ns(max(0.0, time.monotonic() - job.started_s)) if job.started_s else time.time_ns()
        self._tracer, self._session = tracer, job.session_id
        self._span = tracer.begin("generation", self.place, start_ns, attributes)
        self.place = self._span.place
        self._is_sampled = self.place.is_sampled
        self._round_ns = time.time_ns()
        self._committed = self._tested = self._accepted = self._verdicts = 0
        self._epoch: Epoch | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What calls to workers carry."""
        return leaving(self.place)

    def observe(self, verdict: Round) -> None:
        """Count a committed verdict, and end the round that it ends."""
        if not self._is_sampled:
            return
        self._committed += len(verdict.kinds)
        self._tested += verdict.num_tested
        self._accepted += verdict.num_accepted
        self._verdicts += 1
        if verdict.next_epoch != verdict.epoch:
            self._end_round(verdict.epoch, verdict.cause)
        self._epoch = verdict.next_epoch

    def end(self, outcome: str, error: str = "", figures: Figures | None = None) -> None:
        """End the generation's span, once.

        Args:
            outcome: how it ended.
            error: why it failed; empty: it did not.
            figures: everything counted.
        """
        span, self._span = self._span, None
        if span is None:
            return
        if self._is_sampled and self._epoch is not None:
            self._end_round(self._epoch, "ended")  # proposals under way name it as their parent
        attributes: dict[str, str | int] = {"outrider.outcome": outcome}
        if figures is not None:
            attributes["outrider.tokens.tested"] = figures.num_tested
            attributes["outrider.tokens.accepted"] = figures.num_accepted
            attributes["outrider.speculation_off"] = figures.speculation_off
        span.end(attributes, error)

    def _end_round(self, epoch: Epoch, cause: str) -> None:
        """Make the span of a round that is over, with the id that drafts and passes name as their parent."""
        if self.place is None:
            return
        now_ns = time.time_ns()
        attributes: dict[str, str | int] = {
            "outrider.session": self._session,
            "outrider.epoch": epoch_name(epoch),
            "outrider.cause": cause,
            "outrider.verdicts": self._verdicts,
            "outrider.tokens.committed": self._committed,
            "outrider.tokens.tested": self._tested,
            "outrider.tokens.accepted": self._accepted,
        }
        span_id = span_of_round(self.place, epoch).span_id
        self._tracer.span("round", self.place, (self._round_ns, now_ns), attributes, span_id)
        self._round_ns = now_ns
        self._committed = self._tested = self._accepted = self._verdicts = 0
