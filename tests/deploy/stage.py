"""Runs the processes of a deployment file on this machine, with an address of the loopback range for each.

What a container would have is given to a process: its command, its variables and the image's, its volumes (folders),
its name and address. Nothing else of the environment reaches it. Three things are mapped: names of hosts to addresses,
"every interface" to the process's own address, and the port of metrics, which no address goes with, to a free one.
Probes are asked more often than the files say, for as long as they say in all; nothing else is hurried but preStop.
"""

import asyncio
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from outrider.launch import ending_with_us
from outrider.store.embedded import find_server
from tests.deploy.namespaces import Network
from tests.deploy.plans import Plan, Probe, image_environment
from tests.ports import free_port

ASK_S = 0.4
"""Pause between two probes where the file says more: the time a machine waits is no part of what is tested."""
PRE_STOP = 0.1
"""Part of a preStop that is waited, likewise."""
STORE_PORT = 6379
NETWORKS = (f"127.{64 + os.getpid() % 128}.{number}" for number in itertools.count(1))
"""Addresses of this run, for one stage after the other."""


@dataclass(frozen=True)
class Ended:
    """How a process ended that was told to."""

    name: str
    status: int
    seconds: float
    allowed_s: float


@dataclass
class Process:
    """One running container."""

    name: str
    plan: Plan
    address: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    mapped: Callable[[str], str]
    """Returns a part of a command with this machine's paths and addresses."""
    inside: tuple[str, ...] = ()
    """What runs a command on the process's own host; empty: it has none."""
    handle: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self.handle is not None
        return self.handle.pid

    @property
    def is_running(self) -> bool:
        return self.handle is not None and self.handle.returncode is None

    def tail(self) -> str:
        """Return the end of what it has said."""
        return f"{self.name}: {self.log.read_text(errors='replace')[-1500:]}"

    async def launch(self) -> None:
        """Run it."""
        with self.log.open("ab") as log:
            self.handle = await asyncio.create_subprocess_exec(
                *ending_with_us([*self.inside, *self.command]), env=self.environment, cwd=self.log.parent,
                start_new_session=True, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    async def completed(self, timeout_s: float) -> None:
        """Wait for the end of a process that has one."""
        assert self.handle is not None
        async with asyncio.timeout(timeout_s):
            status = await self.handle.wait()
        assert status == 0, self.tail()

    async def is_well(self, probe: Probe) -> bool:
        """Ask once, as whoever runs containers would."""
        try:
            async with asyncio.timeout(max(probe.timeout_s, 3.0)):  # three at least: several start at once here
                if not probe.command and self.inside:
                    asked = ("--address", f"127.0.0.1:{probe.port}", "--service", probe.service)
                    return await self._runs(("outrider", "health", *asked))
                if not probe.command:
                    return await self._serves(probe)
                if probe.command[0] == "valkey-cli" and self.inside:
                    return True  # whoever needs the store waits for it
                if probe.command[0] == "valkey-cli":
                    return await self._pings([self.mapped(part) for part in probe.command])
                return await self._runs(probe.command)
        except TimeoutError:
            return False

    async def _serves(self, probe: Probe) -> bool:
        async with grpc.aio.insecure_channel(f"{self.address}:{probe.port}") as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=probe.service), timeout=max(probe.timeout_s, 3.0)
                )
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _pings(self, command: Sequence[str]) -> bool:
        """What `valkey-cli [--tls …] ping` does; the program is no part of what the tests need."""
        options: dict[str, Any] = {}
        if "--tls" in command:
            named = dict(itertools.pairwise(command))
            options = {"ssl": True, "ssl_check_hostname": False, "ssl_ca_certs": named["--cacert"]}
            options |= {"ssl_certfile": named["--cert"], "ssl_keyfile": named["--key"]}
        client = Redis(host=self.address, port=STORE_PORT, **options)
        try:
            return bool(await client.ping())
        except RedisError:
            return False
        finally:
            await client.aclose()

    async def _runs(self, command: Sequence[str]) -> bool:
        program = await asyncio.create_subprocess_exec(
            *self.inside, *command, env=self.environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        return await program.wait() == 0

    async def wait_until_ready(self) -> None:
        """Probe until it has started, and then until it is ready; fails where it would be killed instead."""
        for probe in (self.plan.startup, self.plan.readiness):
            if probe is None:
                continue
            end_s = time.monotonic() + probe.period_s * max(probe.failures, 6)
            while not await self.is_well(probe):
                assert self.is_running, f"ended before it was ready\n{self.tail()}"
                assert time.monotonic() < end_s, f"not ready in its time\n{self.tail()}"
                await asyncio.sleep(min(probe.period_s, ASK_S))
            assert self.is_running, f"another process answers at its address\n{self.tail()}"

    async def stop(self) -> Ended:
        """End it as a container is ended: preStop, SIGTERM, and SIGKILL when its time is over."""
        assert self.handle is not None
        await asyncio.sleep(self.plan.pre_stop_s * PRE_STOP)
        begun_s = time.monotonic()
        self.handle.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.plan.stop_s):
                await self.handle.wait()
        except TimeoutError:
            self.handle.kill()
            await self.handle.wait()
        assert self.handle.returncode is not None
        return Ended(self.name, self.handle.returncode, time.monotonic() - begun_s, self.plan.stop_s)


