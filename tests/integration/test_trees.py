"""Trees over real connections: what a client hears is what it hears without drafts."""

import asyncio
from dataclasses import replace

from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams
from tests.integration.cluster_bench import Bench, hear

DEEP, OFF = SpeculationChoice(gamma=3, window=3), SpeculationChoice(off=True)


def requests(seed: int | None, choice: SpeculationChoice) -> list[GenerationRequest]:
    sampling = SamplingParams(temperature=0.0 if seed is None else 1.0)
    return [
        GenerationRequest(
            TextPrompt(f"the cat sat on mat {number}. "), max_tokens=40, sampling=sampling, seed=seed,
            ignore_eos=True, speculation=choice,
        )
        for number in range(3)
    ]  # fmt: skip


async def test_trees_change_no_text_and_are_accepted(valkey_url: str) -> None:
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier()
        drafter, _ = await bench.drafter(tree_nodes=7, toy_agreement=0.7)
        _, _, client = await bench.orchestrator([verifier], [drafter])
        for seed in (None, 5):
            twins = [(await hear(client, request)).token_ids for request in requests(seed, OFF)]
            heard = await asyncio.gather(*(hear(client, request) for request in requests(seed, DEEP)))
            assert [each.token_ids for each in heard] == twins
            assert sum(each.finished.figures.num_accepted for each in heard) > 20
        free = replace(requests(5, DEEP)[0], seed=None)
        figures = (await hear(client, free)).finished.figures
        assert (figures.num_accepted > 5, figures.guarantee_void) == (True, 0)
        engine = bench.verifiers[0].engine
        assert engine is not None
        counters = engine.counters
        assert (counters["draft_row_mismatch"], counters["garbage"], counters["gap"]) == (0, 0, 0)
