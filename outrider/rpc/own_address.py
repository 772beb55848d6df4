"""Which address a process tells others of itself.

A container listens on all of its interfaces and cannot know beforehand which address it will be given. The one that
others reach it at is the one with which it reaches the store, since all services meet there.
"""

import asyncio
import socket
from urllib.parse import urlsplit

from outrider.errors import Unavailable

STORE_PORT = 6379
"""Of a store whose URL names none."""
_EVERY_INTERFACE = {"": socket.AF_INET, "0.0.0.0": socket.AF_INET, "::": socket.AF_UNSPEC}


async def advertised(setting: str, listening: str, store_url: str) -> str:
    """Return the address to announce.

    Args:
        setting: what the operator wants announced; empty: nothing in particular.
        listening: where the process listens, host:port or unix:path, with the real port.
        store_url: the store's; a local or unset one means that all services are on this machine.

    Raises:
        Unavailable: it listens on every interface, and which of them leads to the store cannot be told.
    """
    host, _, port = listening.rpartition(":")
    family = _EVERY_INTERFACE.get(host.strip("[]"))
    if setting or listening.startswith("unix:") or family is None:
        return setting or listening
    store = urlsplit(store_url)
    if not store.hostname or store.scheme == "unix":
        return f"127.0.0.1:{port}"
    own = await _facing(store.hostname, store.port or STORE_PORT, family)
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


async def _facing(host: str, port: int, family: socket.AddressFamily) -> str:
    """Return this machine's address on the way to a host; nothing is sent."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(
            f"no address to announce: the store's host {host} is not known or not reached ({error}); set ADVERTISE"
        ) from error
