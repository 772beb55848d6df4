"""Rollback hints between the real services: the text is the same with them, without them, and with unreliable ones."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import pytest

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from draft_service.thread import WorkerThread
from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt
from outrider.ids import TokenKind
from outrider.messages import RollbackHint, SamplingParams, TargetFeatures
from outrider.model.toy import ToyTokenizer
from tests.integration.cluster_bench import TOY, Bench, Heard, hear

VOCAB = len(ToyTokenizer())
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "coupled": {"sampling": SamplingParams(), "seed": 11},
    "rejection": {"sampling": SamplingParams()},
}
CHOICES = [SpeculationChoice(gamma=gamma, window=window) for gamma, window in ((2, 2), (4, 8), (3, 12))]
NUM_TOKENS = 120
PATIENCE = {"min_patience_s": 1.0, "max_patience_s": 1.0}
"""Longer than a busy machine makes a drafter late: what is counted are hints, not expiries."""


class Unreliable(DraftApp):
    """Hears some hints not at all, some twice, some late; if it is `deceived`, some with another token."""

    deceived = False

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__(settings)
        self._turns = count()

    def _heard(self, thread: WorkerThread, address: str, message: TargetFeatures | RollbackHint) -> None:
        assert isinstance(message, RollbackHint)
        again = asyncio.get_running_loop().call_later
        match next(self._turns) % 7:
            case 0:
                return
            case 1:
                super()._heard(thread, address, message)
                again(0.0005, super()._heard, thread, address, message)
            case 2:
                again(0.002, super()._heard, thread, address, message)
            case 3 if self.deceived and message.token_id is not None:
                own = (message.token_id + 1) % VOCAB
                lie = RollbackHint(message.session_id, message.epoch, message.start, own)
                super()._heard(thread, address, lie)
            case _:
                super()._heard(thread, address, message)


class Deceived(Unreliable):
    deceived = True


def asking(**fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_origin": True}
    return GenerationRequest(TextPrompt("the cat sat on "), **{**known, **fields})


@pytest.fixture
async def bench(valkey_url: str) -> AsyncIterator[Bench]:
    async with Bench(valkey_url) as made:
        yield made


async def heard_with(
    bench: Bench, app: DraftApp, way: str, choices: Sequence[SpeculationChoice] = CHOICES, *, sends: bool = True
) -> list[Heard]:
    """Return a generation for each choice, in turn, drafted by a worker."""
    target, _ = await bench.verifier(send_hints=sends)
    drafter = await bench._run(app)
    _, _, client = await bench.orchestrator([target], [drafter], **PATIENCE)
    return [await hear(client, asking(speculation=choice, **WAYS[way])) for choice in choices]


async def twin(bench: Bench, way: str) -> list[int]:
    target, _ = await bench.verifier()
    _, _, client = await bench.orchestrator([target], [])
    return (await hear(client, asking(speculation=SpeculationChoice(off=True), **WAYS[way]))).token_ids


def settings(**fields: Any) -> DraftSettings:
    return DraftSettings(drafter="toy", model="toy", toy_agreement=0.6, **{**TOY, **fields})


def hints(app: DraftApp, fate: str) -> float:
    return app.metrics.registry.get_sample_value("outrider_draft_rollback_hints_total", {"fate": fate}) or 0.0


@pytest.mark.parametrize("way", WAYS)
async def test_hints_are_taken_and_the_text_is_the_twins(bench: Bench, way: str) -> None:
    app = DraftApp(settings())
    heard = await heard_with(bench, app, way)
    ends = sum(kind is not TokenKind.ACCEPTED for each in heard for chunk in each.chunks for kind in chunk.kinds)
    assert 0 < hints(app, "taken") <= ends
    assert hints(app, "foreign") == hints(app, "overruled") == 0
    if way != "rejection":
        assert [each.token_ids for each in heard] == [await twin(bench, way)] * len(CHOICES)


@pytest.mark.parametrize("side", ["verifier", "draft worker"])
async def test_either_side_may_do_without_hints(bench: Bench, side: str) -> None:
    app = DraftApp(settings(take_hints=side != "draft worker"))
    heard = await heard_with(bench, app, "greedy", sends=side != "verifier")
    assert [each.token_ids for each in heard] == [await twin(bench, "greedy")] * len(CHOICES)
    assert not any(hints(app, fate) for fate in ("taken", "late", "odd", "foreign"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Unreliable, Deceived])
async def test_hints_that_are_lost_late_doubled_or_false_change_no_text(
    bench: Bench, kind: type[Unreliable], way: str
) -> None:
    app = kind(settings())
    # The epoch of a false hint is sat out, and costs the verifier's patience.
    choices = CHOICES[1:2] if kind is Deceived else CHOICES
    heard = await heard_with(bench, app, way, choices)
    assert hints(app, "taken") > 0
    assert (hints(app, "overruled") > 0) is (kind is Deceived)
    for each in heard:
        assert len(each.token_ids) == NUM_TOKENS
        assert each.finished.figures.speculation_off == ""
    if way != "rejection":
        assert [each.token_ids for each in heard] == [await twin(bench, way)] * len(choices)
