"""Which workers speak the same token ids. Fingerprints decide, at once; why two differ is found out beside what runs.

Neither side of a pair has the other's map, so both are asked for theirs, once per pair of maps, and the lowest id that
means different tokens is named from then on.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from outrider.codec.tokens import token_map_from_proto
from outrider.errors import FailedPrecondition, OutriderError, VocabularyMismatch
from outrider.ids import WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.model.vocabulary import first_difference
from outrider.rpc import rpc_errors
from outrider.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

log = logging.getLogger(__name__)

MAPS_TIMEOUT_S = 10.0
"""How long a worker may take to tell its map."""
RETRY_S = 30.0
"""Pause after maps that could not be had."""


def check_pair(verifier: WorkerDescription, drafter: WorkerDescription, difference: str = "") -> None:
    """Require that two workers share the token -> id map, and that a drafter can read what features it needs.

    Padded sizes play no part. Models of one family share their map, but not their width.

    Args:
        verifier: the one.
        drafter: the other.
        difference: what is known of how their maps differ.

    Raises:
        VocabularyMismatch: they do not; names both.
        FailedPrecondition: the drafter reads hidden states of another width than the target's.
    """
    ours, theirs = verifier.vocabulary, drafter.vocabulary
    if ours.fingerprint != theirs.fingerprint:
        raise VocabularyMismatch(
            f"draft worker {drafter.worker_id} ({drafter.model}, {theirs.size} ids, map {theirs.fingerprint[:12]}) and "
            f"verifier {verifier.worker_id} ({verifier.model}, {ours.size} ids, map {ours.fingerprint[:12]}) have "
            f"different vocabularies{': ' if difference else ''}{difference}"
        )
    reads, has = drafter.attributes.get("feature_size"), verifier.attributes.get("hidden_size")
    if reads and has and reads != has:
        raise FailedPrecondition(
            f"draft worker {drafter.worker_id} ({drafter.drafter} for {drafter.model}) reads states {reads} wide, "
            f"those of verifier {verifier.worker_id} ({verifier.model}) are {has} wide"
        )


async def token_map(worker: WorkerDescription, to: grpc.aio.Channel) -> dict[str, int]:
    """Ask a worker for its map: token -> id.

    Args:
        worker: its role counts.
        to: channel to it.

    Raises:
        OutriderError: it cannot be reached, does not answer in time, or does not tell.
    """
    answer: verify_pb2.VerifyServiceDescribeResponse | draft_pb2.DraftServiceDescribeResponse
    with rpc_errors():
        if worker.role == "verify":
            verify = verify_pb2_grpc.VerifyServiceStub(to)
            request = verify_pb2.VerifyServiceDescribeRequest(with_tokens=True)
            answer = await verify.Describe(request, timeout=MAPS_TIMEOUT_S)
        else:
            draft = draft_pb2_grpc.DraftServiceStub(to)
            asked = draft_pb2.DraftServiceDescribeRequest(with_tokens=True)
            answer = await draft.Describe(asked, timeout=MAPS_TIMEOUT_S)
    return await asyncio.to_thread(token_map_from_proto, answer.tokens)


class Pairing:
    """Who speaks what; one per process. Its methods that are no coroutines need a running event loop."""

    def __init__(self, reach: Callable[[str, str], grpc.aio.Channel], vocabulary: Vocabulary | None = None) -> None:
        """Know no worker yet.

        Args:
            reach: returns the channel to an address and role.
            vocabulary: of the tokenizer; None: any.
        """
        self._reach, self._vocabulary = reach, vocabulary
        self._differences: dict[tuple[str, str], str] = {}
        """By fingerprints, verifier's first."""
        self._looked_s: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals: dict[WorkerId, str] = {}
        self._told: set[str] = set()

    def speaks(self, verifier: WorkerDescription) -> bool:
        """Whether a verifier has the tokenizer's vocabulary; one that has not is named once in the log."""
        ours, theirs = self._vocabulary, verifier.vocabulary
        if ours is None or ours.fingerprint == theirs.fingerprint:
            return True
        self._tell_once(
            f"verifier {verifier.worker_id} ({verifier.model}) has another vocabulary than the tokenizer: map "
            f"{theirs.fingerprint[:12]}, not {ours.fingerprint[:12]}"
        )
        return False

    def allows(self, verifier: WorkerDescription, drafter: WorkerDescription) -> bool:
        """Whether two workers fit each other; if not, both are named once in the log, and once more with why."""
        pair = (verifier.vocabulary.fingerprint, drafter.vocabulary.fingerprint)
        try:
            check_pair(verifier, drafter, self._differences.get(pair, ""))
        except FailedPrecondition as error:
            self._refusals[verifier.worker_id] = error.message
            self._tell_once(error.message)
            if isinstance(error, VocabularyMismatch):
                self._look_once(pair, verifier, drafter)
            return False
        return True

    def refusal(self, verifier: WorkerDescription) -> str:
        """Return why a draft worker was refused for a verifier last, in a sentence; empty if none was."""
        return self._refusals.get(verifier.worker_id, "")

    async def close(self) -> None:
        """End the questions that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _look_once(self, pair: tuple[str, str], verifier: WorkerDescription, drafter: WorkerDescription) -> None:
        """Find out in a task how two maps differ, unless that is known or was tried a moment ago."""
        now_s = time.monotonic()
        if pair in self._differences or now_s - self._looked_s.get(pair, -RETRY_S) < RETRY_S:
            return
        self._looked_s[pair] = now_s
        task = asyncio.get_running_loop().create_task(self._look(pair, verifier, drafter))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, pair: tuple[str, str], verifier: WorkerDescription, drafter: WorkerDescription) -> None:
        try:
            ours = await token_map(verifier, self._reach(verifier.address, verifier.role))
            theirs = await token_map(drafter, self._reach(drafter.address, drafter.role))
        except OutriderError as error:
            log.info("how %s and %s differ is not known: %s", verifier.worker_id, drafter.worker_id, error)
            return
        found = await asyncio.to_thread(first_difference, theirs, ours)
        if found is None:
            log.warning("%s and %s tell one map, under two fingerprints", verifier.worker_id, drafter.worker_id)
            return
        token_id, draft_token, target_token = found
        self._differences[pair] = (
            f"id {token_id} is {_named(draft_token)} to the draft worker and {_named(target_token)} to the verifier"
        )
        self.allows(verifier, drafter)

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("not paired: %s", text)


def _named(token: str | None) -> str:
    return "no token" if token is None else repr(token)
