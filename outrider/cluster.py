"""A local cluster: the real services as processes of this machine, found through a real registry.

`outrider run` and `outrider up` start one; so do the end-to-end tests. Every service listens on a loopback port of its
own choosing and announces it, so that nothing has to be agreed on beforehand. The cluster's processes end with it.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from outrider.errors import Unavailable
from outrider.ids import WorkerId
from outrider.launch import ending_with_us
from outrider.messages import WorkerDescription
from outrider.store.connect import open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.registry import Registry

POLL_S = 0.05
"""How often the registry is read while the cluster starts."""
LOG_TAIL = 20
"""Lines of a dead service's log that are shown."""

MODULES = {"verify": "verify_service", "draft": "draft_service", "orchestrate": "orchestrator"}
"""Python module of each role."""
PREFIXES = {"verify": "OUTRIDER_VERIFY", "draft": "OUTRIDER_DRAFT", "orchestrate": "OUTRIDER_ORCHESTRATOR"}
"""What the variables of each role begin with."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process of the cluster."""

    name: str
    """Unique in the cluster; names its log file."""
    role: str
    """"verify", "draft" or "orchestrate"."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the service, beside the store's URL and the address to listen on."""
    cores: str = ""
    """Cores it may run on, as `taskset -c` takes them; empty: any."""


class Service:
    """A running process of the cluster."""

    def __init__(self, spec: ServiceSpec, environment: Mapping[str, str], folder: Path) -> None:
        """Prepare the process; `start` runs it."""
        self.spec = spec
        self.log_path = folder / f"{spec.name}.log"
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id.

        Raises:
            Unavailable: it has not been started.
        """
        if self._process is None:
            raise Unavailable(f"{self.spec.name} has not been started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Run the process; its output goes to its log file."""
        command = [sys.executable, "-m", MODULES[self.spec.role]]
        if self.spec.cores:
            command = ["taskset", "-c", self.spec.cores, *command]
        log: IO[bytes]
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *ending_with_us(command),
                env={**os.environ, **self._environment, **self.spec.settings},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process is alive."""
        if self._process is not None and self.running:
            self._process.send_signal(number)

    async def stop(self, grace_s: float = 10.0) -> int:
        """End the process, by force after the grace; return its exit status (negative: the signal that killed it)."""
        if self._process is None:
            return 0
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(grace_s):
                return await self._process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self._process.wait()

    def require_running(self) -> None:
        """Raise when the process has ended by itself.

        Raises:
            Unavailable: with the last lines of its log.
        """
        if self._process is not None and self._process.returncode is not None:
            words = _last_words(self.log_path.read_text(errors="replace").splitlines())
            raise Unavailable(f"{self.spec.name} ended with status {self._process.returncode}: {words}")


class LocalCluster:
    """Starts services and a store on entry, stops them on exit."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        *,
        store_url: str = "",
        data_dir: Path | None = None,
        start_timeout_s: float = 120.0,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Describe the cluster.

        Args:
            specs: its services; at least one orchestrator.
            store_url: Redis or Valkey to use; empty: an embedded server that lives as long as the cluster.
            data_dir: folder in which the embedded server keeps its data; None: nowhere.
            start_timeout_s: how long all services together may take until they have announced themselves, and each
                that is launched later.
            on_progress: told what is being waited for.
        """
        self._specs = specs
        self._store_url = store_url
        self._data_dir = data_dir
        self._start_timeout_s = start_timeout_s
        self._on_progress = on_progress
        self._exits = AsyncExitStack()
        self._registry: Registry | None = None
        self.services: dict[str, Service] = {}
        self.address = ""
        """Address of the orchestrator."""
        self.folder = Path()
        """Where the logs are."""

    async def __aenter__(self) -> Self:
        """Start everything and wait until every service has announced itself.

        Raises:
            Unavailable: a service ended, or did not announce itself in time.
        """
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything, orchestrator first."""
        await self._exits.aclose()

    @property
    def store_url(self) -> str:
        """URL of the cluster's store."""
        return self._store_url

    async def _start(self) -> None:
        self.folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        if not self._store_url:
            self._on_progress("store")
            server = await self._exits.enter_async_context(EmbeddedServer(self._data_dir))
            self._store_url = server.url
        client = open_client(self._store_url)
        self._exits.push_async_callback(client.aclose)
        self._registry = Registry(client)
        self._exits.push_async_callback(self._stop_services)
        for spec in self._specs:
            # What a cluster that was killed has announced of itself may still be in its data folder.
            await self._registry.withdraw(WorkerId(spec.name))
        for spec in sorted(self._specs, key=lambda spec: spec.role == "orchestrate"):
            await self.launch(spec)
        await self._wait_for_all()

    async def launch(self, spec: ServiceSpec) -> Service:
        """Start one more service, without waiting for it to announce itself."""
        service = Service(spec, self._environment(spec), self.folder)
        self.services[spec.name] = service
        await service.start()
        return service

    async def _stop_services(self) -> None:
        """Stop all services, orchestrators first; those of a kind at once, for a process takes its time to end."""
        for workers in (False, True):
            services = [each for each in self.services.values() if (each.spec.role != "orchestrate") is workers]
            await asyncio.gather(*(service.stop() for service in services))

    def _environment(self, spec: ServiceSpec) -> dict[str, str]:
        prefix = PREFIXES[spec.role]
        return {
            f"{prefix}_STORE_URL": self._store_url,
            f"{prefix}_LISTEN": "127.0.0.1:0",
            f"{prefix}_WORKER_ID": spec.name,
            "PYTHONUNBUFFERED": "1",
            "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR"),
        }

    async def _wait_for_all(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                for name in self.services:
                    self._on_progress(name)
                    description = await self.announced(name, self.services.values())
                    if description.role == "orchestrate":
                        self.address = description.address
        except TimeoutError:
            raise Unavailable(f"the cluster did not start within {self._start_timeout_s:g} s") from None

    async def announced(self, name: str, also: Iterable[Service] = ()) -> WorkerDescription:
        """Wait until a service has announced itself, and return its description.

        Args:
            name: of the service.
            also: services without which there is nothing to wait for.

        Raises:
            Unavailable: one of them ended first, or it has not announced itself in the time that a start may take.
        """
        service = self.services[name]
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while True:
                    for each in (service, *also):
                        each.require_running()
                    for worker in await self.workers(service.spec.role):
                        if worker.worker_id == name:
                            return worker
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(f"{name} did not announce itself within {self._start_timeout_s:g} s") from None

    async def workers(self, role: str) -> list[WorkerDescription]:
        """Return what the registry knows of a role."""
        if self._registry is None:
            raise Unavailable("the cluster has not been started")
        return await self._registry.workers(role)


def _last_words(lines: list[str]) -> str:
    """Return why a service ended: what it said last as CRITICAL or, when it said nothing such, the end of its log."""
    for line in reversed(lines):
        if "CRITICAL" in line:
            return line.partition("CRITICAL")[2].strip()
    return "\n".join(["", *lines[-LOG_TAIL:]])
