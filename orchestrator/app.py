"""One orchestrator: server, sessions, store, placement, heartbeat; everything of the process but its signals.

Health is SERVING while at least one verifier of the served model can be reached.
"""

import asyncio
import logging
import random
import socket
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

from orchestrator.access import Access, KeySource
from orchestrator.breakers import Breakers
from orchestrator.channels import Channels
from orchestrator.config import OrchestratorSettings
from orchestrator.flight.keeping import Flights
from orchestrator.http.front import Front
from orchestrator.http.served import served as served_as
from orchestrator.http.server import HttpServer
from orchestrator.job import Tools
from orchestrator.key_file import KeyFile
from orchestrator.language import Language, load_language
from orchestrator.metrics import Metrics
from orchestrator.placement import Placement, StaticSource
from orchestrator.policy_watch import PolicyWatch
from orchestrator.quotas import Quotas
from orchestrator.rebalancing import Rebalancer
from orchestrator.servicer import SERVICE_NAME, Desk, GenerationServicer
from orchestrator.sessions import Policy, Sessions
from orchestrator.shared_view import WorkerSource
from orchestrator.steering import Steering
from outrider.errors import StoreUnavailable
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription
from outrider.rpc import ClientTls, RpcServer, ServerTls
from outrider.rpc.own_address import advertised
from outrider.store.connect import StoreClient, open_client
from outrider.store.drafters import PolicyStore
from outrider.store.embedded import EmbeddedServer
from outrider.store.keys import KeyStore
from outrider.store.registry import Registry, keep_announced
from outrider.store.sessions import SessionStore
from outrider.store.usage import Usage
from outrider.tracing import open_tracer
from outrider.v1 import generation_pb2_grpc

WATCH_S = 0.5
"""How often it is looked whether there are verifiers."""
LAST_RESPONSES_S = 1.0
"""How long HTTP responses may take to tell their clients how the generation ended."""

log = logging.getLogger(__name__)


