"""The registry: which workers there are, each under a time to live that its heartbeat renews.

Per role there is an index (worker id by expiry) and a hash of descriptions, both under one hash tag, so that each
operation is one script in one cluster slot. Expiry goes by the server's clock alone.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from outrider.errors import InvalidRequest, StoreUnavailable
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription
from outrider.store.connect import ScriptRunner, StoreClient
from outrider.store.encoding import decode_worker, encode_worker
from outrider.store.errors import StateUnreadable

ROLES = ("verify", "draft", "orchestrate")

log = logging.getLogger(__name__)


class Registry:
    """Descriptions of the live workers; every method is idempotent and may raise `StoreUnavailable` in `deadline_s`."""

    def __init__(self, client: StoreClient, *, deadline_s: float = 3.0, prefix: str = "outrider") -> None:
        """Keep the client, which the caller closes.

        Args:
            client: from `outrider.store.connect.open_client`.
            deadline_s: most seconds one call may take.
            prefix: first part of every key.
        """
        self._scripts = ScriptRunner(client, deadline_s=deadline_s, with_prelude=False)
        self._prefix = prefix
        self._unreadable: set[bytes] = set()

    async def announce(self, worker: WorkerDescription, ttl_s: float) -> None:
        """Write or renew a worker's description; it is gone `ttl_s` seconds from now unless announced again.

        Raises:
            InvalidRequest: the role is unknown.
            ValueError: `ttl_s` is not positive.
        """
        if not ttl_s > 0:
            raise ValueError(f"ttl_s must be positive, not {ttl_s}")
        args = [worker.worker_id, encode_worker(worker), max(1, round(ttl_s * 1000))]
        await self._run("announce", worker.role, args)

    async def withdraw(self, worker_id: WorkerId) -> bool:
        """Remove a worker, whatever its role; return whether it was there."""
        replies = [await self._run("withdraw", role, [worker_id]) for role in ROLES]
        return any(replies)

    async def leave(self, worker_id: WorkerId) -> None:
        """Withdraw a worker that ends; where the store cannot be told, its entry runs out by itself."""
        try:
            await self.withdraw(worker_id)
        except StoreUnavailable as error:
            log.info("worker %s stays in the registry until its time runs out: %s", worker_id, error)

    async def workers(self, role: str) -> list[WorkerDescription]:
        """Return the workers of a role whose time has not run out, by worker id.

        A description that this version cannot read is left out, and logged once.

        Raises:
            InvalidRequest: the role is unknown.
        """
        entries = await self._run("workers", role, [])
        found = [self._decoded(worker_id, raw) for worker_id, raw in zip(entries[::2], entries[1::2], strict=True)]
        return sorted((worker for worker in found if worker), key=lambda worker: worker.worker_id)

    def _decoded(self, worker_id: bytes, raw: bytes) -> WorkerDescription | None:
        try:
            return decode_worker(raw)
        except StateUnreadable as error:
            if worker_id not in self._unreadable:
                log.warning("worker %s is left out: %s", worker_id.decode(), error)
                self._unreadable.add(worker_id)
            return None

    async def _run(self, name: str, role: str, args: list[Any]) -> Any:
        if role not in ROLES:
            raise InvalidRequest("role", role, f"one of {', '.join(ROLES)}")
        keys = [f"{self._prefix}:workers:{{{role}}}:{part}" for part in ("index", "descriptions")]
        reply = await self._scripts.run(name, keys, args, idempotent=True)
        return reply[1] if len(reply) > 1 else None


async def keep_announced(registry: Registry, describe: Callable[[], WorkerDescription], ttl_s: float) -> None:
    """Announce a worker now and every third of `ttl_s` seconds, with its description of that moment, until cancelled.

    An outage of the store is logged when it begins and when it ends, and outlived. Every other error ends the heartbeat
    and reaches the caller, whose `TaskGroup` this runs in. Nothing is withdrawn at the end: the caller drains first.

    Args:
        registry: where to announce.
        describe: returns the worker's present description; called once per announcement, must not block.
        ttl_s: seconds that an announcement holds.
    """
    reachable = True
    while True:
        worker = describe()
        try:
            await registry.announce(worker, ttl_s)
        except StoreUnavailable as error:
            if reachable:
                log.warning("worker %s cannot be announced, trying on: %s", worker.worker_id, error)
            reachable = False
        else:
            if not reachable:
                log.info("worker %s is announced again", worker.worker_id)
            reachable = True
        await asyncio.sleep(ttl_s / 3)
