"""Drafting from the target's hidden states through the real services: the text is the target's own, and drafts help."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from draft_service.loading import Loaded as LoadedDrafter
from outrider.client import Client
from outrider.drafting.checkpoint import Draft
from outrider.drafting.feature import FeatureDraft
from outrider.generation import GenerationRequest, SpeculationChoice, TokenPrompt
from outrider.messages import SamplingParams
from outrider.model.probe import calibrate
from outrider.model.tiny import random_model
from outrider.model.toy import ToyTokenizer
from outrider.model.transformers_runner import TransformersRunner
from outrider.model.vocabulary import vocabulary
from tests.integration.cluster_bench import Bench, Running, hear
from tests.unit.feature_bench import HIDDEN, made, random_draft
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings
from verify_service.loading import Loaded as LoadedTarget

SIZE = len(ToyTokenizer())
OFF = SpeculationChoice(off=True)
VOCABULARY = vocabulary(ToyTokenizer())
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "coupled": SamplingParams(temperature=0.4)}


def forgetful_target() -> torch.nn.Module:
    """Return a target that hardly looks back: its next token is nearly a function of the last one."""
    model = random_model(4, vocab_size=SIZE, hidden_size=HIDDEN, intermediate_size=48)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= 0.02
    return model


def draft_of(model: torch.nn.Module, kind: str) -> Draft:
    """Return a draft that takes the norm of a token's embedding for its feature; it knows four fifths of the ids."""
    draft = random_draft(kind, known_ids=4 * SIZE // 5, vocab_size=SIZE)
    weights = dict(model.named_parameters())
    draft.join.weight.data = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    draft.norm_out.weight.data = weights["model.norm.weight"].data.clone()
    draft.head.weight.data = weights["lm_head.weight"].data[draft.draft_ids].clone()
    if isinstance(draft, FeatureDraft):
        draft.out.weight.data.zero_()
        draft.down.weight.data.zero_()
    else:
        draft.blocks[0].weight.data.zero_()  # type: ignore[operator]
        draft.blocks[0].bias.data.zero_()  # type: ignore[operator]
    return draft


@asynccontextmanager
async def cluster(store_url: str, kind: str) -> AsyncIterator[tuple[Client, DraftApp]]:
    """Run the three services with a tiny target and a drafter of a kind."""
    model = forgetful_target()
    drafter = made(draft_of(model, kind), model.get_input_embeddings().weight.clone(), SIZE)  # type: ignore[operator]
    runner = TransformersRunner(model, name="toy", num_blocks=64)  # type: ignore[arg-type]
    calibrate(runner)
    async with Bench(store_url) as bench:
        verifier = VerifyApp(VerifySettings(model="toy"), lambda *_: LoadedTarget(runner, VOCABULARY, ToyTokenizer()))
        loaded = LoadedDrafter(drafter, VOCABULARY, tokenizer=ToyTokenizer())
        worker = DraftApp(DraftSettings(), lambda *_: loaded)
        running: list[Running] = [await bench._run(verifier), await bench._run(worker)]
        _, _, client = await bench.orchestrator(running[:1], running[1:])
        yield client, worker


def requests(mode: str, choice: SpeculationChoice) -> list[GenerationRequest]:
    seed = 5 if mode == "coupled" else None
    return [
        GenerationRequest(
            TokenPrompt(tuple((number + 7 * index) % SIZE for index in range(20 + 50 * number))),
            max_tokens=24, sampling=SAMPLINGS[mode], seed=seed, ignore_eos=True, speculation=choice,
        )
        for number in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "modes"), [("feature", ("greedy", "coupled")), ("medusa", ("coupled",))])
async def test_a_draft_from_features_changes_no_text_and_is_accepted(
    valkey_url: str, kind: str, modes: tuple[str, ...]
) -> None:
    """Three sessions at once, pipelined and sequential, beside their twins without drafts; and one by its law alone."""
    async with cluster(valkey_url, kind) as (client, worker):
        for mode in modes:
            twins = [(await hear(client, request)).token_ids for request in requests(mode, OFF)]
            for window in (3, 9):
                asked = requests(mode, SpeculationChoice(gamma=3, window=window))
                heard = await asyncio.gather(*(hear(client, request) for request in asked))
                assert [each.token_ids for each in heard] == twins
                figures = [each.finished.figures for each in heard]
                assert sum(each.num_accepted for each in figures) > 10
        free = replace(requests("coupled", SpeculationChoice(gamma=3, window=9))[0], seed=None)
        last = (await hear(client, free)).finished.figures
        assert (last.num_accepted > 2, last.guarantee_void) == (True, 0)
        taken = worker.metrics.registry.get_sample_value("outrider_draft_features_total", {"fate": "taken"})
        assert taken is not None
        assert taken > 200
