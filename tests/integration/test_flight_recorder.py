"""The flight recorder in a whole cluster: real generations with drafts, run again from their records."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrator.flight.replay import load, main, replay
from outrider.errors import OutriderError
from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams
from tests.integration.cluster_bench import Bench, hear, until

SECRET = "zebra"


@pytest.fixture
async def bench(valkey_url: str) -> AsyncIterator[Bench]:
    async with Bench(valkey_url) as made:
        yield made


def ask(number: int, **fields: object) -> GenerationRequest:
    known: dict[str, object] = {
        "max_tokens": 60,
        "sampling": SamplingParams(temperature=0.0),
        "ignore_eos": True,
        "speculation": SpeculationChoice(gamma=3, window=6),
        **fields,
    }
    return GenerationRequest(TextPrompt(f"the {SECRET} number {number} "), **known)  # type: ignore[arg-type]


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


async def test_generations_with_drafts_come_out_the_same_from_their_records(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier, _ = await bench.verifier()
    drafter, _ = await bench.drafter()
    _, _, client = await bench.orchestrator([verifier], [drafter], flight_folder=str(tmp_path), flight_events=4096)
    heard = [
        await hear(client, ask(0)),
        await hear(client, ask(1, sampling=SamplingParams())),
        await hear(client, ask(2, speculation=SpeculationChoice())),
    ]
    assert records(tmp_path) == [], "nothing failed"
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: len(records(tmp_path)) == 3)
    for path in records(tmp_path):
        record = load(path)
        assert record["from_the_beginning"]
        assert record["outcome"] == "length"
        replayed = replay(record)
        assert replayed.difference == ""
        assert replayed.num_events > 10
        assert SECRET not in path.read_text()
    assert all(each.finished.figures.num_accepted > 0 for each in heard[:2])
    assert main([str(path) for path in records(tmp_path)]) == 0
    assert capsys.readouterr().out.count("commands as recorded") == 3


async def test_the_signal_ends_no_orchestrator_that_has_no_folder(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    verifier, _ = await bench.verifier()
    _, _, client = await bench.orchestrator([verifier], [])
    await hear(client, ask(0, max_tokens=3))
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: "FLIGHT_FOLDER is not set" in caplog.text)
    assert len((await hear(client, ask(0, max_tokens=3))).token_ids) == 3


async def test_a_generation_that_fails_leaves_a_record_that_says_how(bench: Bench, tmp_path: Path) -> None:
    verifier, _ = await bench.verifier(toy_delay_s=0.02)
    drafter, _ = await bench.drafter()
    _, app, client = await bench.orchestrator(
        [verifier], [drafter], flight_folder=str(tmp_path), verifier_deadline_s=0.2
    )
    with pytest.raises(OutriderError):
        async for _ in client.generate(ask(0, max_tokens=500)):
            await verifier.kill()
    await until(lambda: len(records(tmp_path)) == 1)
    record = load(records(tmp_path)[0])
    events = [entry["event"]["is"] for segment in record["segments"] for entry in segment["entries"]]
    assert "VerifierLost" in events
    assert record["outcome"] == "unavailable"
    assert replay(record).difference == ""
    sample = app.metrics.registry.get_sample_value
    await until(lambda: sample("outrider_flight_records_total", {"cause": "error"}) == 1)
