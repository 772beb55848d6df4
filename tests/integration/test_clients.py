"""The Python clients and those of other languages, against a real cluster of toys; the examples of docs/clients.md."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import outrider
from outrider.client import Client
from outrider.errors import InvalidRequest
from outrider.generation import GenerationRequest, TextPrompt
from tests.integration.cluster_bench import Bench, Running
from tests.integration.cut_wire import CutWire

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/clients.md").read_text(encoding="utf-8"), re.DOTALL)
JAVASCRIPT = ROOT / "examples/javascript"
WORDS = "the cat sat on "


class Served:
    """Two orchestrators over one verifier; the first is behind a wire that can be cut."""

    def __init__(self, wire: CutWire, second: str, client: Client) -> None:
        self.wire, self.second, self.client = wire, second, client


@pytest.fixture(scope="module")
async def served(valkey_url: str) -> AsyncIterator[Served]:
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier(toy_delay_s=0.002)
        drafters: list[Running] = [(await bench.drafter())[0]]
        _, first, client = await bench.orchestrator([verifier], drafters)
        _, second, _ = await bench.orchestrator([verifier], drafters)
        async with CutWire(first.address) as wire:
            yield Served(wire, second.address, client)


async def run(*command: str, **settings: str) -> tuple[int, str, str]:
    """Run a program to its end; return its status and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


async def test_samples_are_different_texts_and_each_is_repeatable(served: Served) -> None:
    client = served.client
    answers = await client.samples(WORDS, 4, seed=5, max_tokens=12, ignore_eos=True)
    again = await client.ask(WORDS, seed=5, max_tokens=12, ignore_eos=True, sample_index=2)
    assert len({answer.token_ids for answer in answers}) == 4
    assert answers[2].token_ids == again.token_ids
    assert len({answer.session_id for answer in answers}) == 4


async def test_a_sample_that_is_refused_calls_the_others_off(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        await served.client.samples(WORDS, 3, temperature=-1.0)


async def test_all_ways_to_ask_give_the_same_answer(served: Served) -> None:
    client, request = served.client, GenerationRequest(TextPrompt(WORDS), seed=3, max_tokens=9, ignore_eos=True)
    answer = await client.ask(WORDS, seed=3, max_tokens=9, ignore_eos=True)
    ids = answer.token_ids
    assert (await client.ask(request)).token_ids == ids
    chunks = [event async for event in client.stream(request) if isinstance(event, outrider.Chunk)]
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == ids

    def without_loop() -> tuple[outrider.Answer, list[outrider.Answer], str]:
        with outrider.Client(served.wire.address) as sync:
            text = "".join(event.text for event in sync.stream(request) if isinstance(event, outrider.Chunk))
            return sync.ask(request), sync.samples(request, 2), text

    alone, both, text = await asyncio.to_thread(without_loop)
    assert alone.token_ids == both[0].token_ids == ids
    assert text == answer.text


async def test_a_chat_in_a_session_shows_the_model_what_the_whole_conversation_would(served: Served) -> None:
    client = served.client
    first = await client.ask([{"role": "user", "content": "a mat. "}], max_tokens=6, temperature=0.0)
    second = await client.ask(
        [{"role": "user", "content": "the cat"}], session_id=first.session_id, max_tokens=6, temperature=0.0
    )
    log = (await client.session(first.session_id, include_token_ids=True)).token_ids
    shown = [*log[: second.prompt_len]]
    whole = await client.ask(shown, max_tokens=6, temperature=0.0)
    assert whole.token_ids == second.token_ids
    added = log[first.prompt_len + len(first.token_ids) : second.prompt_len]
    assert bytes(token - 1 for token in added if token <= 256).startswith(b"\nuser: ")


async def test_special_tokens_are_in_the_text_where_they_are_asked_for(served: Served) -> None:
    biased = {0: 100.0}
    answer = await served.client.ask(
        WORDS, max_tokens=2, temperature=0.0, logit_bias=biased, ignore_eos=True, skip_special_tokens=False
    )
    plain = await served.client.ask(WORDS, max_tokens=2, temperature=0.0, logit_bias=biased, ignore_eos=True)
    assert answer.token_ids == plain.token_ids == (0, 0)
    assert (answer.text, plain.text) == ("<eos><eos>", "")


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
async def test_the_examples_of_the_page_run(served: Served, index: int) -> None:
    code = EXAMPLES[index]
    assert "127.0.0.1:7400" in code
    status, out, err = await run(sys.executable, "-c", code.replace("127.0.0.1:7400", served.wire.address))
    assert status == 0, err
    assert out.strip()


@pytest.mark.slow
async def test_the_examples_of_the_page_have_no_type_errors(tmp_path: Path) -> None:
    for index, code in enumerate(EXAMPLES):
        (tmp_path / f"example_{index}.py").write_text(code, encoding="utf-8")
    files = [str(tmp_path / f"example_{index}.py") for index in range(len(EXAMPLES))]
    mypy = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", *files]
    status, out, _ = await run(*mypy, MYPYPATH=str(ROOT), MYPY_CACHE_DIR=str(tmp_path / "cache"))
    assert status == 0, out
    (tmp_path / "wrong.py").write_text(EXAMPLES[0].replace("temperature=0", "temprature=0"), encoding="utf-8")
    status, out, _ = await run(
        *mypy, str(tmp_path / "wrong.py"), MYPYPATH=str(ROOT), MYPY_CACHE_DIR=str(tmp_path / "cache")
    )
    assert "temprature" in out


OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "ETIMEDOUT")
"""What npm says where there is no registry; anything else is a mistake in the example."""


@pytest.fixture(scope="module")
async def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the example with its packages, which are downloaded."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no Node here")
    folder = tmp_path_factory.mktemp("clients") / "examples/javascript"
    shutil.copytree(JAVASCRIPT, folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(ROOT / "protos", folder.parents[1] / "protos")
    ready = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
    status, _, err = await run(*ready)
    if status and any(word in err for word in OFFLINE):
        pytest.skip(f"the packages of the example cannot be had: {err[-200:]}")
    assert status == 0, err
    return folder


@pytest.mark.slow
async def test_the_javascript_example_goes_on_after_a_lost_connection(served: Served, javascript: Path) -> None:
    prompt = "the cat"
    whole = await served.client.ask([{"role": "user", "content": prompt}], max_tokens=200, temperature=0.0)
    process = await asyncio.create_subprocess_exec(
        "node", str(javascript / "client.js"), f"{served.wire.address},{served.second}", prompt, "200",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    begun = await asyncio.wait_for(process.stdout.read(8), 30)
    served.wire.cut()
    rest, err = await asyncio.wait_for(asyncio.gather(process.stdout.read(), process.stderr.read()), 60)
    assert await process.wait() == 0, err.decode()
    assert (begun + rest).decode().removesuffix("\n") == whole.text
    assert "going on elsewhere" in err.decode()


@pytest.mark.slow
async def test_the_javascript_example_passes_a_refusal_on(served: Served, javascript: Path) -> None:
    status, _, err = await run("node", str(javascript / "client.js"), served.second, "the cat", "-1")
    assert status == 1
    assert "max_tokens" in err
