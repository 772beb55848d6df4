"""The orchestrator's two doors as a client sees them: streams whose chunks are timed, and streams that wait."""

import asyncio
import json
import time
from dataclasses import dataclass, field, replace

from outrider.client import Client
from outrider.errors import Unavailable
from outrider.generation import Chunk, GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams

PROMPT = "the cat sat on "
ACTIVE, WAITING = 8, -8
"""Priorities of the streams that are measured, and of those that wait for a place."""
REQUEST = GenerationRequest(
    TextPrompt(PROMPT), sampling=SamplingParams(temperature=0.0), ignore_eos=True,
    speculation=SpeculationChoice(off=True),
)  # fmt: skip


@dataclass
class Gaps:
    """Times between chunks, in milliseconds; noted while it is open."""

    values: list[float] = field(default_factory=list)
    is_open: bool = True
    num_wanted: int = 0
    """Streams whose first chunk is waited for."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when they have come."""

    def expect(self, num_streams: int) -> None:
        """Wait for the first chunks of so many streams."""
        self.num_wanted = num_streams
        self.begun.clear()

    def note(self, last_s: float) -> float:
        """Note a chunk that comes now.

        Args:
            last_s: when the one before it came; 0: it is the first.
        """
        now_s = time.perf_counter()
        if not last_s:
            self.num_wanted -= 1
            if not self.num_wanted:
                self.begun.set()
        elif self.is_open:
            self.values.append(1000 * (now_s - last_s))
        return now_s

    def quantile(self, share: float) -> float:
        """Return a quantile; there is at least one value."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def over_grpc(client: Client, num_tokens: int, gaps: Gaps, priority: int = ACTIVE) -> None:
    """Ask for one stream and note when its chunks come."""
    last_s = 0.0
    async for event in client.generate(replace(REQUEST, max_tokens=num_tokens, priority=priority)):
        if isinstance(event, Chunk):
            last_s = gaps.note(last_s)


async def over_http(address: str, num_tokens: int, gaps: Gaps, priority: int = ACTIVE) -> None:
    """Ask for one stream and note when its chunks come; it only looks at them, so that it costs the machine little."""
    host, _, port = address.rpartition(":")
    body = json.dumps({
        "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "outrider": {"off": True, "return_token_origin": True, "priority": priority},
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        last_s = 0.0
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            if not line:
                raise Unavailable("the stream ended early")
            if b'"texts":[' in line:
                last_s = gaps.note(last_s)
    finally:
        writer.close()
