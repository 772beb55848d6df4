"""What a client hears of one generation, over as many calls as it takes, and whether that is what its twin heard."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from outrider.generation import Chunk, Finished, GenerationEvent, Notice, PromptLogprobs, Started
from outrider.ids import FinishReason, SessionId


@dataclass(frozen=True, slots=True)
class Cut:
    """When a client leaves; whichever comes first."""

    after_chunks: int
    after_s: float


@dataclass(slots=True)
class Heard:
    """One generation on the client's clock."""

    session_id: SessionId = SessionId("")
    prompt_len: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    finished: Finished | None = None
    calls: int = 0
    first_s: float | None = None
    """From the first call to the first token."""
    gaps_s: list[float] = field(default_factory=list)
    """Between chunks of tokens of one call."""
    _last_s: float | None = None

    @property
    def next_position(self) -> int:
        """Position of the first token that was not heard."""
        return self.prompt_len + len(self.token_ids)

    @property
    def reason(self) -> FinishReason | None:
        """Why it ended, if it has."""
        return self.finished.reason if self.finished is not None else None

    async def listen(self, events: AsyncGenerator[GenerationEvent, None], cut: Cut | None = None) -> bool:
        """Hear a call to its end, or to the cut; say whether it was heard to its end.

        Raises:
            OutriderError: the generation failed.
            RuntimeError: the stream ended without its last event, or left a gap.
        """
        self.calls += 1
        started_s, self._last_s = time.monotonic(), None
        chunks = 0
        try:
            async with asyncio.timeout(cut.after_s if cut is not None else None), aclosing(events):
                async for event in events:
                    self._hear(event, started_s)
                    chunks += isinstance(event, Chunk)
                    if cut is not None and chunks >= cut.after_chunks and self.finished is None:
                        return False
        except TimeoutError:
            return False
        if self.finished is None:
            raise RuntimeError("a generation without its last event")
        return True

    def _hear(self, event: GenerationEvent, started_s: float) -> None:
        match event:
            case Started():
                self.session_id, self.prompt_len = event.session_id, event.prompt_len
            case Chunk():
                self._hear_chunk(event, started_s)
            case Notice():
                self.notices.append(event.reason)
            case Finished():
                self.finished = event
            case PromptLogprobs():
                pass  # nobody asks for them here

    def _hear_chunk(self, chunk: Chunk, started_s: float) -> None:
        if chunk.token_ids and chunk.start != self.next_position:
            raise RuntimeError(f"a chunk at {chunk.start} where {self.next_position} comes next")
        self.token_ids += chunk.token_ids
        self.text += chunk.text
        self.logprobs += [entry.logprob for entry in chunk.logprobs]
        if not chunk.token_ids:
            return
        now_s = time.monotonic()
        if self._last_s is not None:
            self.gaps_s.append(now_s - self._last_s)
        elif self.first_s is None:
            self.first_s = now_s - started_s
        self._last_s = now_s


def difference(heard: Heard, twin: Heard) -> str:
    """Say how a generation differs from its twin, "" if it does not; one that was cut must be how the twin begins."""
    count = len(heard.token_ids)
    if heard.token_ids != twin.token_ids[:count]:
        pairs = zip(heard.token_ids, twin.token_ids, strict=False)
        at = next((index for index, (own, other) in enumerate(pairs) if own != other), len(twin.token_ids))
        return f"token {at} of {count}: {heard.token_ids[at : at + 3]}, twin {twin.token_ids[at : at + 3]}"
    if heard.finished is None:
        return "" if twin.text.startswith(heard.text) else f"text {heard.text!r} does not begin {twin.text!r}"
    if count != len(twin.token_ids) or heard.reason is not twin.reason:
        ends = [each.name if each is not None else "no end" for each in (heard.reason, twin.reason)]
        return f"{count} tokens and {ends[0]}, twin {len(twin.token_ids)} and {ends[1]}"
    if heard.text != twin.text:
        return f"same ids, but text {heard.text!r}, twin {twin.text!r}"
    # A call that goes on with a generation is not told log-probabilities of what the log held.
    if heard.calls == 1 and heard.logprobs != twin.logprobs:
        return "same ids, but other log-probabilities"
    return ""
