"""A worker's entry in the registry, for as long as its process serves."""

import logging
from collections.abc import Callable

from outrider.certificates import TlsMaterial
from outrider.errors import StoreUnavailable
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription
from outrider.store.connect import open_client
from outrider.store.registry import Registry, keep_announced

log = logging.getLogger(__name__)


class Presence:
    """Announces one worker. Without a store there is nobody to tell, and nothing is done."""

    def __init__(
        self,
        worker_id: WorkerId,
        describe: Callable[[], WorkerDescription],
        store_url: str,
        ttl_s: float,
        tls: TlsMaterial | None = None,
    ) -> None:
        """Tell nobody yet.

        Args:
            worker_id: of the worker.
            describe: returns its present description; must not block.
            store_url: of the registry's store; empty: there is none.
            ttl_s: seconds that an announcement holds.
            tls: with the store; None: as its URL says.
        """
        self._worker_id, self._describe = worker_id, describe
        self._url, self._ttl_s, self._tls = store_url, ttl_s, tls
        self._registry: Registry | None = None

    async def keep(self) -> None:
        """Keep the worker announced until cancelled, then take it out."""
        if not self._url:
            return
        client = open_client(self._url, tls=self._tls)
        registry = self._registry = Registry(client)
        try:
            try:
                await keep_announced(registry, self._describe, self._ttl_s)
            finally:
                await registry.leave(self._worker_id)
        finally:
            await client.aclose()

    async def renew(self) -> None:
        """Announce at once what is new, such as that the worker drains; an outage of the store is logged."""
        if self._registry is None:
            return
        try:
            await self._registry.announce(self._describe(), self._ttl_s)
        except StoreUnavailable as error:
            log.warning("nobody could be told what is new of worker %s: %s", self._worker_id, error)
