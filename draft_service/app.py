"""One draft worker: server, model thread, streams to verifiers, heartbeat; everything of the process but its signals.

Health is NOT_SERVING from the start, SERVING once the drafter is loaded, and NOT_SERVING again while a token step
hangs, while it drains, and after the drafter has broken. A drafter that cannot be loaded leaves a worker that says
why, in its log and to `Describe`, for `load_failure_linger_s` seconds, is never announced, and then ends with an error.
"""

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from draft_service.config import DraftSettings
from draft_service.loading import Loaded, Progress, load_drafter
from draft_service.metrics import DraftMetrics
from draft_service.orders import GiveFeatures, Report
from draft_service.proposals import ProposeStreams
from draft_service.seats import Seats
from draft_service.servicer import SERVICE_NAME, DraftServicer
from draft_service.thread import WorkerThread
from outrider.errors import OutriderError, Unavailable
from outrider.grammar import Grammars
from outrider.ids import WorkerId
from outrider.messages import ProposeHello, RollbackHint, TargetFeatures, WorkerDescription
from outrider.model.kv_gauges import KvGauges, describe_pool
from outrider.rpc import Callers, ClientTls, Names, RpcServer, ServerTls
from outrider.rpc.own_address import advertised
from outrider.store.presence import Presence
from outrider.threads import on_own_thread
from outrider.tracing import open_tracer
from outrider.v1 import draft_pb2_grpc

WATCH_S = 0.25
"""How often the model thread is looked at."""
STOP_TIMEOUT_S = 2.0
"""How long the model thread may take to end."""

log = logging.getLogger(__name__)


