"""Shadowing a logged session says what a live session with the same drafter has said."""

import asyncio
import json
from pathlib import Path

import pytest

from draft_service.config import DraftSettings
from draft_service.loading import load_drafter
from draft_service.replay import replay
from outrider.cli.app import app
from outrider.cli.shadow.sources import read_store
from outrider.errors import Unavailable
from outrider.generation import GenerationRequest, SpeculationChoice, Started, TextPrompt
from outrider.ids import Mode, SessionId, TokenClass
from outrider.messages import SamplingParams
from outrider.model.toy import ToyTokenizer
from outrider.store.connect import open_client
from outrider.store.errors import SessionNotFound
from outrider.store.finding import latest_sessions
from outrider.store.records import SessionState
from outrider.store.sessions import SessionStore
from tests.integration.cluster_bench import TOY, Bench, hear

GAMMA = 3
ROUNDS = SpeculationChoice(gamma=GAMMA, restart_gamma=GAMMA, window=GAMMA)


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (0.9, 5)], ids=["greedy", "seeded"])
async def test_a_replay_meets_the_tests_of_the_live_session(
    valkey_url: str, temperature: float, seed: int | None
) -> None:
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier()
        worker, _ = await bench.drafter(toy_agreement=0.7)
        _, _, client = await bench.orchestrator([verifier], [worker])
        request = GenerationRequest(
            TextPrompt("the cat"), max_tokens=60, sampling=SamplingParams(temperature=temperature), seed=seed,
            speculation=ROUNDS, ignore_eos=True,
        )  # fmt: skip
        heard = await hear(client, request)
    started, live = heard.events[0], heard.finished.figures
    assert isinstance(started, Started)
    [session] = await read_store(valkey_url, [started.session_id], 1)
    settings = DraftSettings(drafter="toy", model="toy", toy_agreement=0.7, **TOY)
    result = replay(load_drafter(settings, lambda *_: None).drafter, session, GAMMA, 1000)
    assert result.exact
    assert result.num_tokens == 60
    assert (result.tested, result.accepted) == (live.tested_per_position, live.accepted_per_position)
    assert 0 < sum(result.accepted) < sum(result.tested)


def test_the_command_shadows_a_file_of_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ToyTokenizer().encode("abcdefgh" * 6)
    line = json.dumps({"token_ids": text, "prompt_len": 20})
    foreign = json.dumps({"token_ids": [*text, 1 << 20], "prompt_len": 20, "session_id": "foreign"})
    sessions, written = tmp_path / "sessions.jsonl", tmp_path / "report.html"
    sessions.write_text(f"{line}\n{foreign}\n")
    options = ["--target", "toy", "--drafter", "prompt-lookup", "--gamma", "3", "--threads", "1", "--max-tokens", "99"]
    options += ["--verify-ms", "20"]
    app(["shadow", *options, "--file", str(sessions), "--report", str(written)], result_action="return_value")
    printed = capsys.readouterr().out
    assert ["greedy", "1", "28", "1.000", "4.00", "0.00"] in [each.split() for each in printed.splitlines()]
    assert "left out: foreign: it has ids past the drafter's vocabulary" in printed
    assert "times plain at gamma" in printed
    assert "1.000" in written.read_text()


@pytest.mark.slow
def test_a_drafter_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = tmp_path / "sessions.jsonl"
    sessions.write_text('{"token_ids": [1, 2], "prompt_len": 1}')
    monkeypatch.setenv("OUTRIDER_DRAFT_MIN_NGRAM", "0")
    options = ["--target", "toy", "--drafter", "prompt-lookup", "--threads", "1", "--file", str(sessions)]
    with pytest.raises(Unavailable, match="OUTRIDER_DRAFT_MIN_NGRAM"):
        app(["shadow", *options], result_action="return_value")


async def test_the_latest_sessions_of_a_store_are_found_without_their_names(valkey_url: str) -> None:
    client = open_client(valkey_url)
    store = SessionStore(client, prefix="shadowing")
    state = SessionState("toy", Mode.GREEDY, 1, 10)
    for name in ("a", "b", "c"):
        await store.create(SessionId(name), state, (1,), (TokenClass.PROMPT,), "owner", 10.0)
        await asyncio.sleep(0.01)
    await store.append(SessionId("a"), 1, 1, (2,), (TokenClass.DECODE,))
    latest = await latest_sessions(client, 2, prefix="shadowing")
    for name in ("a", "b", "c"):
        await store.delete(SessionId(name))
    await client.aclose()
    assert latest == ["a", "c"]


async def test_a_session_that_is_named_must_be_there(valkey_url: str) -> None:
    with pytest.raises(SessionNotFound):
        await read_store(valkey_url, [SessionId("missing")], 5)
