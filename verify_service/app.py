"""One verifier: server, engine, heartbeat; everything of the process but its signals.

Health is NOT_SERVING from the start, SERVING once the model is loaded and probed, and NOT_SERVING again while it drains
and after the engine has broken.
"""

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable

from outrider.errors import Internal, OutriderError
from outrider.grammar import Grammars
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription
from outrider.model.kv_gauges import describe_pool
from outrider.rpc import Callers, Names, RpcServer, ServerTls
from outrider.rpc.own_address import advertised
from outrider.store.presence import Presence
from outrider.threads import on_own_thread, tell
from outrider.tracing import open_tracer
from outrider.v1 import verify_pb2_grpc
from verify_service.audit import AuditSettings
from verify_service.config import VerifySettings
from verify_service.engine import Engine, EngineSettings
from verify_service.inbox import Stop
from verify_service.loading import Loaded, Progress, load_target
from verify_service.metrics import VerifyMetrics
from verify_service.outlet import Handover
from verify_service.owners import Owners
from verify_service.roster import Limits
from verify_service.servicer import SERVICE_NAME, Serving, VerifyServicer

STOP_TIMEOUT_S = 2.0
"""How long the engine's thread may take to end."""

log = logging.getLogger(__name__)


class VerifyApp:
    """A verifier from start to stop. Use `start`, `run` until cancelled, then `drain` and `stop`."""

    def __init__(
        self, settings: VerifySettings, load: Callable[[VerifySettings, Progress], Loaded] = load_target
    ) -> None:
        """Keep the settings; needs a running event loop.

        Args:
            settings: of the verifier.
            load: opens the model; called once, on a thread of its own.
        """
        self.settings = settings
        fresh = f"verify-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.worker_id = WorkerId(settings.worker_id or fresh)
        self._presence = Presence(
            self.worker_id, self.describe, settings.store_url, settings.heartbeat_ttl_s, settings.store_tls()
        )
        self.server = RpcServer(settings.max_message_bytes, _server_tls(settings))
        self.address = ""
        """Where it listens, once started."""
        self.advertised = ""
        """What others are told of that, once started."""
        self.ready = asyncio.Event()
        """Set once sessions are served."""
        self.engine: Engine | None = None
        self._load = load
        self._servicer = VerifyServicer(Owners(settings.certified_worker_ids))
        self.metrics = VerifyMetrics(self._servicer)
        self._loaded: Loaded | None = None
        self._draining = False
        self._loop = asyncio.get_running_loop()
        self._death: asyncio.Future[None] = self._loop.create_future()

    async def start(self) -> None:
        """Listen; health is NOT_SERVING."""
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self._servicer, self.server.server)
        self.address = await self.server.start(self.settings.listen, [SERVICE_NAME])
        self.advertised = await advertised(self.settings.advertise, self.address, self.settings.store_url)
        log.info("verifier %s listens on %s", self.worker_id, self.address)

    async def run(self) -> None:
        """Load the model, then serve until cancelled.

        Raises:
            OutriderError: the model cannot be loaded.
            ExceptionGroup: the engine broke, or the heartbeat.
        """
        loaded = self._loaded = await self._load_model()
        endpoint, share = self.settings.otlp_endpoint, self.settings.otlp_share
        self._servicer.tracer = open_tracer("verifier", self.worker_id, endpoint, share)
        handover = Handover()
        engine = self.engine = Engine(
            loaded.runner, loaded.vocabulary.size, self._engine_settings(), tier=loaded.tier, flush=handover.flush
        )
        self.metrics.watch(engine)
        engine.start(self._engine_ended)
        tracer = self._servicer.tracer
        try:
            info, size = loaded.runner.info, loaded.vocabulary.size
            grammars = Grammars(loaded.tokenizer, size) if loaded.tokenizer is not None else None
            self._servicer.open_for_business(
                Serving(
                    engine, handover, loaded.vocabulary, info.context_len, self.describe, loaded.tokenizer, grammars
                )
            )
            await self.server.set_serving(not self._draining)
            self.ready.set()
            log.info("verifying with %s, %s, row classes %s", info.name, info.exactness, info.row_classes)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._presence.keep())
                await self._death
        finally:
            await self.server.set_serving(False)
            engine.post(Stop())
            await asyncio.to_thread(engine.join, STOP_TIMEOUT_S)
            if loaded.tier is not None:
                await asyncio.to_thread(loaded.tier.blocks.close, STOP_TIMEOUT_S)
            if loaded.ranks is not None:
                await asyncio.to_thread(loaded.ranks.dismiss, STOP_TIMEOUT_S)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    async def drain(self) -> None:
        """Let no new session in, tell the running ones, wait for them to end, and let the draft workers go."""
        self._draining = True
        self._servicer.start_draining("the verifier is stopping")
        await self._presence.renew()
        await self._servicer.empty.wait()
        self._servicer.dismiss_workers()

    def describe(self) -> WorkerDescription:
        """Return the verifier's present description; only once it is ready.

        Raises:
            Internal: it is not.
        """
        if self._loaded is None or self.engine is None:
            raise Internal("a verifier without a model was asked to describe itself")
        info = self._loaded.runner.info
        return WorkerDescription(
            worker_id=self.worker_id,
            role="verify",
            address=self.advertised,
            model=self.settings.model,
            vocabulary=self._loaded.vocabulary,
            context_len=info.context_len,
            dtype=info.dtype,
            exactness=info.exactness,
            fingerprint=info.fingerprint,
            capacity=self.settings.max_sessions,
            load=self.engine.num_sessions,
            draining=self._draining,
            attributes={
                "metrics_port": str(self.settings.metrics_port),
                "row_classes": ",".join(map(str, info.row_classes)),
                **describe_pool(info),
                "prefix_reuse": str(self.settings.prefix_reuse).lower(),
                "kv_tier": self._loaded.tier.blocks.identity.namespace if self._loaded.tier else "",
            },
        )

    async def _load_model(self) -> Loaded:
        try:
            return await on_own_thread(lambda: self._load(self.settings, self._progress))
        except OutriderError as error:
            self._servicer.unready = f"the model cannot be loaded: {error}"
            raise

    def _progress(self, stage: str, fraction: float | None) -> None:
        if fraction is None or fraction >= 1.0:
            log.info("%s%s", stage, "" if fraction is None else ": done")

    def _engine_ended(self, defect: Exception | None) -> None:
        """Called on the engine's thread."""
        if defect is not None:
            tell(self._loop, self._die, Internal(f"the engine broke: {defect!r}"))

    def _die(self, error: Internal) -> None:
        if not self._death.done():
            self._death.set_exception(error)

    def _engine_settings(self) -> EngineSettings:
        settings = self.settings
        return EngineSettings(
            limits=Limits(settings.max_sessions, settings.max_waiting, settings.retry_delay_s),
            body_limit_s=settings.body_limit_s,
            prefix_reuse=settings.prefix_reuse,
            send_hints=settings.send_hints,
            sign_of_life_s=settings.sign_of_life_s,
            audit=AuditSettings(settings.audit_share, settings.audit_max_tokens),
        )


def _server_tls(settings: VerifySettings) -> ServerTls | None:
    """Read the verifier's certificate files, and say who may call what under mutual TLS; None: it is off."""
    material = settings.cluster_tls()
    if material is None:
        return None
    orchestrators = Names(settings.variable("tls_orchestrators"), settings.tls_orchestrators)
    workers = Names(settings.variable("tls_draft_workers"), settings.tls_draft_workers)
    allowed = {"Describe": orchestrators, "Decode": orchestrators, "Propose": workers}
    return ServerTls(material, Callers({f"/{SERVICE_NAME}/{method}": names for method, names in allowed.items()}))
