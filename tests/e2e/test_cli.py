"""The `outrider` command as people run it: exit status, what it prints, and what it prints when it is wrongly used."""

import asyncio
import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.toys import Toys

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
START = [sys.executable, "-c", "from outrider.cli.app import main; main()"]
LIMIT_S = 250.0


async def outrider(*arguments: str, watch: set[str] | None = None) -> tuple[int, str, str]:
    """Run a command; return its status, output and error output.

    Args:
        *arguments: of the command.
        watch: takes the names of the service modules that are seen running below it.
    """
    process = await asyncio.create_subprocess_exec(
        *START, *arguments, cwd=ROOT, env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    watching = asyncio.create_task(_watch(process.pid, watch)) if watch is not None else None
    async with asyncio.timeout(LIMIT_S):
        output, errors = await process.communicate()
    if watching is not None:
        watching.cancel()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def _watch(pid: int, seen: set[str]) -> None:
    """Collect the modules that the process's children run; separate processes, each with a module of its own."""
    while psutil.pid_exists(pid):
        try:
            lines = [child.cmdline() for child in psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            lines = []
        seen.update(line[line.index("-m") + 1] for line in lines if "-m" in line)
        await asyncio.sleep(0.1)


async def test_run_with_a_toy_compares_a_seeded_text_with_its_twin() -> None:
    seen: set[str] = set()
    arguments = "run", "the cat sat on ", "--target", "toy", "--compare", "--temperature", "0.7", "--seed", "5"
    status, output, errors = await outrider(*arguments, "--max-tokens", "40", watch=seen)
    assert status == 0, errors
    assert "the texts are equal" in errors
    assert errors.count("tokens per second") == 2
    for line in ("tokens per second", "tokens per round", "rollbacks", "acceptance by position", "speed:"):
        assert line in errors
        assert line not in output, "standard output holds the answer alone"
    assert output.strip()
    assert seen >= {"verify_service", "draft_service", "orchestrator"}


async def test_a_killed_command_leaves_no_process_behind() -> None:
    process = await asyncio.create_subprocess_exec(
        *START, "up", "--target", "toy", "--listen", "127.0.0.1:0", "--http", "off", cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        while b"serving" not in (line := await process.stdout.readline()):
            pass
    assert line.endswith(b"; Ctrl-C or SIGTERM stops it\n")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4, "a store and three services"
    process.kill()
    await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 60.0)
    assert not alive


async def test_generate_streams_from_the_first_orchestrator_that_answers(toys: Toys) -> None:
    address = f"127.0.0.1:1, {await toys.address(toys.running('orchestrate')[0])}"
    status, output, errors = await outrider(
        "generate", "the cat sat on ", "--address", address, "--max-tokens", "12", "--raw", "--origins"
    )
    assert status == 0, errors
    assert output.strip()
    for line in ("tokens: accepted", "finished:"):
        assert line in errors
        assert line not in output, "standard output holds the answer alone"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--temperature", "-1"], "sampling.temperature"),
        (["--top-p", "7"], "sampling.top_p"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--mode", "psychic"], "mode"),
        (["--gamma", "4", "--window", "2"], "speculation.window"),
        (["--plain", "--gamma", "2"], "speculation.off"),
        (["--mode", "coupled", "--temperature", "1"], "seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_option_is_one_line_that_names_it_and_status_1(toys: Toys, options: list[str], name: str) -> None:
    address = await toys.address(toys.running("orchestrate")[0])
    status, output, errors = await outrider("generate", "the cat ", "--address", address, *options)
    assert status == 1
    assert output.strip() == ""
    assert errors.startswith(f"error: {name}: ")
    assert errors.count("\n") == 1
    assert "Traceback" not in errors


async def test_an_address_where_nobody_listens_is_one_line_and_status_1_once_it_was_waited_for() -> None:
    status, _, errors = await outrider("generate", "the cat ", "--address", "127.0.0.1:1", "--wait-s", "3")
    assert (status, errors.count("\n"), errors[:7]) == (1, 1, "error: ")
    tried = re.search(r"gave up after (\d+) tries in ([\d.]+) s", errors)
    assert tried is not None, errors
    assert int(tried[1]) >= 3
    assert 3 <= float(tried[2]) < 10, "the time that there is, and no other"


async def test_an_address_that_is_none_is_named() -> None:
    status, _, errors = await outrider("generate", "the cat ", "--address", " , ")
    assert (status, errors.count("\n"), errors[:16]) == (1, 1, "error: address: ")


async def test_an_option_that_does_not_exist_is_named() -> None:
    status, output, errors = await outrider("run", "x", "--gama", "3")
    assert status != 0
    assert "--gama" in output + errors
    assert "Traceback" not in output + errors


async def test_a_model_that_does_not_exist_is_named_without_a_traceback() -> None:
    status, output, errors = await outrider("run", "x", "--target", "./nowhere.gguf")
    assert status == 1
    assert "nowhere.gguf" in errors
    assert "Traceback" not in output + errors


@pytest.mark.real_model
async def test_doctor_finds_nothing_wrong_with_the_packaged_model() -> None:
    status, output, errors = await outrider("doctor")
    assert status == 0, output + errors
    for line in ("environment", "store", "target", "rows", "pairing"):
        assert f"ok   {line}:" in output


@pytest.mark.real_model
async def test_the_real_model_answers_sensibly_from_three_processes_and_equals_its_twin() -> None:
    seen: set[str] = set()
    question = "What is the capital of France? Answer in one sentence."
    status, output, errors = await outrider("run", question, "--max-tokens", "24", "--compare", watch=seen)
    assert status == 0, output + errors
    assert "Paris" in output
    assert "the texts are equal" in errors
    assert seen >= {"verify_service", "draft_service", "orchestrator"}


async def test_a_prompt_may_begin_with_a_hyphen_and_come_from_standard_input(toys: Toys) -> None:
    address = await toys.address(toys.running("orchestrate")[0])
    status, output, errors = await outrider("generate", "- one", "--address", address, "--max-tokens", "3", "--raw")
    assert (status, output[-1:]) == (0, "\n"), "the answer, and the end of its line"
    assert "3 (finished: length)" in errors
    status, _, errors = await outrider("generate", "-", "--address", address, "--max-tokens", "3", "--raw")
    assert (status, errors.count("\n")) == (1, 1), "standard input is empty here, and an empty prompt is refused"
    assert "text" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "hi", "--target", "toy", "--draft", "layers:5,3"), "draft"),
        (("run", "hi", "--target", "toy", "--draft", "layers:a"), "draft"),
        (("generate", "hi", "--seed", "-5", "--temperature", "1"), "seed"),
        (("generate", "caf\udce9"), "prompt"),
        (("generate", "hi", "--wait-s", "-1"), "wait_s"),
        (("generate", "hi", "--wait-s", "nan"), "wait_s"),
        (("up", "--target", "toy", "--listen", "256.1.1.1:1"), "cannot listen"),
    ],
)
async def test_what_cannot_be_done_is_said_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    status, _, errors = await outrider(*arguments)
    assert status == 1
    assert words in errors
    assert errors.count("\n") == 1, errors
