"""Clients of the store's server, and the one place that runs a script on it within a bounded time."""

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ClusterError,
    ConnectionError,  # noqa: A004  (the library's own name; it is not the built-in one)
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,  # noqa: A004
    TryAgainError,
)

from outrider.certificates import TlsMaterial
from outrider.errors import InvalidRequest, StoreError, StoreUnavailable
from outrider.store.sending import Argument, Batches, heeding_cancellation
from outrider.store.tls import StoreTls, connect_by, connect_cluster_by

StoreClient: TypeAlias = Redis | RedisCluster

CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
"""URL schemes of a cluster -> the scheme redis-py knows."""
SINGLE_SCHEMES = ("redis", "rediss", "unix")

FIRST_PAUSE_S = 0.05
"""Seconds before a script is tried again, at most; twice as long before each further try."""
LONGEST_PAUSE_S = 0.5

REFUSED = (BusyLoadingError, ReadOnlyError, OutOfMemoryError, ClusterDownError, TryAgainError)
"""The server is starting, a replica by now, full, or in the middle of a failover: it has done nothing."""

REFUSED_WORDS = re.compile(r"^(BUSY|MISCONF|NOREPLICAS|UNKILLABLE)\b|-(OOM|READONLY|MISCONF|NOREPLICAS)\b")
"""Replies with the same meaning that redis-py has no class for; up to version 6 the word stands inside the reply."""

UNREACHED = (ConnectionError, TimeoutError, ClusterError, RedisClusterException, OSError)
"""The server is away: the script may have run or not."""


def open_client(
    url: str, *, timeout_s: float = 2.0, max_connections: int = 32, tls: TlsMaterial | None = None
) -> StoreClient:
    """Make a client; nothing is connected yet. Close it with `await client.aclose()`.

    redis-py's own repeats are off, since they include writes whose reply was lost; `ScriptRunner` repeats what is safe.

    Args:
        url: `redis://host:port/db`, `rediss://…`, `unix:///path?db=0`, `redis+cluster://host:port` or `rediss+cluster://…`.
        timeout_s: seconds to wait for a free connection, for connecting, and for each reply.
        max_connections: most connections (per node of a cluster); callers beyond that wait.
        tls: CA and certificate for a `rediss` scheme; None: the system's CAs, and no certificate.

    Raises:
        InvalidRequest: the scheme is none of these.
    """
    parts = urlsplit(url)
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": max_connections,
        "protocol": 2,  # replies have one shape on every server version
    }
    if parts.scheme in CLUSTER_SCHEMES:
        plain = urlunsplit(parts._replace(scheme=CLUSTER_SCHEMES[parts.scheme]))
        cluster = RedisCluster.from_url(plain, **options)
        if tls is not None:
            connect_cluster_by(StoreTls(tls), cluster)
        return cluster
    if parts.scheme in SINGLE_SCHEMES:
        pool = BlockingConnectionPool.from_url(url, timeout=timeout_s, **options)
        if tls is not None:
            connect_by(StoreTls(tls), pool)
        return Redis.from_pool(pool)
    allowed = ", ".join((*SINGLE_SCHEMES, *CLUSTER_SCHEMES))
    raise InvalidRequest("store url", url, f"a URL with scheme {allowed}")


class ScriptRunner:
    """Runs the store's Lua scripts; every failure to be answered in time is `StoreUnavailable`."""

    def __init__(self, client: StoreClient, *, deadline_s: float, with_prelude: bool = True) -> None:
        """Keep the client.

        Args:
            client: from `open_client`.
            deadline_s: most seconds a call may take, its repeat included.
            with_prelude: False for the registry's scripts, whose keys are others.
        """
        self._client = client
        self._deadline_s = deadline_s
        self._with_prelude = with_prelude
        # A cluster's client takes no scripts in its pipelines.
        self._batches = Batches(client) if isinstance(client, Redis) else None

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument], *, idempotent: bool) -> Any:
        """Run `scripts/<name>.lua` and return its reply, a list whose first item is a status word.

        While the server cannot answer it is asked again, with growing pauses, up to the deadline.

        Args:
            name: the script's file name without `.lua`.
            keys: all keys it touches, of one hash slot.
            args: its ARGV.
            idempotent: whether it may run again when the reply was lost.

        Raises:
            StoreUnavailable: not reached, or no answer within the deadline; a write may have happened.
            StoreError: the server refused the script itself.
        """
        script = _script(name, self._with_prelude)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._until_answered(script, keys, args, idempotent)
        except (RedisError, OSError) as error:
            if _refused(error):
                raise StoreUnavailable(f"the session store refuses {name} for now: {_words(error)}") from error
            if isinstance(error, UNREACHED):
                raise StoreUnavailable(f"the session store did not answer ({name}): {_words(error)}") from error
            raise StoreError(f"the session store refused {name}: {error}") from error

    async def _until_answered(
        self, script: tuple[str, str], keys: Sequence[str], args: Sequence[Argument], idempotent: bool
    ) -> Any:
        give_up_s, pause_s = time.monotonic() + self._deadline_s, FIRST_PAUSE_S
        while True:
            try:
                return await self._send(*script, keys, args)
            except (RedisError, OSError) as error:
                repeatable = _refused(error) or (idempotent and isinstance(error, UNREACHED))
                if not repeatable or time.monotonic() + pause_s > give_up_s:
                    raise
                await self._let_go(error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _let_go(self, error: Exception) -> None:
        """Close idle connections to a server that is no master any more.

        It would go on refusing for as long as they are open, while the address leads to its successor by now. The
        client of a cluster follows its nodes by itself.
        """
        if isinstance(self._client, Redis) and _means(error, ReadOnlyError, "READONLY"):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def _send(self, text: str, sha: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        # EVALSHA with EVAL behind it: unlike SCRIPT LOAD, EVAL is routed by its keys to the right node of a cluster.
        command: Any = self._client
        try:
            if self._batches is not None:
                return await self._batches.evalsha(sha, len(keys), *keys, *args)
            return await heeding_cancellation(command.evalsha(sha, len(keys), *keys, *args))
        except NoScriptError:
            return await heeding_cancellation(command.eval(text, len(keys), *keys, *args))


@cache
def _script(name: str, with_prelude: bool) -> tuple[str, str]:
    """Return a script's text and its SHA-1."""
    folder = files("outrider.store.scripts")
    clock = (folder / "clock.lua").read_text("utf-8")
    prelude = (folder / "prelude.lua").read_text("utf-8") if with_prelude else ""
    text = clock + prelude + (folder / f"{name}.lua").read_text("utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _refused(error: Exception) -> bool:
    """Whether the server has answered that it can do nothing now, and has done nothing."""
    return isinstance(error, REFUSED) or REFUSED_WORDS.search(str(error)) is not None


def _means(error: Exception, kind: type[Exception], word: str) -> bool:
    """Whether an error is of a kind, or wraps its word as servers up to version 6 do for scripts."""
    return isinstance(error, kind) or f"-{word} " in str(error)


def _words(error: BaseException) -> str:
    """Return the error's text, or its class where it has none, as a plain timeout."""
    return str(error) or type(error).__name__
