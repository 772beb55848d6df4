"""The processes of a run, each behind a gate and with a clock of its own; nothing of them is in this process."""

import asyncio
import os
import random
import signal
import socket
import urllib.request
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.exceptions import RedisError

from outrider.cluster import Service, ServiceSpec
from outrider.errors import StoreUnavailable, Unavailable
from outrider.rpc import channel
from outrider.store.connect import open_client
from outrider.store.registry import Registry
from outrider.store.sessions import SessionStore
from tests.chaos.clocks import Clock
from tests.chaos.nursery import Child, Nursery
from tests.chaos.schedule import CLIENT, ORCHESTRATORS, PROCESSES, SERVICES, STORE, VERIFIERS, Edge
from tests.chaos.stores import Store
from tests.chaos.wire import Gate, Weather

HEARTBEAT_TTL_S = 3.0
LEASE_TTL_S = 4.0
GRACE_S = 3.0
"""Shorter than defaults, so that a run sees their ends often."""
START_S = 90.0
"""Longest wait for processes to start: several import their libraries at once on few cores."""
POLL_S, POLL_TIMEOUT_S = 0.1, 5.0
LASTING_PORTS = (12_000, 20_000)
PASS_S = 0.01
"""One pass of the target."""

QUIET = {"PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "ERROR", "OMP_NUM_THREADS": "1"}
_TOY = {"TOY_SEED": "7", "MODEL": "toy", "NUM_BLOCKS": "1024"}
_EVERYBODY = {"HEARTBEAT_TTL_S": str(HEARTBEAT_TTL_S), "GRACE_S": str(GRACE_S)}
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "verify": {**_TOY, "TOY_DELAY_S": str(PASS_S)},
    "draft": {**_TOY, "DRAFTER": "toy", "TOY_DELAY_S": "0.001"},
    "orchestrate": {"MODEL": "toy", "LEASE_TTL_S": str(LEASE_TTL_S)},
}
_PREFIX = {"verify": "OUTRIDER_VERIFY_", "draft": "OUTRIDER_DRAFT_", "orchestrate": "OUTRIDER_ORCHESTRATOR_"}


