"""The server that every service runs: health, reflection, error translation, orderly stop.

Handlers raise `OutriderError`s and nothing else on purpose. An interceptor turns those into statuses with details; any
other exception is a defect: INTERNAL, logged once, with its text kept from the client. `CancelledError` passes
untouched.
"""

import asyncio
import inspect
import ipaddress
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from outrider.errors import DeadlineExceeded, InvalidRequest, Unavailable
from outrider.rpc.conclusion import Conclusion
from outrider.rpc.peers import Callers
from outrider.rpc.tls import ServerTls
from outrider.rpc.transport import MAX_MESSAGE_BYTES, server_options

logger = logging.getLogger(__name__)

Handler = Callable[[Any, Any], Any]

REQUEST_S = 10.0
"""How long a call may take to send its one request, where it has one."""
LULL_S = 0.05
"""How long a server that stops still answers, with refusals: long enough for what has arrived already."""

LIVE = "live"
"""Service name under which health is SERVING as long as the event loop answers, whether or not anybody is served."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class RpcServer:
    """A grpc.aio server with health, reflection and error translation.

    Register servicers on `server`, then `start`. Health is NOT_SERVING until `set_serving(True)`, so that a process
    that still loads its model answers health checks already.
    """

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES, tls: ServerTls | None = None) -> None:
        """Make a server that does not listen yet; needs a running event loop.

        Args:
            max_message_bytes: largest message to send or take.
            tls: its certificate, and who may call it; None: plaintext for everybody.
        """
        self._guard = ErrorInterceptor(tls.callers if tls else Callers())
        self.server = grpc.aio.server(interceptors=[self._guard], options=server_options(max_message_bytes))
        self._tls = tls
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._services: tuple[str, ...] = ()
        self.served = asyncio.Event()
        """Set once it is SERVING for the first time: what is there by then stays."""

    async def start(self, listen: str, services: Sequence[str]) -> str:
        """Listen and serve.

        Args:
            listen: host:port (port 0 takes a free one) or unix:path.
            services: full names of the registered services, for reflection and health, such as
                `outrider.v1.DraftService`.

        Returns:
            The address it listens on, with the real port.

        Raises:
            Unavailable: the address is not free, or not one that can be listened on.
        """
        self._services = tuple(services)
        names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        port = self._bind(listen)
        await self.set_serving(False)
        await self._health.set(LIVE, _SERVING)
        await self.server.start()
        return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"

    def _bind(self, listen: str) -> int:
        if self._tls is None and not _is_local(listen):
            logger.warning("%s takes plaintext from other machines, for no TLS is set up", listen)
        try:
            if self._tls is None:
                return self.server.add_insecure_port(listen)
            return self.server.add_secure_port(listen, self._tls.credentials())
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {listen}: the address is in use, or is none of this machine's"
            ) from error

    async def set_serving(self, serving: bool) -> None:
        """Set the health of the process ("") and of each of its services."""
        if serving:
            self.served.set()
        for name in ("", *self._services):
            await self._health.set(name, _SERVING if serving else _NOT_SERVING)

    async def drain(self) -> None:
        """Report NOT_SERVING from now on, whatever is set later."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then cancel them. Idempotent.

        gRPC's own refusal is a bare CANCELLED, which a caller may take for its own: hence ours first, for a while.
        """
        lull_s = 0.0 if self._guard.is_stopping else min(LULL_S, grace_s)
        self._guard.is_stopping = True
        await asyncio.sleep(lull_s)
        await self.server.stop(grace_s - lull_s)


def _is_local(listen: str) -> bool:
    """Whether an address can be reached from this machine only."""
    host = listen.rpartition(":")[0].strip("[]")
    if listen.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def serve_until_terminated(
    server: RpcServer, on_drain: Callable[[], Awaitable[None]] | None = None, grace_s: float = 10.0
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and stop; the caller exits with 0.

    Health turns NOT_SERVING, `on_drain` tells the running streams and may wait for them, and what is left of the grace
    goes to calls that still run. A second signal ends the grace at once.

    Args:
        server: a started server.
        on_drain: called once; cut off when the grace is over.
        grace_s: seconds from the first signal until running calls are cancelled.
    """
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await first.wait()
        logger.info("draining, at most %.1f s", grace_s)
        deadline = loop.time() + grace_s
        await server.drain()
        if on_drain is not None:
            await _bounded(on_drain(), second, grace_s)
        await server.stop(0.0 if second.is_set() else max(0.0, deadline - loop.time()))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _bounded(draining: Awaitable[None], hurry: asyncio.Event, grace_s: float) -> None:
    """Await `draining` until it is done, the grace is over, or `hurry` is set."""
    work = asyncio.ensure_future(draining)
    hurrying = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait({work, hurrying}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurrying.cancel()
        if not work.done():
            logger.warning("the drain was cut off")
            work.cancel()
        for result in await asyncio.gather(work, hurrying, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("the drain failed", exc_info=result)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into gRPC statuses; lets nobody reach them who may not, or comes too late."""

    def __init__(self, callers: Callers) -> None:
        """Keep who may call what."""
        self._callers, self._conclusion = callers, Conclusion()
        self.is_stopping = False
        """Whether new calls are refused."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Wrap the method's handler: coroutines stay coroutines and generators stay generators.

        A method of one request becomes one of a stream of requests, which is the same on the wire, and reads one. For
        by itself gRPC waits for that request for ever, and never ends a call that is closed without it.
        """
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            guarded = behaviour and self._guarded(method, behaviour, one_request=kind.startswith("unary"))
            if guarded is behaviour:
                continue
            if not kind.startswith("unary"):
                return handler._replace(**{kind: guarded})  # type: ignore[no-any-return]
            return handler._replace(  # type: ignore[no-any-return]
                request_streaming=True,
                request_deserializer=handler.request_deserializer and _reading(handler.request_deserializer),
                **{kind: None, kind.replace("unary", "stream", 1): guarded},
            )
        return handler  # type: ignore[no-any-return]

    def _guarded(self, method: str, behaviour: Handler, *, one_request: bool) -> Handler:
        """Wrap one behaviour so that its callers are checked and its errors become statuses.

        gRPC keeps what ends a call in the state of the call, a cycle of its own that stays until garbage is collected,
        and with it the frame that ended the call: hence that one has neither request nor error among its variables.
        """
        admit, conclusion = self._admit, self._conclusion

        async def generating(requests: Any, context: Any) -> AsyncIterator[Any]:
            try:
                admit(method, context)
                asked = behaviour(await _only(requests) if one_request else requests, context)
                async with aclosing(asked) as responses:
                    async for response in responses:
                        yield response
                return
            except Exception as error:
                status = conclusion.status(method, error)
            await context.abort_with_status(status)

        async def returning(requests: Any, context: Any) -> Any:
            try:
                admit(method, context)
                return await behaviour(await _only(requests) if one_request else requests, context)
            except Exception as error:
                status = conclusion.status(method, error)
            await context.abort_with_status(status)
            raise AssertionError("abort_with_status returned")

        if inspect.isasyncgenfunction(behaviour):
            return generating
        # Health and reflection bring plain generator-like callables of their own; they are left alone.
        return returning if inspect.iscoroutinefunction(behaviour) else behaviour

    def _admit(self, method: str, context: Any) -> None:
        """Let a call through to its handler.

        Raises:
            Unavailable: the server stops.
            PermissionDenied: the peer may not make it.
        """
        if self.is_stopping:
            raise Unavailable("the server stops")
        self._callers.check(method, context)


class _Unreadable:
    """Stands for a request whose bytes are no message."""

    def __init__(self, num_bytes: int) -> None:
        self.error = InvalidRequest("request", f"{num_bytes} bytes", "a message of the method's type")


def _reading(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap a deserializer so that its failure reaches the handler; gRPC would log a traceback and answer UNKNOWN."""

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _Unreadable(len(data))

    return read


async def _only(requests: AsyncIterator[Any]) -> Any:
    """Return the request of a call that has one.

    Raises:
        DeadlineExceeded: it does not come.
        InvalidRequest: the caller closed without it, or it cannot be read.
    """
    try:
        async with asyncio.timeout(REQUEST_S):
            request = await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no request within {REQUEST_S:g} s") from None
    if request is None:
        raise InvalidRequest("request", "nothing", "a message of the method's type")
    if isinstance(request, _Unreadable):
        raise request.error
    return request
