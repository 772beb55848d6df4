"""The channels to workers: one per address and role, opened anew when the certificate files have changed.

A channel reconnects with what it was opened with, so that one kept for ever would come to an end with its certificate.
The streams on a channel that has been replaced go on; it is closed when the longest of them must be over. So is the
channel that was asked for longest ago where there are many: workers come back at other addresses, and nobody says
which of the old ones are gone for good.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

import grpc

from outrider.certificates import Pem
from outrider.rpc import ClientTls, channel

RETIRED_S = 3600.0
"""How long a replaced channel stays open: as long as a generation may take."""
MAX_CHANNELS = 1024
"""Channels that are kept; a cluster has fewer workers than that."""


class Channels:
    """Needs a running event loop; close it at the end."""

    def __init__(self, tls: Mapping[str, ClientTls] | None = None, retired_s: float = RETIRED_S) -> None:
        """Open nothing yet.

        Args:
            tls: by the role of the worker, "verify" or "draft"; empty: plaintext.
            retired_s: how long a replaced channel stays open.
        """
        self._tls = tls or {}
        self._retired_s = retired_s
        self._channels: OrderedDict[tuple[str, str], tuple[grpc.aio.Channel, Pem | None]] = OrderedDict()
        self._retired: dict[grpc.aio.Channel, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, address: str, role: str) -> grpc.aio.Channel:
        """Return the channel to a worker of a role at an address; it connects with its first call."""
        tls = self._tls.get(role)
        version = tls.version if tls else None
        known = self._channels.get((address, role))
        if known is not None and known[1] is version:
            self._channels.move_to_end((address, role))
            return known[0]
        if known is not None:
            self._retire(known[0])
        opened = channel(address, tls=tls)
        self._channels[address, role] = (opened, version)
        self._channels.move_to_end((address, role))
        if len(self._channels) > MAX_CHANNELS:
            self._retire(self._channels.popitem(last=False)[1][0])
        return opened

    @property
    def num_retired(self) -> int:
        """Channels that are replaced, or dropped, and still open."""
        return len(self._retired)

    async def close(self) -> None:
        """Close all; calls that run are cancelled."""
        for handle in self._retired.values():
            handle.cancel()
        every = [*(each for each, _ in self._channels.values()), *self._retired]
        self._channels, self._retired = OrderedDict(), {}
        await asyncio.gather(*(each.close() for each in every), *self._closing)

    def _retire(self, replaced: grpc.aio.Channel) -> None:
        loop = asyncio.get_running_loop()
        self._retired[replaced] = loop.call_later(self._retired_s, self._close_retired, replaced)

    def _close_retired(self, replaced: grpc.aio.Channel) -> None:
        del self._retired[replaced]
        task = asyncio.get_running_loop().create_task(replaced.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
