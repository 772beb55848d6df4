"""The HTTP server: uvicorn on a socket of ours, in the event loop of the process, with limits that it lacks.

It never touches signals: whoever runs the process says when it stops.
"""

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from orchestrator.http.app import make_app
from orchestrator.http.connection import Connection
from orchestrator.http.front import Front
from orchestrator.http.guard import Guard, cors_headers
from outrider.certificates import Pem, TlsMaterial
from outrider.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

BACKLOG = 1024
SHUTDOWN_S = 1.0
"""How long uvicorn may take to end when nothing runs."""


class HttpServer:
    """Serves the HTTP front door from `start` to `stop`."""

    def __init__(self, front: Front, tls: TlsMaterial | None = None) -> None:
        """Make a server that does not listen yet.

        Args:
            front: what it answers with.
            tls: its certificate, and whose certificates clients must have; None: plaintext.
        """
        self._tls = tls
        limits = front.limits
        guarded: ASGIApp = Guard(make_app(front), limits, front.metrics.http_responses)
        if limits.cors_origins:
            guarded = CORSMiddleware(
                guarded,
                allow_origins=limits.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=list(cors_headers()),
            )
        self._config = uvicorn.Config(
            guarded,
            http=cast(type[asyncio.Protocol], partial(Connection, limits)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(limits.keep_alive_s),
            h11_max_incomplete_event_size=limits.max_head_bytes,
        )
        self._server = _Server(self._config)
        self._serving: asyncio.Task[None] | None = None
        self.address = ""
        """Where it listens, once started."""

    async def start(self, listen: str) -> str:
        """Listen and serve; return the address, with the real port.

        Args:
            listen: host:port (port 0 takes a free one) or unix:path.

        Raises:
            Unavailable: the address is not free, or not one that can be listened on.
            InvalidRequest: it is no address.
        """
        taken = _bind(listen)
        self._config.load()
        if self._tls is not None:
            self._config.ssl = _following(self._tls)
        self.address = _address(listen, taken)
        if self._tls is None and not _is_local(taken):
            log.warning("%s takes plaintext from other machines, for no TLS is set up", self.address)
        self._serving = asyncio.create_task(self._server.serve([taken]), name="http")
        await self._server.up.wait()
        log.info("OpenAI's API at %s://%s/v1", "https" if self._tls is not None else "http", self.address)
        return self.address

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more connections, let responses end for a while, then cut them off. Idempotent.

        Args:
            grace_s: how long responses may go on.
        """
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._server.should_exit = True
        self._config.timeout_graceful_shutdown = max(1, math.ceil(grace_s))
        if grace_s <= 0:
            self._cut_off()
        await asyncio.wait({serving}, timeout=grace_s + SHUTDOWN_S)
        self._cut_off()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    def _cut_off(self) -> None:
        """End all connections, and what runs for them, without a word."""
        state = self._server.server_state
        for task in tuple(state.tasks):
            task.cancel()
        for connection in tuple(state.connections):
            connection.transport.abort()


class _Server(uvicorn.Server):
    """Leaves signals to the process, and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield


# --- addresses ----------------------------------------------------------------------------------------------------


def _bind(listen: str) -> socket.socket:
    """Return a socket that is bound to an address."""
    if listen.startswith("unix:"):
        return _bind_unix(listen.removeprefix("unix:"))
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequest("http_listen", listen, "host:port or unix:path")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Unavailable(f"cannot listen on {listen} for HTTP: {error.strerror or error}") from error
    try:
        # A port whose last connections are still being forgotten can be taken again; one that is listened on cannot.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.setblocking(False)
    except OSError as error:
        taken.close()
        raise Unavailable(f"cannot listen on {listen} for HTTP: {error.strerror}") from error
    return taken


def _bind_unix(path: str) -> socket.socket:
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            Path(path).unlink()  # of a process that was killed
        taken.bind(path)
        taken.setblocking(False)
    except OSError as error:
        taken.close()
        raise Unavailable(f"cannot listen on unix:{path} for HTTP: {error.strerror}") from error
    return taken


def _address(listen: str, taken: socket.socket) -> str:
    if listen.startswith("unix:"):
        return listen
    return f"{listen.rpartition(':')[0]}:{taken.getsockname()[1]}"


def _is_local(taken: socket.socket) -> bool:
    """Whether a bound socket can be reached from this machine only."""
    if taken.family is socket.AF_UNIX:
        return True
    host = str(taken.getsockname()[0])
    return host.startswith("127.") or host == "::1"


# --- TLS ----------------------------------------------------------------------------------------------------------


def _following(material: TlsMaterial) -> ssl.SSLContext:
    """Return a context that takes changed files with the next connection, as the gRPC server does."""
    in_force = material.current()
    context = latest = _context(material, in_force)

    def changed(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        """Called in every handshake, before a certificate is shown."""
        nonlocal in_force, latest
        found = material.current()
        if found is not in_force:
            try:
                latest = _context(material, found)
                in_force = found
            except (OSError, ssl.SSLError) as error:  # changed once more in between: the next handshake looks again
                log.warning("the certificate of HTTP stays as it was: %s", error)
        if latest is not first:
            connection.context = latest

    context.sni_callback = changed
    return context


def _context(material: TlsMaterial, pem: Pem) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(material.files.cert.path, material.files.key.path)
    if pem.ca:
        context.load_verify_locations(cadata=pem.ca.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context
