"""`outrider drafters compare` asks the real services, with the toy model."""

from outrider.cli.drafters.asking import Asking, ask_all
from outrider.cli.drafters.tally import measured
from outrider.prompts import Prompt
from tests.integration.cluster_bench import Bench

PROMPTS = [Prompt("a-1", "the cat"), Prompt("a-2", "a dog and", raw=True)]


async def test_every_prompt_is_answered_in_every_way_with_the_same_text(valkey_url: str) -> None:
    asking = Asking(tokens=24, temperature=0.8, seed=11, trial_gamma=3, gammas=(None, 2))
    done: list[int] = []
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier()
        drafter, _ = await bench.drafter(toy_agreement=0.7)
        _, _, client = await bench.orchestrator([verifier], [drafter])
        asked = await ask_all(client, PROMPTS, asking, done.append)
    result = measured("toy", asked, asking.trial_gamma, 8)
    assert done == [1, 2]
    assert [way.name for way in result.ways] == ["automatic", "gamma 2"]
    assert all(way.num_equal == way.num_answers == 2 for way in result.ways)
    assert all(len(answer.token_ids) == 24 for answer in asked.plain)
    assert not any(answer.figures.num_tested for answer in asked.plain)
    assert len(result.tested) <= 3
    assert sum(result.tested) == sum(answer.figures.num_tested for answer in asked.trial) > 0
    assert all(any(answer.tested) and len(answer.tested) == len(answer.counts) for answer in asked.trial)
