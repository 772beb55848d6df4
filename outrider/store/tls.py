"""TLS with the store, from files that are read again when they change.

redis-py gives a connection its certificate files once, for all its reconnects. Here every connect asks anew, so that a
connection that comes back after a rotation comes back with the new certificate.
"""

import socket
import ssl
from collections.abc import Mapping
from typing import Any

import redis
from redis.asyncio import ConnectionPool, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode

from outrider.certificates import Pem, TlsMaterial


class StoreTls:
    """The context of connections to the store, made again when the files have changed."""

    def __init__(self, material: TlsMaterial) -> None:
        """Keep the files; without a CA among them, those of the system are trusted."""
        self._material = material
        self._made: tuple[Pem, ssl.SSLContext] | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context for the files as they are now; the server's name is always checked.

        Raises:
            OSError: a file has gone in this very moment.
        """
        pem = self._material.current()
        if self._made is None or self._made[0] is not pem:
            self._made = (pem, self._context(pem))
        return self._made[1]

    def _context(self, pem: Pem) -> ssl.SSLContext:
        made = ssl.create_default_context(cadata=pem.ca.decode() if pem.ca else None)
        if pem.cert:
            # The library takes paths only; what is there was found whole a moment ago.
            made.load_cert_chain(self._material.files.cert.path, self._material.files.key.path, _no_password)
        return made


class TlsConnection(SSLConnection):
    """A connection of redis-py with our context."""

    def __init__(self, *, store_tls: StoreTls, **options: Any) -> None:
        """Keep the context's maker."""
        super().__init__(**options)
        self._store_tls = store_tls

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super(SSLConnection, self)._connection_arguments(), "ssl": self._store_tls.context()}


class BlockingTlsConnection(redis.SSLConnection):
    """The same for threads that wait."""

    def __init__(self, *, store_tls: StoreTls, **options: Any) -> None:
        """Keep the context's maker."""
        super().__init__(**options)
        self._store_tls = store_tls

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return self._store_tls.context().wrap_socket(sock, server_hostname=self.host)


def connect_blocking_by(tls: StoreTls, pool: redis.ConnectionPool) -> None:
    """Let a pool, before it is used, make connections of ours."""
    pool.connection_class = BlockingTlsConnection
    pool.connection_kwargs["store_tls"] = tls


def connect_by(tls: StoreTls, maker: ConnectionPool | ClusterNode) -> None:
    """Let a pool or node, before it is used, make connections of ours; from a URL it takes no class but its own."""
    maker.connection_class = TlsConnection
    maker.connection_kwargs["store_tls"] = tls


def connect_cluster_by(tls: StoreTls, client: RedisCluster) -> None:
    """Do the same for the nodes that a cluster's client knows, and for those that it will learn of."""
    client.connection_kwargs.update({"connection_class": TlsConnection, "store_tls": tls})
    for node in client.startup_nodes:
        connect_by(tls, node)


def _no_password() -> str:
    """Answer OpenSSL's question for a password, which would else be put to a terminal."""
    return ""
