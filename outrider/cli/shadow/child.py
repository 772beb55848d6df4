"""The process that drafts: started with a draft worker's settings, told sessions, and heard out."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import Unavailable
from outrider.launch import ending_with_us
from outrider.shadowing import Logged, Passes, Shadowed, to_line

MODULE = "draft_service.shadow"


@dataclass(slots=True)
class Heard:
    """What the process said."""

    drafter: str = ""
    """Kind and model."""
    features: bool = False
    """Whether the drafter was given hidden states of the target."""
    results: list[Shadowed] = field(default_factory=list)
    """One per session, in order."""
    passes: Passes = field(default_factory=Passes)

    def take(self, line: bytes) -> None:
        """Take one line of the process."""
        [(name, value)] = json.loads(line).items()
        match name:
            case "drafter":
                self.drafter = f"{value['kind']} {value['model']}".strip()
                self.features = bool(value["features"])
            case "shadowed":
                self.results.append(_shadowed(value))
            case "passes":
                self.passes = Passes(**value)
            case _:
                raise ValueError(f"the drafting process said {name!r}")


async def run(
    settings: Mapping[str, str], options: Sequence[str], sessions: Sequence[Logged], progress: Callable[[int], None]
) -> Heard:
    """Have sessions replayed by a process of their own.

    Args:
        settings: of a draft worker, as environment variables.
        options: of the process.
        sessions: what is replayed.
        progress: told how many are done.

    Raises:
        Unavailable: the process ended before it was done, with what it said last.
    """
    process = await asyncio.create_subprocess_exec(
        *ending_with_us([sys.executable, "-m", MODULE, *options]),
        env={**os.environ, **settings},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, heard, errors = await asyncio.gather(
            _tell(process, sessions), _hear(process, progress), _drain(process.stderr)
        )
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status or len(heard.results) != len(sessions):
        raise Unavailable(f"the drafting process ended with status {status}: {_last_words(errors)}")
    return heard


async def _tell(process: asyncio.subprocess.Process, sessions: Sequence[Logged]) -> None:
    assert process.stdin is not None
    try:
        for session in sessions:
            process.stdin.write(f"{to_line(session)}\n".encode())
            await process.stdin.drain()
    except ConnectionError:
        pass  # it has ended, and its status says why
    finally:
        process.stdin.close()


async def _hear(process: asyncio.subprocess.Process, progress: Callable[[int], None]) -> Heard:
    assert process.stdout is not None
    heard = Heard()
    async for line in process.stdout:
        heard.take(line)
        progress(len(heard.results))
    return heard


async def _drain(stream: asyncio.StreamReader | None) -> str:
    return (await stream.read()).decode(errors="replace") if stream is not None else ""


def _last_words(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _shadowed(value: dict[str, Any]) -> Shadowed:
    return Shadowed(**{**value, "tested": tuple(value["tested"]), "accepted": tuple(value["accepted"])})