class OrchestratorApp:
    """An orchestrator from start to stop. Use `start`, `run` until cancelled, then `drain`."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        """Keep the settings; needs a running event loop."""
        self.settings = settings
        self.metrics = Metrics()
        self.steering = Steering(self.metrics, sets_aside=settings.set_aside)
        fresh = f"orchestrator-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.worker_id = WorkerId(settings.worker_id or fresh)
        self._material, self._store_tls, served = settings.cluster_tls(), settings.store_tls(), settings.serve_tls()
        self.server = RpcServer(settings.max_request_bytes, ServerTls(served) if served else None)
        self.address = ""
        """Where it listens, once started."""
        self.advertised = ""
        """What others are told of that, once started."""
        self.ready = asyncio.Event()
        """Set once requests are taken."""
        self.sessions: Sessions | None = None
        self.watch: PolicyWatch | None = None
        self._servicer = GenerationServicer()
        self._draining = self._serving = False
        self._front = Front(self.metrics, self.why_not, settings.http_limits())
        self.http = HttpServer(self._front, served) if settings.http_listen else None
        """The HTTP door; None: there is none."""

    async def start(self) -> None:
        """Listen; health is NOT_SERVING, and requests are refused until `run` has loaded the tokenizer."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._servicer, self.server.server)
        self.address = await self.server.start(self.settings.listen, [SERVICE_NAME])
        self.advertised = await advertised(self.settings.advertise, self.address, self.settings.store_url)
        log.info("orchestrator %s listens on %s", self.worker_id, self.address)
        if self.http is not None:
            await self.http.start(self.settings.http_listen)

    def why_not(self) -> str:
        """Say why no requests are served now; empty: they are."""
        if self._draining:
            return "the orchestrator is stopping"
        if self.sessions is None:
            return "the orchestrator is starting"
        return "" if self._serving else f"no verifier of {self.settings.model} can be reached"

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            OutriderError: the model's tokenizer cannot be loaded, or no store can be started.
        """
        settings = self.settings
        async with AsyncExitStack() as exits:
            if self.http is not None:
                exits.push_async_callback(self.http.stop)
            language = await self._language()
            url = settings.store_url
            if not url:
                url = (await exits.enter_async_context(EmbeddedServer())).url
            client = open_client(url, tls=self._store_tls)
            exits.push_async_callback(client.aclose)
            channels = self._channels()
            exits.push_async_callback(channels.close)
            registry = Registry(client)
            placement = self._placement(self._source(registry, channels), channels, language)
            exits.push_async_callback(placement.close)
            store = SessionStore(client, session_ttl_s=settings.session_ttl_s)
            tracer = open_tracer("orchestrator", self.worker_id, settings.otlp_endpoint, settings.otlp_share)
            if tracer is not None:
                exits.push_async_callback(asyncio.to_thread, tracer.close)
            flights = Flights(settings.flights(), self.metrics.flight_records)
            tools = Tools(store, placement, self.metrics, settings.generations(), flights=flights, tracer=tracer)
            # A name is never used twice, not even by a restart under the same worker id.
            name, places = f"{self.worker_id}-{uuid.uuid4().hex[:8]}", settings.max_sessions
            policy = Policy(settings.defaults(), places, name, settings.max_waiting, settings.max_wait_s)
            self.sessions = await exits.enter_async_context(Sessions(language, tools, policy))
            self.watch = PolicyWatch(PolicyStore(client), self.steering, self.sessions.running)
            await self.watch.look()
            quotas = Quotas(Usage(client, place_ttl_s=settings.key_place_ttl_s), self.metrics.refused)
            desk = Desk(self.sessions, await self._access(client), quotas, self.metrics.refusing)
            await self._open_for_business(desk, language)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(placement, settings.model))
                tasks.create_task(self._announce(registry, language))
                tasks.create_task(quotas.run())
                tasks.create_task(self.watch.run())
                tasks.create_task(flights.write_when_told())
                if settings.rebalance_s:
                    rebalancer = Rebalancer(placement, self.sessions.movable, settings.rebalance_s)
                    tasks.create_task(rebalancer.run())

    async def _open_for_business(self, desk: Desk, language: Language) -> None:
        self._servicer.open_for_business(desk)
        if self.http is not None:
            self._front.open(desk, await asyncio.to_thread(served_as, language, self.settings.http_markers))
        self.ready.set()

    async def drain(self) -> None:
        """Take nothing new, let what runs end for a while, then send the clients of the rest elsewhere."""
        self._draining = True
        settings = self.settings
        patience_s = settings.grace_s / 2 if settings.hand_over_after_s is None else settings.hand_over_after_s
        if self.sessions is not None:
            await self.sessions.drain(patience_s)
        if self.http is not None:
            await self.http.stop(LAST_RESPONSES_S)

    async def _language(self) -> Language:
        settings = self.settings
        template, own = settings.chat_template, settings.allow_chat_templates
        return await asyncio.to_thread(load_language, settings.model, chat_template=template, own_templates=own)

    def _placement(self, source: WorkerSource, channels: Channels, language: Language) -> Placement:
        lot = random.Random(self.settings.placement_seed)
        breakers = Breakers(self.settings.breaker_failures, on_change=self.metrics.count_circuit)
        return Placement(source, channels, language.vocabulary, breakers=breakers, steering=self.steering, lot=lot)

    def _channels(self) -> Channels:
        settings, material = self.settings, self._material
        if material is None:
            return Channels()
        names = {"verify": settings.tls_verifier_name, "draft": settings.tls_draft_name}
        tls = {role: ClientTls(material, name) for role, name in names.items()}
        return Channels(tls, settings.generation_timeout_s)

    async def _access(self, client: StoreClient) -> Access:
        """Return who is let in: by the file's keys, then the store's; everybody if no key is required."""
        settings, sources = self.settings, list[KeySource]()
        if settings.key_file:
            keys = KeyFile(Path(settings.key_file))
            await keys.load()
            sources.append(keys)
        if settings.require_keys and settings.store_keys:
            sources.append(KeyStore(client))
        return Access(sources, self.metrics.refused, cache_s=settings.key_cache_s, grace_s=settings.key_grace_s)

    def _source(self, registry: Registry, channels: Channels) -> WorkerSource:
        settings = self.settings
        if not settings.verify_addresses:
            return registry
        return StaticSource({"verify": settings.verify_addresses, "draft": settings.draft_addresses}, channels)

    async def _watch(self, placement: Placement, model: str) -> None:
        """Keep health at whether there is a verifier."""
        while True:
            try:
                found = bool(await placement.verifiers(model))
            except StoreUnavailable as error:
                log.warning("the registry cannot be read: %s", error)
                found = False
            if found != self._serving:
                log.info("%s verifier of %s can be reached", "a" if found else "no", model)
                self._serving = found
                await self.server.set_serving(found)
            await asyncio.sleep(WATCH_S)

    def _describe(self, language: Language) -> WorkerDescription:
        return WorkerDescription(
            worker_id=self.worker_id,
            role="orchestrate",
            address=self.advertised,
            model=language.model,
            vocabulary=language.vocabulary,
            context_len=0,
            capacity=self.settings.max_sessions,
            load=len(self.sessions) if self.sessions is not None else 0,
            draining=self._draining,
            attributes={"metrics_port": str(self.settings.metrics_port), **self.steering.attributes()},
        )

    async def _announce(self, registry: Registry, language: Language) -> None:
        """Keep the process in the registry until cancelled; take it out at the end."""
        try:
            await keep_announced(registry, lambda: self._describe(language), self.settings.heartbeat_ttl_s)
        finally:
            await registry.leave(self.worker_id)
