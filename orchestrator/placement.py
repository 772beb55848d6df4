"""Which verifier and which draft worker serve a session, and the channels to them.

Workers come from the registry or from fixed addresses. A verifier must have the context for the session; it is chosen
by the KV it holds of it, then by load. A draft worker must share the verifier's vocabulary, then load decides. Equals
are drawn by lot. Workers that are draining, excluded by the caller, or failed a moment ago are left out; one that
failed has to answer before it is chosen again.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from orchestrator.channels import Channels
from orchestrator.pairing import Pairing
from outrider.codec import types as t
from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider.ids import WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.rpc import rpc_errors
from outrider.store.registry import Registry
from outrider.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

log = logging.getLogger(__name__)

FIRST_BREAK_S = 0.5
"""A worker is left out so long after a failure, twice as long after each further one in a row."""
LONGEST_BREAK_S = 15.0
DESCRIBE_TIMEOUT_S = 2.0


class WorkerSource(Protocol):
    """Where workers are found."""

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        """Return the reachable workers of a role; waits for I/O. Repeatable."""
        ...


class RegistrySource:
    """Workers that announce themselves."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        """Return the workers of a role.

        Raises:
            StoreUnavailable: the registry is not reached.
        """
        return await self._registry.workers(role)


class StaticSource:
    """Workers at fixed addresses, asked to describe themselves; one that does not answer is left out."""

    def __init__(self, addresses: Mapping[str, Sequence[str]], channels: Channels, fresh_s: float = 1.0) -> None:
        """Keep the addresses.

        Args:
            addresses: by role, "verify" and "draft".
            channels: to reach them.
            fresh_s: seconds that an answer is used again.
        """
        self._addresses = addresses
        self._channels = channels
        self._fresh_s = fresh_s
        self._known: dict[tuple[str, str], tuple[float, WorkerDescription | None]] = {}
        self._told: dict[str, str] = {}

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        """Return the workers of a role that answer."""
        found = await asyncio.gather(*(self._describe(role, each) for each in self._addresses.get(role, ())))
        return [worker for worker in found if worker is not None]

    async def _describe(self, role: str, address: str) -> WorkerDescription | None:
        asked_s, worker = self._known.get((role, address), (-self._fresh_s, None))
        if time.monotonic() - asked_s < self._fresh_s:
            return worker
        try:
            worker = await describe(role, self._channels.to(address, role))
        except OutriderError as error:
            self._tell(role, address, error)
            worker = None
        else:
            self._told.pop(address, None)
        self._known[role, address] = (time.monotonic(), worker)
        return worker

    def _tell(self, role: str, address: str, error: OutriderError) -> None:
        """Log why a worker is left out, once for each new reason."""
        told = self._told.get(address) == error.message
        self._told[address] = error.message
        log.log(logging.DEBUG if told else logging.WARNING, "%s worker at %s: %s", role, address, error)


async def describe(role: str, to: grpc.aio.Channel) -> WorkerDescription:
    """Ask a worker to describe itself.

    Args:
        role: "verify" or "draft".
        to: channel to it.

    Raises:
        OutriderError: it cannot be reached, does not answer in time, or answers nonsense.
    """
    with rpc_errors():
        if role == "verify":
            request = verify_pb2.VerifyServiceDescribeRequest()
            verify = verify_pb2_grpc.VerifyServiceStub(to)
            return t.description_from_proto((await verify.Describe(request, timeout=DESCRIBE_TIMEOUT_S)).worker)
        draft = draft_pb2_grpc.DraftServiceStub(to)
        answer = await draft.Describe(draft_pb2.DraftServiceDescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)
        return t.description_from_proto(answer.worker)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a session needs of a draft worker."""

    kind: str = ""
    """Kind of drafter; empty: any."""
    length: int = 0
    """Tokens it must hold, so that there is room for at least one more."""
    exclude: Collection[WorkerId] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """What a session needs of a verifier's context, in tokens."""

    needed: int = 0
    """Without so many it cannot begin, or go on."""
    wished: int = 0
    """With fewer it would end earlier than was asked for."""


ANY_ROOM = Room()


@dataclass(slots=True)
class _Break:
    """A worker's failures in a row."""

    count: int = 0
    last_s: float = 0.0
    """When it failed last."""
    until_s: float = 0.0


