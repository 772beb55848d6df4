"""A whole request's answers as OpenAI's objects: one object at the end, or a chunk per round. Pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.http import figures
from orchestrator.http.samples import Sample
from orchestrator.http.tokens import Json
from outrider.generation import Finished, GenerationEvent, Started
from outrider.ids import FinishReason

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Heading:
    """What all objects of a response begin with."""

    id: str
    kind: str
    """"chat.completion" or "text_completion"."""
    created: int
    model: str

    def fields(self, *, chunk: bool) -> Json:
        """Return them as the beginning of an object."""
        kind = "chat.completion.chunk" if chunk and self.kind == "chat.completion" else self.kind
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Telling:
    """Tells the answers of one request."""

    def __init__(self, heading: Heading, samples: Sequence[Sample], num_samples: int, *, includes_usage: bool) -> None:
        """Start before the first event.

        Args:
            heading: what all objects begin with.
            samples: the answers, in the order of their indices.
            num_samples: answers per prompt.
            includes_usage: whether a stream ends with a chunk of usage.
        """
        self._heading, self._samples = heading, samples
        self._num_samples, self._includes_usage = num_samples, includes_usage

    def take(self, index: int, event: GenerationEvent) -> None:
        """Take what happened to an answer of which the whole will be told."""
        self._samples[index].take(event)

    def waited(self, index: int, seconds: float) -> None:
        """Note how long an answer waited for its place."""
        self._samples[index].about.waited_s = seconds

    def frame(self, index: int, event: GenerationEvent) -> bytes:
        """Take what happened to an answer, and return the server-sent event that tells it; empty: nothing does."""
        choice = self._samples[index].take(event)
        if choice is None:
            return b""
        chunk = self._heading.fields(chunk=True) | {"choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = None
        if isinstance(event, Started):
            chunk["outrider"] = {"index": index, **_beginning(event)}
        elif isinstance(event, Finished):
            chunk |= self._ending(index, event)
        return server_sent(chunk)

    def last_frames(self) -> Iterator[bytes]:
        """Return what ends a stream."""
        if self._includes_usage:
            chunk = self._heading.fields(chunk=True) | {"choices": [], "usage": self._usage()}
            yield server_sent(chunk | self._metrics())
        yield DONE

    def whole(self) -> Json:
        """Return the response to a request that is not streamed."""
        answers = [
            {
                "index": index,
                **(_beginning(sample.about.started) if sample.about.started else {}),
                "notices": sample.about.notices,
                "figures": figures.outrider(sample.about.finished) if sample.about.finished else None,
            }
            for index, sample in enumerate(self._samples)
        ]
        told = {
            **self._heading.fields(chunk=False),
            "choices": [sample.choice() for sample in self._samples],
            "usage": self._usage(),
            "system_fingerprint": self._fingerprint(),
            **self._metrics(),
            "outrider": answers[0] if len(answers) == 1 else {"answers": answers},
        }
        if len(self._samples) == 1 and self._samples[0].about.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._samples[0].about.prompt_logprobs
        return told

    def _ending(self, index: int, end: Finished) -> Json:
        """Return what the last chunk of an answer says beside its choice."""
        about = self._samples[index].about
        told: Json = {"system_fingerprint": end.figures.engine_fingerprint or None}
        told["outrider"] = {
            "index": index,
            **(_beginning(about.started) if about.started else {}),
            "notices": about.notices,
            "figures": figures.outrider(end),
        }
        if about.prompt_logprobs is not None:
            told["prompt_logprobs"] = about.prompt_logprobs
        return told if self._includes_usage else told | self._metrics()

    def _ends(self) -> list[Finished]:
        return [sample.about.finished or Finished(FinishReason.CANCELLED) for sample in self._samples]

    def _usage(self) -> Json:
        return figures.usage(self._ends(), self._num_samples)

    def _metrics(self) -> Json:
        """Return what describes one answer alone, as vLLM has it."""
        if len(self._samples) > 1:
            return {}
        return {"metrics": figures.metrics(self._ends()[0], self._samples[0].about.waited_s)}

    def _fingerprint(self) -> str | None:
        names = {end.figures.engine_fingerprint for end in self._ends() if end.figures.engine_fingerprint}
        return ", ".join(sorted(names)) or None


def server_sent(told: Any) -> bytes:
    """Return an object as one server-sent event."""
    return b"data: " + json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _beginning(started: Started) -> Json:
    return {
        "session_id": started.session_id,
        "prompt_len": started.prompt_len,
        "mode": started.mode.name.lower(),
        "guarantee": started.exactness,
    }
