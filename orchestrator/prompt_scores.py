"""A prompt's log-probabilities on their way to the client: each position once, whoever computed it. Pure."""

from orchestrator.job import Job
from outrider.errors import ProtocolError
from outrider.generation import PromptLogprobs
from outrider.messages import PromptScores


class PromptScoring:
    """What of a prompt has been told; another verifier may tell it again."""

    def __init__(self, job: Job) -> None:
        """Have told nothing yet.

        Args:
            job: the generation, which may want none.
        """
        self._ids = job.token_ids[: job.state.prompt_len]
        self._known = 0 if job.state.num_prompt_logprobs >= 0 else len(self._ids)

    @property
    def is_open(self) -> bool:
        """Whether something is still to be told."""
        return self._known < len(self._ids)

    def take(self, scores: PromptScores) -> PromptLogprobs | None:
        """Take what a verifier says; return what of it is new.

        Raises:
            ProtocolError: something is missing before it, or it goes on behind the prompt.
        """
        known, end = self._known, scores.start + len(scores.logprobs)
        if end <= known:
            return None
        if scores.start > max(1, known) or end > len(self._ids):
            raise ProtocolError(f"prompt_scores: {scores.start} .. {end} where {known} of {len(self._ids)} are known")
        new = scores.logprobs[max(1, known) - scores.start :]
        self._known = end
        return PromptLogprobs(known, self._ids[known:end], new if known else (None, *new))
