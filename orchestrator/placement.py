"""Which verifier and which draft worker serve a session, and the channels to them.

Workers come from the registry or from fixed addresses. A verifier must have the context for the session, a draft worker
must share the verifier's vocabulary; both are chosen by the KV they hold of the session, unless they are so busy that
they are left for another one, then by load (`orchestrator.choice`). Workers that are draining, excluded by the caller,
or whose circuit is open (`orchestrator.breakers`) are left out; one that has failed has to answer before it is chosen.
Detached draft workers are left out for everybody, those of a sort that loses for whoever does not ask for them, and a
split between sorts goes before KV and load (`orchestrator.steering`).
"""

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import grpc

from orchestrator.breakers import Breakers
from orchestrator.channels import Channels
from orchestrator.choice import in_turn, is_full, is_left, share
from orchestrator.metrics import Metrics
from orchestrator.pairing import Pairing
from orchestrator.shared_view import SharedView, WorkerSource
from orchestrator.steering import Steering
from outrider.codec import types as t
from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider.ids import WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.rpc import rpc_errors
from outrider.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 2.0
PREDICTION = "prediction"
"""Kind of the drafter that follows a client's prediction."""
UNSEEN_S = 2.0
"""How long a session counts as load that a worker has not announced yet: a little more than a heartbeat's pause."""


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

    drafter: str = ""
    """Kind of drafter, or label of workers; empty: any."""
    length: int = 0
    """Tokens it must hold, so that there is room for at least one more."""
    exclude: Collection[WorkerId] = ()
    resident: Mapping[WorkerId, int] = field(default_factory=dict)
    """Tokens of the session's KV by worker."""
    predicted: bool = False
    """Whether there is a prediction: workers that follow predictions come first."""
    session_id: str = ""
    """By which it is assigned to a sort of drafters, if sessions are split between sorts; empty: to none."""
    new: bool = False
    """Whether it begins, so that it may try a drafter that is set aside now and then."""
    insists: bool = False
    """Whether it says itself how far is drafted: it gets drafts, also from a drafter that is set aside."""
    again: bool = False
    """Whether it runs, and looks as many others do: what was read for one of them a moment ago will do."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a session needs of a verifier's context, in tokens."""

    needed: int = 0
    """Without so many it cannot begin, or go on."""
    wished: int = 0
    """With fewer it would end earlier than was asked for."""


ANY_ROOM = Room()
ANY_DRAFTER = Wanted()


