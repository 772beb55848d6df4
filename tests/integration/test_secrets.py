"""The log of a real orchestrator that was given secrets, shown some, and lost its store: none of them is in it."""

import asyncio
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.app import OrchestratorApp
from orchestrator.config import OrchestratorSettings
from outrider.client import NO_RETRY, Client
from outrider.errors import OutriderError, StoreUnavailable, Unauthenticated, Unavailable
from outrider.generation import GenerationRequest, TextPrompt
from outrider.ids import SessionId
from outrider.keys import KeyLimits, make_key, write_record
from outrider.process import run_service
from outrider.store.connect import open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.keys import KeyStore
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PASSWORD, PROMPT = "pa55word-of-the-store", "what only the client may know"


async def started(tmp_path: Path, **settings: str) -> asyncio.subprocess.Process:
    """Start an orchestrator that logs all it can."""
    mine = {f"OUTRIDER_ORCHESTRATOR_{name.upper()}": value for name, value in settings.items()}
    others = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    environment = {**others, "OUTRIDER_ORCHESTRATOR_MODEL": "toy", "OUTRIDER_ORCHESTRATOR_LOG_LEVEL": "DEBUG", **mine}
    with (tmp_path / "log").open("wb") as log:
        command = (sys.executable, "-m", "orchestrator")
        return await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stderr=log)


async def ready(client: Client) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await client.models()
            except Unavailable:
                await asyncio.sleep(0.1)
            else:
                return


async def test_no_secret_is_in_the_log_of_a_run(tmp_path: Path) -> None:
    port, address = free_port(), f"unix:{tmp_path}/o"
    arguments = ("--bind", "127.0.0.1", "--port", str(port), "--user", "alice", "on", f">{PASSWORD}", "~*", "+@all")
    in_store, in_file = make_key("one", KeyLimits(concurrent=1), time.time()), make_key("two", KeyLimits(), 1.0)
    (tmp_path / "keys").write_bytes(write_record(in_file[1]))
    wrong = in_store[0][:-4] + "AAAA"
    async with EmbeddedServer(arguments=arguments) as server:
        store = open_client(server.url)
        await KeyStore(store).create(in_store[1])
        process = await started(
            tmp_path,
            listen=address,
            log_format="json",
            require_keys="true",
            key_file=str(tmp_path / "keys"),
            store_url=f"redis://alice:{PASSWORD}@127.0.0.1:{port}/0",
        )
        clients = [Client(address, retry=NO_RETRY, api_key=key) for key in (in_store[0], in_file[0], wrong)]
        await ready(clients[1])
        assert (await clients[0].models())[0].model == "toy"
        for client, error in zip(clients, (Unavailable, Unavailable, Unauthenticated), strict=True):
            with pytest.raises(error):
                await anext(client.generate(GenerationRequest(TextPrompt(PROMPT))))
        await store.execute_command("ACL", "SETUSER", "alice", "resetpass", ">another")
        await store.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(OutriderError):
            await clients[0].session(SessionId("nobody"))
        await store.aclose()
        await server.stop()
        with pytest.raises(StoreUnavailable):
            await clients[1].session(SessionId("nobody"))
        await asyncio.sleep(1.0)
        for client in clients:
            await client.close()
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)
    log = (tmp_path / "log").read_text()
    assert "the registry cannot be read" in log  # it is the log of that run
    for secret in (PASSWORD, "another", in_store[0][-43:], in_file[0][-43:], wrong[-43:], in_store[1].sha256, PROMPT):
        assert secret not in log
    assert not re.search(r"Bearer (?!\*)", log)


@pytest.fixture
def root_logger() -> Iterator[None]:
    """Put the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("STORE_URL", f"http://alice:{PASSWORD}@127.0.0.1/0", 2),
        ("STORE_URLL", f"redis://alice:{PASSWORD}@127.0.0.1/0", 2),
        ("STORE_PASSWORD", PASSWORD, 2),
        ("KEY_FILE", f"redis://alice:{PASSWORD}@127.0.0.1/0", 2),
    ],
)
def test_a_start_that_is_refused_shows_no_secret_either(
    root_logger: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    status: int,
) -> None:
    monkeypatch.setenv("OUTRIDER_ORCHESTRATOR_MODEL", "toy")
    monkeypatch.setenv(f"OUTRIDER_ORCHESTRATOR_{variable}", value)
    assert run_service("orchestrator", OrchestratorSettings, OrchestratorApp) == status
    told = "".join(capfd.readouterr())
    assert variable.lower().replace("_", " ") in told.lower().replace("_", " ")
    assert PASSWORD not in told
