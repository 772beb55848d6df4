"""The tier's commands to its server: one key and one write per block, one script per change, every call bounded.

Keys: `outrider:kv:{<namespace>}:<key in hex>` for blocks, `...:index` for a sorted set of their names by expiry, which
is the tier's own accounting. Blobs of megabytes delay other clients of a server, so it should be one of its own.
"""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,  # noqa: A004  (the library's own names; they are not the built-in ones)
    OutOfMemoryError,
    RedisError,
    TimeoutError,  # noqa: A004
)
from redis.retry import Retry

from outrider.certificates import TlsMaterial
from outrider.store.tls import StoreTls, connect_blocking_by

PREFIX = "outrider:kv"


class TierError(Exception):
    """The server did not do what it was asked to; `reason` is for counting."""

    def __init__(self, reason: str, message: str) -> None:
        """Keep both.

        Args:
            reason: "unreachable", "timeout", "full" or "refused".
            message: what happened.
        """
        super().__init__(message)
        self.reason = reason


class BlockServer:
    """A connection of one thread. Nothing is connected until the first call; a broken connection is made anew."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        ttl_s: float,
        max_blocks: int,
        timeout_s: float,
        tls: TlsMaterial | None = None,
    ) -> None:
        """Keep what is needed.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            namespace: of the blocks; others are never touched.
            ttl_s: how long a block stays after it was last of use.
            max_blocks: most blocks of this namespace.
            timeout_s: longest wait for a connection, and for the next bytes of a reply.
            tls: CA and certificate for `rediss://`; None: what the URL names, or the system's CAs and no certificate.
        """
        self._client: Any = Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0), protocol=2
        )
        if tls is not None:
            connect_blocking_by(StoreTls(tls), self._client.connection_pool)
        self._base = f"{PREFIX}:{{{namespace}}}:"
        self._ttl_ms = int(ttl_s * 1000)
        self._max_blocks = max_blocks
        self._put, self._touch, self._drop = (self._client.register_script(_text(n)) for n in ("put", "touch", "drop"))

    def ping(self) -> None:
        """Connect, so that the first load does not have to.

        Raises:
            TierError: no answer.
        """
        self._call(self._client.ping)

    def put(self, key: bytes, blob: memoryview) -> int:
        """Store a block; return how many others had to go for it.

        Raises:
            TierError: it is not known whether it is stored.
        """
        name = key.hex()
        given: Any = [blob, name, self._ttl_ms, self._max_blocks, self._base]
        return int(self._call(lambda: self._put(keys=[self._index, self._base + name], args=given)))

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return blocks, or None for those that are not there.

        Raises:
            TierError: no answer.
        """
        names = [self._base + key.hex() for key in keys]
        return list(self._call(lambda: self._client.mget(names)))

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Give blocks of one text, in order, their whole TTL again; say which are there.

        Raises:
            TierError: no answer.
        """
        names = [key.hex() for key in keys]
        where = [self._index, *(self._base + name for name in names)]
        return [bool(found) for found in self._call(lambda: self._touch(keys=where, args=[self._ttl_ms, *names]))]

    def drop(self, key: bytes) -> None:
        """Delete a block.

        Raises:
            TierError: no answer.
        """
        self._call(lambda: self._drop(keys=[self._index, self._base + key.hex()], args=[key.hex()]))

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._client.close()

    @property
    def _index(self) -> str:
        return self._base + "index"

    def _call(self, command: Any) -> Any:
        try:
            return command()
        except TimeoutError as error:
            raise TierError("timeout", str(error)) from error
        except OutOfMemoryError as error:
            raise TierError("full", str(error)) from error
        except (ConnectionError, BusyLoadingError, OSError) as error:
            raise TierError("unreachable", str(error)) from error
        except RedisError as error:
            raise TierError("refused", str(error)) from error


@cache
def _text(name: str) -> str:
    return (files("outrider.tier.scripts") / f"{name}.lua").read_text("utf-8")