class Placement:
    """Chooses workers; one per process, shared by all sessions."""

    def __init__(
        self,
        source: WorkerSource,
        channels: Channels,
        vocabulary: Vocabulary | None = None,
        *,
        lot: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep where workers are found.

        Args:
            source: where.
            channels: to reach them; closed by the caller.
            vocabulary: of the tokenizer; verifiers with another one are left out. None: any.
            lot: decides between equals.
            clock: seconds, for breaks after failures.
        """
        self._source = source
        self.channels = channels
        self._pairing = Pairing(channels.to, vocabulary)
        self._lot = lot or random.Random()
        self._clock = clock
        self._breaks: dict[WorkerId, _Break] = {}

    async def verifiers(self, model: str = "") -> list[WorkerDescription]:
        """Return the verifiers that can be placed now, of one model if it is named."""
        found = await self._source.workers("verify")
        return [
            worker
            for worker in found
            if self._usable(worker) and model in ("", worker.model) and self._pairing.speaks(worker)
        ]

    async def drafters(self, verifier: WorkerDescription) -> list[WorkerDescription]:
        """Return the draft workers that can be paired with a verifier now; others are skipped, and named once."""
        return [worker for worker in await self._usable_drafters() if self._pairing.allows(verifier, worker)]

    async def _usable_drafters(self) -> list[WorkerDescription]:
        return [worker for worker in await self._source.workers("draft") if self._usable(worker)]

    def refusal(self, verifier: WorkerDescription) -> str:
        """Return why a draft worker was not paired with a verifier last; empty if all were."""
        return self._pairing.refusal(verifier)

    async def close(self) -> None:
        """End what is under way beside the choices."""
        await self._pairing.close()

    async def choose_verifier(
        self,
        model: str,
        exclude: Collection[WorkerId] = (),
        resident: Mapping[WorkerId, int] | None = None,
        fingerprint: str = "",
        room: Room = ANY_ROOM,
    ) -> WorkerDescription:
        """Choose a verifier: one with room for all, then the engine named, most resident KV, least load, then by lot.

        Args:
            model: its model.
            exclude: workers to avoid; taken all the same if there is no other.
            resident: tokens of the session's KV by worker.
            fingerprint: engine that a seeded session began on.
            room: tokens it must hold, and should.

        Raises:
            InvalidRequest: none has the context for the tokens that it must hold; names the largest.
            Unavailable: there is none.
            StoreUnavailable: the registry is not reached.
        """
        found = await self.verifiers(model)
        fitting = [worker for worker in found if worker.context_len >= room.needed]
        if found and not fitting:
            largest = max(worker.context_len for worker in found)
            allowed = f"1 .. {largest - 1} tokens, earlier turns included"
            raise InvalidRequest("prompt", f"{room.needed - 1} tokens", allowed)
        candidates = [worker for worker in fitting if worker.worker_id not in exclude] or fitting
        kept = resident or {}

        def rank(worker: WorkerDescription) -> tuple[float, ...]:
            moved = fingerprint not in ("", worker.fingerprint)
            short = worker.context_len < room.wished
            return (short, _full(worker), moved, -kept.get(worker.worker_id, 0), _load(worker), self._lot.random())

        for worker in sorted(candidates, key=rank):
            if await self._confirmed(worker):
                return worker
        raise Unavailable(f"no verifier of model {model!r} can be reached")

    async def choose_drafter(self, verifier: WorkerDescription, wanted: Wanted) -> tuple[WorkerDescription | None, str]:
        """Choose a draft worker by load, then by lot.

        Returns:
            The worker, or None and why there is none: "no_drafter", "drafter_context", or "vocabulary" if all there
            are were refused for theirs (`refusal`).

        Raises:
            StoreUnavailable: the registry is not reached.
        """
        usable = await self._usable_drafters()
        paired = [worker for worker in usable if self._pairing.allows(verifier, worker)]
        if usable and not paired:
            return None, "vocabulary"
        found = [
            worker
            for worker in paired
            if worker.worker_id not in wanted.exclude and wanted.kind in ("", worker.drafter)
        ]
        fitting = [worker for worker in found if worker.context_len > wanted.length and not _full(worker)]
        if not fitting:
            return None, "drafter_context" if found and not any(map(_full, found)) else "no_drafter"
        for worker in sorted(fitting, key=lambda worker: (_load(worker), self._lot.random())):
            if await self._confirmed(worker):
                return worker, ""
        return None, "no_drafter"

    def failed(self, worker_id: WorkerId) -> None:
        """Leave a worker out for a while."""
        entry = self._breaks.setdefault(worker_id, _Break())
        pause_s = min(LONGEST_BREAK_S, FIRST_BREAK_S * 2**entry.count)
        entry.count += 1
        entry.last_s = self._clock()
        entry.until_s = entry.last_s + pause_s

    def now_s(self) -> float:
        """Return the time, in seconds on the clock of breaks."""
        return self._clock()

    def succeeded(self, worker_id: WorkerId, opened_s: float) -> None:
        """Forget a worker's failures, unless it failed after the stream that works was opened.

        What a dead worker has sent is still being worked on for a while after its end; nobody may take that for life.

        Args:
            worker_id: the worker.
            opened_s: when the stream was opened, as `now_s`.
        """
        entry = self._breaks.get(worker_id)
        if entry is not None and entry.last_s < opened_s:
            del self._breaks[worker_id]

    async def _confirmed(self, worker: WorkerDescription) -> bool:
        """Whether a worker that has failed before answers under its name again; others are believed.

        What is known of a worker may be older than its end: another process may listen at its address by now, whose
        messages nobody would expect.
        """
        if worker.worker_id not in self._breaks:
            return True
        try:
            answer = await describe(worker.role, self.channels.to(worker.address, worker.role))
        except OutriderError as error:
            log.debug("worker %s does not answer: %s", worker.worker_id, error)
        else:
            if answer.worker_id == worker.worker_id:
                return self._usable(worker)
        self.failed(worker.worker_id)
        return False

    def _usable(self, worker: WorkerDescription) -> bool:
        entry = self._breaks.get(worker.worker_id)
        return not worker.draining and (entry is None or entry.until_s <= self._clock())


def _load(worker: WorkerDescription) -> float:
    return worker.load / max(1, worker.capacity)


def _full(worker: WorkerDescription) -> bool:
    """Whether a worker says it has no room; a capacity of 0 is unknown."""
    return 0 < worker.capacity <= worker.load