class Placement:
    """Chooses workers; one per process, shared by all sessions."""

    def __init__(
        self,
        source: WorkerSource,
        channels: Channels,
        vocabulary: Vocabulary | None = None,
        *,
        breakers: Breakers | None = None,
        steering: Steering | None = None,
        lot: random.Random | None = None,
    ) -> None:
        """Keep where workers are found.

        Args:
            source: where.
            channels: to reach them; closed by the caller.
            vocabulary: of the tokenizer; verifiers with another one are left out. None: any.
            breakers: who is left out after failures; None: new ones, which nobody is told of.
            steering: which drafters are detached, preferred or set aside; None: none, and nobody is told.
            lot: draws between equals; with a seed it draws the same again.
        """
        self._source, self._shared = source, SharedView(source)
        self.channels = channels
        self._pairing = Pairing(channels.to, vocabulary)
        self.breakers = breakers or Breakers()
        self.steering = steering or Steering(Metrics())
        self._lot = lot or random.Random()
        self._probes: WeakValueDictionary[WorkerId, asyncio.Lock] = WeakValueDictionary()
        self._chosen: deque[tuple[float, WorkerId]] = deque()
        self._unseen: Counter[WorkerId] = Counter()
        """Of `_chosen`, by worker."""

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        """Return the workers of a role that are known, also those that are not chosen at present.

        Raises:
            StoreUnavailable: the registry is not reached.
        """
        return await self._source.workers(role)

    async def verifiers(self, model: str = "", *, again: bool = False) -> list[WorkerDescription]:
        """Return the verifiers that can be placed now, of one model if it is named; `again` as in `Wanted`."""
        found = await (self._shared if again else self._source).workers("verify")
        return [
            worker
            for worker in found
            if self._usable(worker) and model in ("", worker.model) and self._pairing.speaks(worker)
        ]

    async def drafters(self, verifier: WorkerDescription, wanted: Wanted = ANY_DRAFTER) -> list[WorkerDescription]:
        """Return the draft workers that can serve a verifier's session now; others are skipped.

        Those with another vocabulary are named once in the log. Of a split session those of the sort that it is
        assigned to, where there are any.
        """
        found = [
            worker
            for worker in await self._usable_drafters(wanted)
            if self._pairing.allows(verifier, worker) and _is_wanted(worker, wanted) and _can_hold(worker, wanted)
        ]
        ranks = [self._split_rank(worker, wanted) for worker in found]
        return [worker for worker, rank in zip(found, ranks, strict=True) if rank == min(ranks)]

    async def _usable_drafters(self, wanted: Wanted) -> list[WorkerDescription]:
        known = await (self._shared if wanted.again else self._source).workers("draft")
        found = [worker for worker in known if self._usable(worker)]
        return [worker for worker in found if not self.steering.policy.why_detached(worker)]

    def _split_rank(self, worker: WorkerDescription, wanted: Wanted) -> int:
        """Return where a worker stands in the split; a request that names a drafter has none."""
        return self.steering.policy.rank(worker, wanted.session_id) if wanted.session_id and not wanted.drafter else 0

    async def offered(self, verifier: WorkerDescription) -> list[str]:
        """Return the drafters that a verifier's session can ask for now, by kind or label, in order of name."""
        found = await self.drafters(verifier)
        return sorted({name for each in found for name in (each.drafter, each.label, *each.drafters) if name})

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
        """Choose a verifier: one with room for all, then the engine named, most resident KV, least load of two.

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
        kept = _held(candidates, resident or {})

        def rank(worker: WorkerDescription) -> tuple[int, ...]:
            moved = fingerprint not in ("", worker.fingerprint)
            return (worker.context_len < room.wished, is_full(worker), moved, -kept.get(worker.worker_id, 0))

        for worker in in_turn(candidates, rank, self._load, self._lot):
            if await self._confirmed(worker):
                return self._take(worker)
        raise Unavailable(f"no verifier of model {model!r} can be reached")

    async def choose_drafter(self, verifier: WorkerDescription, wanted: Wanted) -> tuple[WorkerDescription | None, str]:
        """Choose a draft worker: what it is assigned to, most resident KV, then the least load of two.

        Returns:
            The worker, or None and why there is none: "no_drafter", "drafter_context", "drafter_not_offered" if none
            has what is wanted, "drafter_set_aside" if all there are lose against plain decoding, or "vocabulary" if all
            there are were refused for theirs (`refusal`).

        Raises:
            StoreUnavailable: the registry is not reached.
        """
        usable = await self._usable_drafters(wanted)
        paired = [worker for worker in usable if self._pairing.allows(verifier, worker)]
        if usable and not paired:
            return None, "vocabulary"
        if paired and not any(worker.offers(wanted.drafter) for worker in paired):
            return None, "drafter_not_offered"
        found = [worker for worker in paired if _is_wanted(worker, wanted)]
        fitting = [worker for worker in found if _can_hold(worker, wanted) and not is_full(worker)]
        if not fitting:
            return None, "drafter_context" if found and not any(map(is_full, found)) else "no_drafter"
        if not (wanted.drafter or wanted.insists):
            fitting = self.steering.trusted(fitting, new=wanted.new)
        for worker in self._in_turn(fitting, wanted):
            if await self._confirmed(worker):
                if wanted.new:
                    self.steering.given(worker)
                return self._take(worker), ""
        return None, "no_drafter" if fitting else "drafter_set_aside"

    def _in_turn(self, fitting: Sequence[WorkerDescription], wanted: Wanted) -> Iterator[WorkerDescription]:
        """Return draft workers in the order in which they are tried."""
        kept = _held(fitting, wanted.resident)

        def rank(worker: WorkerDescription) -> tuple[int, ...]:
            unread = wanted.predicted and not worker.offers(PREDICTION)
            return (unread, self._split_rank(worker, wanted), -kept.get(worker.worker_id, 0))

        return in_turn(fitting, rank, self._load, self._lot)

    async def _confirmed(self, worker: WorkerDescription) -> bool:
        """Whether a worker that has failed before answers under its name again; others are believed.

        What is known of a worker may be older than its end: another process may listen at its address by now, whose
        messages nobody would expect.
        """
        breakers, worker_id = self.breakers, worker.worker_id
        if not breakers.doubts(worker_id):
            return True
        async with self._probes.setdefault(worker_id, asyncio.Lock()):
            if not breakers.allows(worker_id):
                return False  # somebody else has asked meanwhile
            breakers.probing(worker_id)
            if await self._answers(worker):
                return True
            breakers.failed(worker_id)
            return False

    async def _answers(self, worker: WorkerDescription) -> bool:
        """Whether a worker answers under its name, and takes sessions."""
        try:
            answer = await describe(worker.role, self.channels.to(worker.address, worker.role))
        except OutriderError as error:
            log.debug("worker %s does not answer: %s", worker.worker_id, error)
            return False
        return answer.worker_id == worker.worker_id and not answer.draining

    def _usable(self, worker: WorkerDescription) -> bool:
        return not worker.draining and self.breakers.allows(worker.worker_id)

    def _take(self, worker: WorkerDescription) -> WorkerDescription:
        """Remember a choice that the worker's own figures do not show yet."""
        self._chosen.append((self.breakers.now_s() + UNSEEN_S, worker.worker_id))
        self._unseen[worker.worker_id] += 1
        return worker

    def _load(self, worker: WorkerDescription) -> float:
        """Return a worker's share of its capacity, with what it was given a moment ago."""
        while self._chosen and self._chosen[0][0] <= self.breakers.now_s():
            self._forget(self._chosen.popleft()[1])
        return share(worker) + self._unseen[worker.worker_id] / max(1, worker.capacity)

    def _forget(self, worker_id: WorkerId) -> None:
        """The worker's own figures show a choice by now."""
        self._unseen[worker_id] -= 1
        if not self._unseen[worker_id]:
            del self._unseen[worker_id]


def _held(candidates: Sequence[WorkerDescription], resident: Mapping[WorkerId, int]) -> dict[WorkerId, int]:
    """Return what KV counts: not that of a worker which is left for another candidate."""
    return {
        worker.worker_id: resident[worker.worker_id]
        for worker in candidates
        if worker.worker_id in resident and not is_left(worker, candidates)
    }


def _can_hold(worker: WorkerDescription, wanted: Wanted) -> bool:
    return worker.context_len > wanted.length


def _is_wanted(worker: WorkerDescription, wanted: Wanted) -> bool:
    return worker.worker_id not in wanted.exclude and worker.offers(wanted.drafter)