@dataclass
class Stage:
    """All processes of one deployment; stops what it has started."""

    plans: Mapping[str, Plan]
    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables changed or added in every process whose plan has others with the same prefix."""
    store_program: Path | None = None
    """Runs instead of the packaged Valkey."""
    network: Network | None = None
    """Hosts of its own for each process, which then keeps its address and ports; None: the loopback range."""
    running: dict[str, list[Process]] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    """What has run to its end, in order."""
    hosts: dict[str, str] = field(default_factory=dict)
    """Name in the files -> address here."""
    _count: int = 100
    """Below are the addresses of hosts."""
    _network: str = field(default_factory=lambda: next(NETWORKS))

    async def __aenter__(self) -> Self:
        for plan in self.plans.values():
            for source in plan.volumes.values():
                (self.folder / source).mkdir(parents=True, exist_ok=True)
        self.hosts = {name: f"{self._network}.{index + 1}" for index, name in enumerate(self.plans)}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what is left."""
        for process in [each for group in self.running.values() for each in group]:
            if process.is_running:
                os.killpg(process.pid, signal.SIGKILL)
                assert process.handle is not None
                await process.handle.wait()

    def of(self, name: str) -> list[Process]:
        """Return the running replicas of a service."""
        return [each for each in self.running.get(name, []) if each.is_running]

    def addresses(self, name: str, port: int) -> list[str]:
        """Return where the replicas of a service listen."""
        return [f"{each.address}:{port}" for each in self.of(name)]

    async def start(self, name: str, *, ready: bool = True) -> Process:
        """Start one replica, after what has to be there before it; wait until it is ready unless told not to."""
        plan = self.plans[name]
        for other, state in plan.first.items():
            await self._first(other, state)
        process = self._make(plan)
        self.running.setdefault(name, []).append(process)
        await process.launch()
        if ready:
            await process.wait_until_ready()
        return process

    async def run(self, name: str, timeout_s: float = 200.0) -> None:
        """Run something that has an end."""
        process = await self.start(name, ready=False)
        await process.completed(timeout_s)
        self.completed.append(name)

    async def _first(self, name: str, state: str) -> None:
        if state == "completed":
            # A container's own first ones run for each replica, other services once.
            if "/" in name or name not in self.completed:
                await self.run(name)
        elif not self.of(name):
            await self.start(name)

    async def stop(self, process: Process) -> Ended:
        """Stop a replica; fails if it had to be killed, or had anything to complain of.

        Raises:
            AssertionError: with the end of its log.
        """
        ended = await process.stop()
        self.ended.append(ended)
        assert ended.status == 0, f"{ended}\n{process.tail()}"
        return ended

    async def kill(self, process: Process) -> None:
        """End a replica without a word."""
        assert process.handle is not None
        process.handle.kill()
        await process.handle.wait()

    async def restart(self, process: Process) -> Process:
        """Stop a replica, and start another one only then; it takes the address over if it has a name."""
        await self.stop(process)
        return await self.start(process.plan.name)

    async def stop_all(self) -> None:
        """Stop everything, what is depended on last."""
        for name in reversed(list(self.running)):
            await asyncio.gather(*(self.stop(each) for each in self.of(name)))

    # -- mapping -----------------------------------------------------------------------------------------------------

    def _make(self, plan: Plan) -> Process:
        self._count += 1
        stateful = plan.command[0] == "valkey-server"
        name = f"{plan.name.replace('/', '-')}-{self._count}"
        # What runs before a container needs no network.
        network = self.network if "/" not in plan.name else None
        if network is not None:
            address = self.hosts[plan.name] = network.join(name, plan.name)
        else:
            address = self.hosts[plan.name] if stateful else f"{self._network}.{self._count}"
        home = self.folder / name
        home.mkdir()
        environment = self._environment(plan, name, address, home)
        mapped = partial(self._mapped, plan=plan, home=home)
        command = [mapped(_expanded(part, environment)) for part in plan.command]
        if stateful:
            command = [
                str(self.store_program or find_server()),
                *command[1:],
                "--bind",
                address,
                "--protected-mode",
                "no",
            ]
        inside = network.inside(name) if network is not None else ()
        return Process(name, plan, address, command, environment, home / "log", mapped, inside)

    def _environment(self, plan: Plan, name: str, address: str, home: Path) -> dict[str, str]:
        prefixes = {each.rpartition("_LISTEN")[0] + "_" for each in plan.environment if each.endswith("_LISTEN")}
        changed = {key: value for key, value in self.settings.items() if key.startswith(tuple(prefixes))}
        known = {key: value for key, value in self.settings.items() if key in plan.environment}
        found = {}
        for key, value in {**image_environment(), **plan.environment, **changed, **known}.items():
            mapped = self._mapped(value, plan, home).replace("${metadata.name}", name)
            if key.endswith("_LISTEN") and self.network is None:
                mapped = mapped.replace("0.0.0.0", address)
            if key.endswith("_METRICS_PORT") and self.network is None:
                mapped = str(free_port())
            found[key] = mapped
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**found, "PATH": path, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def _mapped(self, text: str, plan: Plan, home: Path) -> str:
        """Return a text with this machine's folders for the container's paths, and addresses for its names."""
        mounted = {**plan.volumes, **plan.files}
        places = {path: self.folder / source for path, source in mounted.items()} | {"/tmp": home}
        text = re.sub(rf"^({'|'.join(places)})(?=/|$)", lambda found: str(places[found[1]]), text)
        host = urlsplit(text).hostname if "://" in text else None
        return text.replace(f"//{host}", f"//{self.hosts[host]}") if host in self.hosts else text


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """Put variables into a command, as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)


@asynccontextmanager
async def staged(
    plans: Mapping[str, Plan], folder: Path, settings: Mapping[str, str], network: Network | None = None
) -> AsyncIterator[Stage]:
    """Make a stage, and show what its processes have said when something fails."""
    async with Stage(plans, folder, settings, network=network) as stage:
        try:
            yield stage
        except BaseException:
            print("\n".join(each.tail() for group in stage.running.values() for each in group))
            raise