class DraftApp:
    """A draft worker from start to stop. Use `start`, `run` until cancelled, then `drain` and `stop`."""

    def __init__(
        self, settings: DraftSettings, load: Callable[[DraftSettings, Progress], Loaded] = load_drafter
    ) -> None:
        """Keep the settings; needs a running event loop.

        Args:
            settings: of the worker.
            load: makes the drafter; called once, on a thread of its own.
        """
        self.settings = settings
        self.metrics = DraftMetrics()
        fresh = f"draft-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.worker_id = WorkerId(settings.worker_id or fresh)
        self._material = settings.cluster_tls()
        self._presence = Presence(
            self.worker_id, self.describe, settings.store_url, settings.heartbeat_ttl_s, settings.store_tls()
        )
        self.server = RpcServer(tls=self._server_tls())
        self.address = ""
        """Where it listens, once started."""
        self.advertised = ""
        """What others are told of that, once started."""
        self.ready = asyncio.Event()
        """Set once sessions are served."""
        self.seats: Seats | None = None
        self._load = load
        self._servicer = DraftServicer()
        self._loaded: Loaded | None = None
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Listen; health is NOT_SERVING.

        Raises:
            Unavailable: the address is taken, or none of this machine's.
        """
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, self.server.server)
        self.address = await self.server.start(self.settings.listen, [SERVICE_NAME])
        self.advertised = await advertised(self.settings.advertise, self.address, self.settings.store_url)
        log.info("draft worker %s listens on %s", self.worker_id, self.address)

    async def run(self) -> None:
        """Load the drafter, then serve until cancelled.

        Raises:
            OutriderError: the drafter cannot be loaded; raised after the worker has said so for a while.
            ExceptionGroup: the drafter broke, or a defect.
        """
        loaded = await self._load_drafter()
        async with AsyncExitStack() as exits:
            thread = WorkerThread(loaded.drafter, self.metrics, self._deliver, self._died)
            exits.push_async_callback(thread.stop, STOP_TIMEOUT_S)
            proposals = await exits.enter_async_context(self._proposals(loaded, thread))
            info = loaded.drafter.info
            if loaded.runner is not None:
                self.metrics.registry.register(KvGauges(loaded.runner))
            self.seats = Seats(info, self.settings.max_sessions, thread.submit, proposals)
            if loaded.tokenizer is not None:
                self.seats.grammars = Grammars(loaded.tokenizer, info.vocab_len)
            tracer = open_tracer("draft-worker", self.worker_id, self.settings.otlp_endpoint, self.settings.otlp_share)
            if tracer is not None:
                self.seats.tracer = tracer
                exits.push_async_callback(asyncio.to_thread, tracer.close)
            thread.start()
            self._servicer.open_for_business(self.seats, self.describe, loaded.tokenizer)
            await self.server.set_serving(True)
            self.ready.set()
            log.info("drafting with %s %s", info.kind, info.model)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(thread, self.seats))
                tasks.create_task(self._presence.keep())
                await self._death

    async def drain(self) -> None:
        """Let no new session in, tell the running ones, and wait for them to end."""
        if self.seats is None:
            return
        self.seats.start_draining("the draft worker is stopping")
        await self._presence.renew()
        await self.seats.empty.wait()

    def describe(self) -> WorkerDescription:
        """Return the worker's present description; only once it is ready.

        Raises:
            Unavailable: it is not.
        """
        if self._loaded is None or self.seats is None:
            raise Unavailable(self._servicer.unready)
        info, runner = self._loaded.drafter.info, self._loaded.runner
        attributes = describe_pool(runner.info) if runner is not None else {}
        attributes["metrics_port"] = str(self.settings.metrics_port)
        if info.feature_size:
            attributes["feature_size"] = str(info.feature_size)
        if self.seats.trouble is not None:
            attributes["trouble"] = self.seats.trouble.message
        return WorkerDescription(
            worker_id=self.worker_id,
            role="draft",
            address=self.advertised,
            model=info.model or self.settings.model,
            vocabulary=self._loaded.vocabulary,
            context_len=info.context_len,
            dtype=info.dtype,
            drafter=info.kind,
            exactness=info.exactness,
            fingerprint=info.fingerprint,
            capacity=self.settings.max_sessions,
            load=len(self.seats),
            draining=self.seats.draining or self.seats.trouble is not None,
            attributes=attributes,
            label=self.settings.label,
            drafters=info.drafters,
        )

    # -- loading -----------------------------------------------------------------------------------------------------

    async def _load_drafter(self) -> Loaded:
        try:
            self._loaded = await on_own_thread(lambda: self._load(self.settings, self._on_progress))
        except Exception as error:
            text = error.message if isinstance(error, OutriderError) else repr(error)
            self._servicer.unready = f"the drafter cannot be loaded: {text}"
            log.exception("%s", self._servicer.unready)
            await asyncio.sleep(self.settings.load_failure_linger_s)
            raise Unavailable(self._servicer.unready) from error
        return self._loaded

    def _on_progress(self, stage: str, fraction: float | None) -> None:
        done = "" if fraction is None else f", {fraction:.0%}"
        self._servicer.unready = f"the drafter is being loaded: {stage}{done}"
        log.info("%s%s", stage, done)

    # -- running -----------------------------------------------------------------------------------------------------

    def _proposals(self, loaded: Loaded, thread: WorkerThread) -> ProposeStreams:
        layers = loaded.drafter.info.feature_layers
        hello = ProposeHello(self.worker_id, loaded.vocabulary, layers, takes_hints=self.settings.take_hints)
        return ProposeStreams(
            hello,
            self.metrics,
            self._refused,
            partial(self._heard, thread),
            self.settings.propose_linger_s,
            ClientTls(self._material, self.settings.tls_verifier_name) if self._material else None,
        )

    def _server_tls(self) -> ServerTls | None:
        if self._material is None:
            return None
        orchestrators = Names(self.settings.variable("tls_orchestrators"), self.settings.tls_orchestrators)
        allowed = {f"/{SERVICE_NAME}/{method}": orchestrators for method in ("Describe", "Draft")}
        return ServerTls(self._material, Callers(allowed))

    def _deliver(self, reports: Sequence[Report]) -> None:
        if self.seats is not None:
            self.seats.deliver(reports)

    def _heard(self, thread: WorkerThread, address: str, message: TargetFeatures | RollbackHint) -> None:
        if isinstance(message, TargetFeatures):
            thread.submit(GiveFeatures(address, message))
        elif self.seats is not None:
            self.seats.take_hint(address, message)

    def _refused(self, address: str, error: OutriderError) -> None:
        if self.seats is not None:
            self.seats.refuse_verifier(address, error)

    def _died(self, error: BaseException) -> None:
        """The model thread is gone: no session can go on, and neither can the process."""
        trouble = Unavailable(f"the drafter broke: {error!r}")
        if self.seats is not None:
            self.seats.trouble = trouble
            self.seats.end_all(trouble)
        if not self._death.done():
            self._death.set_exception(trouble)

    async def _watch(self, thread: WorkerThread, seats: Seats) -> None:
        """See that the model thread answers; end all sessions when it does not."""
        while True:
            await asyncio.sleep(WATCH_S)
            hangs = thread.busy_s > self.settings.hang_s
            if hangs and seats.trouble is None:
                seats.trouble = Unavailable(f"the drafter has not answered for {self.settings.hang_s:g} s")
                log.error("%s", seats.trouble)
                seats.end_all(seats.trouble)
            elif not hangs and seats.trouble is not None and not self._death.done():
                log.warning("the drafter answers again")
                seats.trouble = None
            else:
                continue
            self.metrics.degraded.set(hangs)
            await self.server.set_serving(not hangs)
