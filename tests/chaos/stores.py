"""The store's server of a run: its own process on a fixed port, with an append-only file that outlives it."""

import asyncio
import os
import resource
import signal
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, OutOfMemoryError, RedisError

from outrider.store.embedded import EmbeddedServer, find_server
from tests.chaos.clocks import Clock

NAP_S = 1e-4
"""How long the server's shortest nap takes."""
REWRITE_S = 5.0
"""How long the server may take to write its file anew."""
POLL_S = 0.02
EMPTY_BYTES = 1024
"""What a base file without a key is smaller than."""
ROOM_BYTES = 64
"""What a full disk still has room for: the end of the command that finds it full."""


class Store:
    """A Valkey or Redis with an append-only file, which can be killed, frozen, filled and started again."""

    def __init__(self, folder: Path, port: int, clock: Clock) -> None:
        """Prepare it; nothing is started.

        Args:
            folder: its data, its log and its clock.
            port: where it listens, on the loopback.
            clock: its wall clock.
        """
        self.port, self._folder, self._clock = port, folder, clock
        self._data = folder / "store"
        self._program = self._wrapper()
        self._server: EmbeddedServer | None = None
        self.admin: Any = Redis.from_url(
            f"redis://127.0.0.1:{port}", protocol=2, socket_timeout=2.0, retry=Retry(NoBackoff(), 0)
        )
        """A client that goes through no gate."""

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._server is not None
        return self._server.pid

    async def start(self, *arguments: str) -> None:
        """Start it on its data, and wait until it answers."""
        place = ("--bind", "127.0.0.1", "--port", str(self.port), "--logfile", str(self._folder / "store.log"))
        self._server = EmbeddedServer(self._data, program=self._program, arguments=(*place, *arguments))
        await self._server.start()

    async def kill_and_load(self, seconds: float) -> asyncio.Task[None]:
        """Kill it, and start it so that it loads for about so long, saying so to whoever asks.

        Returns:
            What is done when it answers.
        """
        keys = await self.admin.dbsize() if self._has_base() else 0
        await self.kill()
        loads = keys + sum(path.read_bytes().count(b"\r\n*") for path in self._data.rglob("*.aof"))
        naps = seconds / NAP_S
        # It naps with each key of the base file and each command behind it; a negative number is that of loads
        # between two naps.
        delay = -max(1, round(loads / naps)) if loads > naps else round(1e6 * (seconds / max(1, loads) - NAP_S))
        often = ("--loading-process-events-interval-bytes", "1024")
        return asyncio.create_task(self.start("--key-load-delay", str(delay), *often))

    def _has_base(self) -> bool:
        """Whether its file was ever written anew, which leaves all its keys in a base file."""
        return any(path.stat().st_size > EMPTY_BYTES for path in self._data.rglob("*.base.rdb"))

    async def stop(self) -> None:
        """End it in good order."""
        if self._server is not None:
            await self._server.stop()

    async def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)
        await self.stop()

    async def close(self) -> None:
        """End it and the client."""
        await self.stop()
        await self.admin.aclose()

    async def refusal(self) -> str:
        """Try to write; return the word that the server refuses with, or nothing."""
        try:
            await self.admin.set("chaos:probe", "x")
        except BusyLoadingError:
            return "LOADING"
        except OutOfMemoryError:
            return "OOM"
        except RedisError as error:
            return str(error).split(" ", 1)[0] or type(error).__name__
        return ""

    async def fill_memory(self) -> None:
        """Let every write be refused for want of memory."""
        await self.admin.config_set("maxmemory", 1)

    async def free_memory(self) -> None:
        """Take writes again."""
        await self.admin.config_set("maxmemory", 0)

    def fill_disk(self) -> None:
        """Let the append-only file grow no further, as on a full disk: the write fails, and the server sees it."""
        used = max((path.stat().st_size for path in self._data.rglob("*.incr.aof")), default=0)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (used + ROOM_BYTES, resource.RLIM_INFINITY))

    def free_disk(self) -> None:
        """Let it grow again."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    async def write_file_anew(self) -> None:
        """Do what an operator does after a full disk, which may have left a hole in the append-only file.

        A second full disk would cut off what was acknowledged in front of it. Another fault may end the server first.
        """
        with suppress(TimeoutError, RedisError):
            async with asyncio.timeout(REWRITE_S):
                while await self.refusal():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(POLL_S)
                await self._no_rewrite()
                await self.admin.bgrewriteaof()
                await self._no_rewrite()

    async def _no_rewrite(self) -> None:
        """Wait until the file is not being written anew."""
        while (await self.admin.info("persistence"))["aof_rewrite_in_progress"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(POLL_S)

    def status(self) -> str:
        """Return the process's state, as the kernel has it."""
        return str(psutil.Process(self.pid).status())

    def _wrapper(self) -> Path:
        """Make a program that starts the server under its clock: the embedded server has our environment."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "store-program"
        exports = "".join(f"export {name}='{value}'\n" for name, value in self._clock.environment.items())
        path.write_text(f'#!/bin/sh\n{exports}exec "{find_server()}" "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path
