"""Clusters for measurements, and clients that ask many things of one."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.drafts import CAUSAL_LM, LAYER_SUBSET
from outrider.client import Client
from outrider.cluster import ServiceSpec
from outrider.generation import Chunk, Finished, GenerationRequest, Notice, PromptLogprobs, Started
from outrider.ids import FinishReason, TokenKind
from outrider.model.names import DEFAULT_MODEL

TOY = "toy"
"""Name of the toy model and of its drafter."""

Progress = Callable[[int, int], None]
"""Told how many generations are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores each role may use, as `taskset -c` takes them; empty: any."""

    verify: str = ""
    draft: str = ""
    orchestrate: str = ""

    @property
    def both(self) -> str:
        """All that an arm with a verifier and a draft worker uses."""
        return f"{self.verify},{self.draft}"


def pinned() -> Cores:
    """Put this process, and with it the store, on the draft worker's core; return where the services go.

    Raises:
        SystemExit: there are fewer than two cores.
    """
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise SystemExit("needs two cores: one for the verifier, one for the draft worker")
    verify, draft = available[:2]
    os.sched_setaffinity(0, {draft})
    return Cores(str(verify), str(draft), str(draft))


def real_specs(
    dtype: str, drafters: Sequence[str], *, threads: int = 1, cores: Cores = Cores(), context_len: int = 1024
) -> list[ServiceSpec]:
    """Return one verifier, one orchestrator, and one draft worker of each kind, all of the default model.

    Args:
        dtype: of target and draft.
        drafters: kinds, or several with commas; `CAUSAL_LM` is a subset of the target's layers.
        threads: of the verifier's model and of the draft model.
        cores: where the roles run.
        context_len: most tokens of a session.
    """
    model = {"MODEL": DEFAULT_MODEL, "DTYPE": dtype, "THREADS": str(threads), "CONTEXT_LEN": str(context_len)}
    specs = [
        ServiceSpec("verify-1", "verify", _prefixed("VERIFY", model), cores.verify),
        ServiceSpec("orchestrator-1", "orchestrate", {}, cores.orchestrate),
    ]
    for kind in drafters:
        settings = {**model, "DRAFTER": kind}
        if kind == CAUSAL_LM:
            settings["LAYERS"] = ",".join(map(str, LAYER_SUBSET))
        name = "draft-" + kind.replace("_", "-").replace(",", "-")
        specs.append(ServiceSpec(name, "draft", _prefixed("DRAFT", settings), cores.draft))
    return specs


def toy_specs(agreement: float, draft_s: float, verify_s: float, cores: Cores = Cores()) -> list[ServiceSpec]:
    """Return one verifier, draft worker and orchestrator of the toy model.

    Args:
        agreement: fraction of places where the draft's likeliest token is the target's.
        draft_s: seconds per draft token.
        verify_s: seconds per verify pass.
        cores: where the roles run.
    """
    verify = {"MODEL": TOY, "TOY_DELAY_S": str(verify_s)}
    draft = {"DRAFTER": TOY, "TOY_AGREEMENT": str(agreement), "TOY_DELAY_S": str(draft_s)}
    return [
        ServiceSpec("verify-1", "verify", _prefixed("VERIFY", verify), cores.verify),
        ServiceSpec("draft-1", "draft", _prefixed("DRAFT", draft), cores.draft),
        ServiceSpec("orchestrator-1", "orchestrate", _prefixed("ORCHESTRATOR", {"MODEL": TOY}), cores.orchestrate),
    ]


def _prefixed(role: str, settings: Mapping[str, str]) -> dict[str, str]:
    return {f"OUTRIDER_{role}_{name}": value for name, value in settings.items()}


@dataclass(frozen=True, slots=True)
class Reply:
    """Everything a client was told of one generation."""

    started: Started
    token_ids: tuple[int, ...]
    text: str
    kinds: tuple[TokenKind, ...]
    finished: Finished

    @property
    def said(self) -> tuple[tuple[int, ...], str, FinishReason]:
        """What has to be equal to the twin's."""
        return self.token_ids, self.text, self.finished.reason


async def ask(client: Client, request: GenerationRequest) -> Reply:
    """Run one generation to its end.

    Raises:
        OutriderError: it failed.
        RuntimeError: the stream ended without its first or last event.
    """
    started: Started | None = None
    finished: Finished | None = None
    chunks: list[Chunk] = []
    async for event in client.generate(request):
        match event:
            case Started():
                started = event
            case Chunk():
                chunks.append(event)
            case Finished():
                finished = event
            case Notice() | PromptLogprobs():
                # Degraded is slower, never wrong; what it did shows in the figures.
                pass
    if started is None or finished is None:
        raise RuntimeError("a generation without its first or last event")
    token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    kinds = tuple(kind for chunk in chunks for kind in chunk.kinds)
    return Reply(started, token_ids, "".join(chunk.text for chunk in chunks), kinds, finished)


async def ask_all(
    client: Client, requests: Sequence[GenerationRequest], at_once: int, progress: Progress = lambda *_: None
) -> list[Reply]:
    """Run generations, so many at a time; return their replies in order."""
    places = asyncio.Semaphore(at_once)
    done = 0

    async def one(request: GenerationRequest) -> Reply:
        nonlocal done
        async with places:
            reply = await ask(client, request)
        done += 1
        progress(done, len(requests))
        return reply

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks]
