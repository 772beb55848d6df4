"""A stored generation is opened without holding up those that run."""

import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from orchestrator.text import Decoder
from outrider.generation import GenerationRequest, SpeculationChoice, Started, TextPrompt
from outrider.messages import SamplingParams
from outrider.model.toy import ToyTokenizer
from tests.integration.cluster_bench import Bench, hear

REQUEST = GenerationRequest(
    TextPrompt("the cat sat on "),
    max_tokens=40,
    sampling=SamplingParams(temperature=0.0),
    ignore_eos=True,
    speculation=SpeculationChoice(off=True),
)


@pytest.fixture
async def bench(valkey_url: str) -> AsyncIterator[Bench]:
    async with Bench(valkey_url) as made:
        yield made


class Watched(ToyTokenizer):
    """A tokenizer that knows on which threads it makes text."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = set[int]()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.threads.add(threading.get_ident())
        return super().decode(token_ids, skip_special_tokens)


async def test_the_text_of_a_log_is_made_again_beside_the_event_loop(bench: Bench) -> None:
    verifier, _ = await bench.verifier()
    _, app, client = await bench.orchestrator([verifier], [])
    whole = await hear(client, REQUEST)
    started = whole.events[0]
    assert isinstance(started, Started)
    assert app.sessions is not None
    opening, watched = app.sessions._opening, Watched()
    opening._language = replace(opening._language, decoder=Decoder(watched))
    watched.threads.clear()
    again = [event async for event in client.resume(started.session_id, started.prompt_len)]
    assert "".join(getattr(event, "text", "") for event in again) == whole.text
    assert watched.threads - {threading.get_ident()}, "thousands of tokens would hold up every other generation"
