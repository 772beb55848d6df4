"""What a response says beside OpenAI's fields: usage, times, and how speculation went. Pure."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider.generation import Figures, Finished

Json = dict[str, Any]


def usage(finished: Sequence[Finished], num_samples: int, num_thoughts: int | None = None) -> Json:
    """Return the usage of a whole request.

    Args:
        finished: the ends of all its answers, the samples of a prompt one after the other.
        num_samples: answers per prompt, which is counted once.
        num_thoughts: tokens of thoughts; None: nobody knows.
    """
    prompts = [end.usage for end in finished[::num_samples]]
    prompt_tokens = sum(each.prompt_tokens for each in prompts)
    completion_tokens = sum(end.usage.completion_tokens for end in finished)
    details = {
        "accepted_prediction_tokens": sum(end.figures.accepted_prediction_tokens for end in finished),
        "rejected_prediction_tokens": sum(end.figures.rejected_prediction_tokens for end in finished),
    }
    if num_thoughts is not None:
        details["reasoning_tokens"] = num_thoughts
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
        "completion_tokens_details": details,
    }


def metrics(finished: Finished, waited_s: float) -> Json:
    """Return times and speculation of one answer, in the shape of vLLM's per-request metrics.

    Args:
        finished: its end.
        waited_s: how long it waited for a place; not for passes, of which each round waits for its own.
    """
    figures = finished.figures
    after_first_ms = 1000 * max(0.0, figures.total_s - figures.time_to_first_token_s)
    gaps = finished.usage.completion_tokens - 1
    return {
        "time_to_first_token_ms": 1000 * figures.time_to_first_token_s,
        "generation_time_ms": after_first_ms,
        "queue_time_ms": 1000 * waited_s,
        "mean_itl_ms": 1000 / figures.tokens_per_second if figures.tokens_per_second and gaps > 0 else 0.0,
        "tokens_per_second": figures.tokens_per_second,
        "speculative_decoding": speculation(figures),
    }


def speculation(figures: Figures) -> Json:
    """Return how drafting went.

    A step is a chain of drafts: from where the drafter starts after a token of the verifier's own to the next such
    token. In sequential rounds that is a pass of the target; a chain that survives may take several.
    """
    accepted = figures.accepted_per_position
    steps = figures.tested_per_position[0] if figures.tested_per_position else 0
    reached = (steps, *accepted)
    histogram = [count - further for count, further in zip(reached, (*accepted, 0), strict=True)]
    total = sum(accepted)
    return {
        "mean_acceptance_length": 1 + total / steps if steps else 1.0,
        "draft_acceptance_rate": total / figures.num_drafted if figures.num_drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": total,
        "num_draft_tokens": figures.num_drafted,
        "num_spec_tokens": len(accepted),
    }


def outrider(finished: Finished) -> Json:
    """Return all figures of one answer by the names that gRPC has for them; times in seconds."""
    return asdict(finished.figures)
