"""Groups of verifiers that serve different models, in one registry: each orchestrator finds those of its own."""

from pathlib import Path
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams
from tests.e2e.toys import expected
from tests.integration.cluster_bench import Bench, hear
from tests.unit.test_parallel import save_model
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings

HEARTBEAT: dict[str, Any] = {"heartbeat_ttl_s": 3.0}


def ask(text: str, **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 20, "sampling": SamplingParams(temperature=0.0), "ignore_eos": True,
        "speculation": SpeculationChoice(gamma=4, window=8),
    }  # fmt: skip
    return GenerationRequest(TextPrompt(text), **{**known, **fields})


async def test_each_model_is_served_by_its_own_verifiers(valkey_url: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    common = {"store_url": valkey_url, **HEARTBEAT}
    async with Bench(valkey_url) as bench:
        _, toy = await bench.verifier(**common)
        tiny = VerifyApp(VerifySettings(model=str(tmp_path), dtype="float32", num_blocks=16, **common))
        await bench._run(tiny)
        await bench.drafter(toy_agreement=0.9, **common)
        _, _, of_toy = await bench.orchestrator([], [], **common)
        _, _, of_tiny = await bench.orchestrator([], [], model=str(tmp_path), **common)
        for _ in range(3):
            said = await hear(of_toy, ask("the cat sat on "))
            assert said.token_ids == expected("the cat sat on ", 20)
            assert said.finished.figures.num_accepted > 0
            # The draft worker speaks the toy's ids: the other model is not paired with it, and decodes plain.
            other = await hear(of_tiny, ask("w5 w6 w7"))
            assert other.finished.figures.speculation_off == "vocabulary"
        assert toy.engine is not None
        assert tiny.engine is not None
        assert toy.engine.counters["decode_rows"] > 0
        # One row for each of its tokens, and none of the toy's sessions.
        assert tiny.engine.counters["decode_rows"] == 3 * 20
        with pytest.raises(InvalidRequest, match="is not allowed"):
            await hear(of_toy, ask("the cat sat on ", model=str(tmp_path)))
