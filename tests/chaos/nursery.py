"""One process that has loaded all libraries and forks services, so that a start costs a tenth of a second of a core.

What is forked runs a service's own `__main__` with an environment of its own, in a process of its own: it can be
killed, frozen and told to stop like any other. Only that it was not loaded from disk is different.
"""

import asyncio
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.cluster import MODULES, ServiceSpec
from outrider.errors import Unavailable
from outrider.launch import ending_with_us

READY = "ready"
DEATH_SIGNAL_OPTION = 1
"""prctl's: which signal a process gets when the one that forked it ends."""


class Child:
    """One service, as `outrider.cluster.Service` is one."""

    def __init__(self, nursery: "Nursery", spec: ServiceSpec, folder: Path) -> None:
        """Prepare it; `start` runs it."""
        self.spec = spec
        self.log_path = folder / f"{spec.name}.log"
        self._nursery, self._pid = nursery, 0
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._pid

    @property
    def running(self) -> bool:
        """Whether it is alive."""
        return self._pid != 0 and not self._ended.done()

    async def start(self) -> None:
        """Run it; its output goes to its log file."""
        self._pid = await self._nursery.fork(self)

    def ended(self, status: int) -> None:
        """Note its end, by its exit status (negative: the signal that killed it)."""
        self._ended.set_result(status)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it is alive."""
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    async def stop(self, grace_s: float = 10.0) -> int:
        """End it, by force after the grace; return its exit status."""
        if not self._pid:
            return 0
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        try:
            return await asyncio.wait_for(asyncio.shield(self._ended), grace_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self._ended

    def require_running(self) -> None:
        """Raise when it has ended by itself.

        Raises:
            Unavailable: with the end of its log.
        """
        if self._ended.done():
            words = self.log_path.read_text(errors="replace")[-2000:]
            raise Unavailable(f"{self.spec.name} ended with status {self._ended.result()}: {words}")


class Nursery:
    """The process that forks. An async context manager; leaving it ends whatever it has forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Describe it.

        Args:
            environment: what a library reads when it is loaded.
        """
        self._environment = environment
        self._children: dict[int, Child] = {}
        self._forked: asyncio.Queue[int] = asyncio.Queue()
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Start it, and wait until everything is loaded."""
        self._process = await asyncio.create_subprocess_exec(
            *ending_with_us([sys.executable, "-m", "tests.chaos.nursery"]),
            env={**os.environ, **self._environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        said = await self._process.stdout.readline()
        assert said.decode().strip() == READY, f"the nursery says {said!r}"
        self._listening = asyncio.create_task(self._listen(self._process.stdout))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._listening

    async def fork(self, child: Child) -> int:
        """Start a service; return its process id."""
        assert self._process.stdin is not None
        order = {
            "module": MODULES[child.spec.role],
            "environment": dict(child.spec.settings),
            "log": str(child.log_path),
        }
        async with self._turn:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            pid = await self._forked.get()
            self._children[pid] = child
        return pid

    async def _listen(self, source: asyncio.StreamReader) -> None:
        async for line in source:
            said = json.loads(line)
            if "status" not in said:
                self._forked.put_nowait(said["pid"])
            elif (child := self._children.pop(said["pid"], None)) is not None:
                child.ended(said["status"])


# --- the process itself -------------------------------------------------------------------------------------------


def main() -> None:
    """Load everything, then fork on demand until standard input ends."""
    for module in MODULES.values():
        importlib.import_module(f"{module}.app")
    gc.freeze()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    print(READY, flush=True)
    alive: set[int] = set()
    heard = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(alive)
        if 0 not in ready:
            continue
        said = os.read(0, 65_536)
        if not said:
            break
        *orders, heard = (heard + said).split(b"\n")
        for order in orders:
            pid = os.fork()
            if pid == 0:
                sys.exit(_become(json.loads(order)))
            alive.add(pid)
            _say({"pid": pid})
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def _reap(alive: set[int]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        alive.discard(pid)
        _say({"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _say(news: dict[str, int]) -> None:
    print(json.dumps(news), flush=True)


def _become(order: dict[str, Any]) -> int:
    """Be the service from here on; return its exit status."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL_OPTION, signal.SIGTERM, 0, 0, 0)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(order["environment"])
    return int(importlib.import_module(f"{order['module']}.__main__").main())


if __name__ == "__main__":
    main()
