"""A local cluster with a data folder: killed or stopped as a whole, and started again, it has its sessions."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from outrider.client import Client
from outrider.errors import NotFound, OutriderError
from outrider.generation import GenerationRequest, Started, TextPrompt
from outrider.ids import SessionId
from outrider.messages import SamplingParams
from tests.contract.servers import free_port
from tests.e2e.toys import Heard, hear

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
START = [sys.executable, "-c", "from outrider.cli.app import main; main()"]
LENGTH = 400
SLOW = {"OUTRIDER_VERIFY_TOY_DELAY_S": "0.01"}
"""Time for something to happen in the middle of a generation."""


def ask(**fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {"max_tokens": LENGTH, "sampling": SamplingParams(temperature=0.0), "ignore_eos": True}
    return GenerationRequest(TextPrompt("the cat sat on "), **{**known, **fields})


async def up(folder: Path, port: int) -> asyncio.subprocess.Process:
    """Start the command."""
    return await asyncio.create_subprocess_exec(
        *START, "up", "--target", "toy", "--listen", f"127.0.0.1:{port}", "--http", "off", "--data", str(folder),
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **SLOW}, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    """Run the command until it is ended."""
    port = free_port()
    process = await up(folder, port)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(200):
            while b"serving" not in (line := await process.stdout.readline()):
                assert line, (await process.stderr.read()).decode()
        async with Client(f"127.0.0.1:{port}") as client:
            yield process, client
    finally:
        await end(process, signal.SIGKILL)


async def end(process: asyncio.subprocess.Process, blow: signal.Signals) -> None:
    """End the command, and with SIGKILL all that it has started, at once."""
    if process.returncode is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(blow)
        if blow is signal.SIGKILL:
            for child in children:
                child.kill()
        await process.communicate()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 30.0)
        assert not alive


async def cut_off(client: Client, process: asyncio.subprocess.Process, blow: signal.Signals) -> tuple[SessionId, Heard]:
    """End the cluster in the middle of a generation; return what was heard of it."""
    heard = Heard()
    ending: asyncio.Task[None] | None = None
    try:
        async with aclosing(client.generate(ask())) as events:
            async for event in events:
                heard.events.append(event)
                if len(heard.token_ids) >= 20 and ending is None:
                    ending = asyncio.create_task(end(process, blow))
    except OutriderError:
        pass
    assert ending is not None
    await ending
    assert isinstance(heard.events[0], Started)
    return heard.events[0].session_id, heard


@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_sessions_outlive_the_whole_cluster_and_are_resumed_and_continued(
    tmp_path: Path, blow: signal.Signals
) -> None:
    folder = tmp_path / "data"
    async with serving(folder) as (process, client):
        finished = await hear(client, ask(max_tokens=5))
        assert isinstance(finished.events[0], Started)
        session_id, heard = await cut_off(client, process, blow)
    assert process.returncode == (-signal.SIGKILL if blow is signal.SIGKILL else 143)
    async with serving(folder) as (_, client):
        started = heard.events[0]
        assert isinstance(started, Started)
        position = started.prompt_len + len(heard.token_ids)
        rest = Heard([event async for event in client.resume(session_id, position)])
        twin = await hear(client, ask())
        assert heard.token_ids + rest.token_ids == twin.token_ids
        second = await hear(client, ask(session_id=finished.events[0].session_id, max_tokens=4))
        assert len(second.token_ids) == 4
        with pytest.raises(NotFound):
            _ = [event async for event in client.resume(SessionId("never-made"), 0)]
        other = await up(folder, free_port())
        _, errors = await other.communicate()
        assert (other.returncode, errors.decode()) == (1, f"error: another server uses the data folder {folder}\n")


async def test_a_folder_that_cannot_be_used_is_one_line_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = await up(tmp_path / "file", free_port())
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode() == f"error: the data folder {tmp_path / 'file'} cannot be used: File exists\n"