class Fleet:
    """Two orchestrators, two verifiers, two draft workers and a store. An async context manager."""

    def __init__(self, folder: Path, library: Path | None, *, forked: bool = False) -> None:
        """Describe it.

        Args:
            folder: of logs, data and clocks.
            library: what makes clocks jump, if there is one.
            forked: whether services are forked from a process that has loaded their libraries; else each loads its own.
        """
        self.folder = folder
        nursery_clock = Clock(folder / "nursery.clock", library)
        self._nursery = Nursery({**QUIET, **nursery_clock.environment}) if forked else None
        self.clocks = {name: Clock(folder / f"{name}.clock", library) for name in PROCESSES}
        self._gates: dict[str, Gate] = {}
        """By the process behind them."""
        self._store_gates: dict[str, Gate] = {}
        """One to the store for each service: those that look for it connect often."""
        self.services: dict[str, Service | Child] = {}
        ports = _lasting_ports(2 * len(SERVICES) + 1)
        self._metrics_ports = dict(zip(SERVICES, ports[len(SERVICES) : -1], strict=True))
        self._listen_ports = dict(zip(PROCESSES, (*ports[: len(SERVICES)], ports[-1]), strict=True))
        self.store = Store(folder, self._listen_ports[STORE], self.clocks[STORE])
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start everything, and wait until all of it has announced itself."""
        try:
            if self._nursery is not None:
                await self._exits.enter_async_context(self._nursery)
            await self.store.start()
            self._exits.push_async_callback(self.store.close)
            client = open_client(f"redis://127.0.0.1:{self.store.port}")
            self._exits.push_async_callback(client.aclose)
            self.sessions, self._registry = SessionStore(client), Registry(client)
            for name in SERVICES:
                gate = Gate(name, self._listen_ports[name], self._owner)
                self._gates[name] = await self._exits.enter_async_context(gate)
                gate = Gate(STORE, self._listen_ports[STORE], lambda *_, name=name: name)
                self._store_gates[name] = await self._exits.enter_async_context(gate)
            self._channels = {name: channel(f"127.0.0.1:{self._listen_ports[name]}") for name in SERVICES}
            for each in self._channels.values():
                self._exits.push_async_callback(each.close)
            self._exits.push_async_callback(self._stop_services)
            for name in SERVICES:
                await self.start(name)
            await self.whole()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything, frozen processes too."""
        await self._exits.aclose()

    async def _stop_services(self) -> None:
        for service in self.services.values():
            service.signal(signal.SIGKILL)
        await asyncio.gather(*(service.stop() for service in self.services.values()))

    # -- one process -----------------------------------------------------------------------------------------------

    async def start(self, name: str) -> None:
        """Start a process, again if it ran before, without waiting for it to be ready."""
        if name == STORE:
            await self.store.start()
            return
        spec = self._spec(name)
        # The log goes on where the process before ended.
        service = Child(self._nursery, spec, self.folder) if self._nursery else Service(spec, {}, self.folder)
        self.services[name] = service
        await service.start()

    async def kill(self, name: str) -> int:
        """End a process at once; return its exit status."""
        if name == STORE:
            await self.store.kill()
            return -signal.SIGKILL
        self.services[name].signal(signal.SIGKILL)
        return await self.services[name].stop()

    async def stop(self, name: str) -> int:
        """End a process in good order; return its exit status."""
        if name == STORE:
            await self.store.stop()
            return 0
        return await self.services[name].stop(GRACE_S + 30.0)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a process a signal."""
        psutil.Process(self.pid(name)).send_signal(number)

    def pid(self, name: str) -> int:
        """Return a process's id."""
        return self.store.pid if name == STORE else self.services[name].pid

    def state(self, name: str) -> str:
        """Return a process's state, as the kernel has it."""
        return str(psutil.Process(self.pid(name)).status())

    # -- what can be seen from outside -----------------------------------------------------------------------------

    async def ready(self, name: str) -> None:
        """Wait until a process does its work: it says so itself, and the registry has it.

        Raises:
            Unavailable: it ended.
        """
        while not await (self._store_answers() if name == STORE else self._serves(name)):
            if name != STORE:
                self.services[name].require_running()
            await asyncio.sleep(POLL_S)

    async def _store_answers(self) -> bool:
        try:
            return bool(await self.store.admin.ping())
        except (RedisError, OSError):
            return False

    async def _serves(self, name: str) -> bool:
        """Whether a service that has just been started serves; the registry alone may still speak of the one before."""
        request = health_pb2.HealthCheckRequest()
        try:
            health = await health_pb2_grpc.HealthStub(self._channels[name]).Check(request, timeout=POLL_TIMEOUT_S)
            workers = await self._registry.workers(self._role(name))
        except (grpc.aio.AioRpcError, StoreUnavailable):
            return False
        named = any(worker.worker_id == name and not worker.draining for worker in workers)
        return named and health.status == health_pb2.HealthCheckResponse.SERVING

    def ended(self) -> dict[str, str]:
        """Return the services that are not running, with what they said last."""
        found = {}
        for name, service in self.services.items():
            try:
                service.require_running()
            except Unavailable as error:
                found[name] = str(error)
        return found

    async def whole(self) -> None:
        """Wait until everything does its work."""
        async with asyncio.timeout(START_S):
            for name in PROCESSES:
                await self.ready(name)

    async def samples(self, name: str) -> dict[str, float]:
        """Return the samples without labels of a service's metrics endpoint."""
        text, _ = await asyncio.to_thread(self._read_metrics, name)
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#") and "{" not in line]
        return {key: float(value) for key, _, value in lines}

    async def time(self, name: str) -> float:
        """Return what a process believes the time to be."""
        if name == STORE:
            seconds, microseconds = await self.store.admin.time()
            return float(seconds) + 1e-6 * float(microseconds)
        _, date = await asyncio.to_thread(self._read_metrics, name)
        return parsedate_to_datetime(date).timestamp()

    def _read_metrics(self, name: str) -> tuple[str, str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_ports[name]}/metrics", timeout=30) as answer:
            return answer.read().decode(), str(answer.headers["Date"])

    def address(self, name: str) -> str:
        """Return where a process is reached by others."""
        return self._gates[name].address

    def weather(self, edge: Edge) -> Weather:
        """Return what an edge is like."""
        gate = self._store_gates[edge.source] if edge.target == STORE else self._gates[edge.target]
        return gate.weather(edge.source)

    def _owner(self, port: int, gate_port: int) -> str:
        """Return the process that has opened a connection from a port to a gate."""
        socket_name = f"socket:[{_inode(port, gate_port)}]"
        for name, service in self.services.items():
            if service.running and socket_name in open_files(service.pid):
                return name
        return CLIENT

    # -- how they are started --------------------------------------------------------------------------------------

    @staticmethod
    def _role(name: str) -> str:
        return {**dict.fromkeys(ORCHESTRATORS, "orchestrate"), **dict.fromkeys(VERIFIERS, "verify")}.get(name, "draft")

    def _spec(self, name: str) -> ServiceSpec:
        role = self._role(name)
        own = {
            "LISTEN": f"127.0.0.1:{self._listen_ports[name]}",
            "ADVERTISE": self.address(name),
            "STORE_URL": f"redis://{self._store_gates[name].address}",
            "WORKER_ID": name,
            "METRICS_PORT": str(self._metrics_ports[name]),
        }
        settings = {_PREFIX[role] + key: value for key, value in {**_SETTINGS[role], **_EVERYBODY, **own}.items()}
        return ServiceSpec(name, role, {**settings, **QUIET, **self.clocks[name].environment})


def _inode(port: int, peer_port: int) -> str:
    """Return the kernel's number of the socket with these ports; empty if there is none."""
    ends = f":{port:04X}", f":{peer_port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines():
            fields = line.split()
            if fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]):
                return fields[9]
    return ""


def open_files(pid: int) -> set[str]:
    """Return what a process has open, by the kernel's names; nothing if it has ended."""
    folder, names = Path(f"/proc/{pid}/fd"), set[str]()
    try:
        numbers = os.listdir(folder)
    except OSError:  # it may end before we hear of it
        return names
    for number in numbers:
        with suppress(OSError):  # closed meanwhile
            names.add(os.readlink(folder / number))
    return names


def _lasting_ports(count: int) -> list[int]:
    """Return ports that are free, and below those that the kernel gives to connections: a restart needs them again."""
    found: list[int] = []
    for port in random.sample(range(*LASTING_PORTS), 50 * count):
        if len(found) == count:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found
