"""The exactness audit: finished sessions are decoded again as twins while nothing else is to be done."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.ids import Generation, Mode
from outrider.messages import SamplingParams
from outrider.model.kv import BlockSlot, pool_rows
from outrider.model.planning import RowClasses
from outrider.model.runner import Feed, Rows
from outrider.model.tiny import random_model
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.model.transformers_runner import TransformersRunner
from tests.unit.verify_desk import KEY, VOCAB, ClassesMatter, Client, Desk, Request, noisy_draft
from verify_service import judging
from verify_service.audit import MAX_QUEUED, MAX_TRIES, SKIPPED, AuditSettings
from verify_service.engine import EngineSettings
from verify_service.events import Judged, Test
from verify_service.metrics import VerifyMetrics
from verify_service.servicer import VerifyServicer

ALL = EngineSettings(audit=AuditSettings(share=1.0))
COUPLED = Request(mode=Mode.COUPLED, sampling=SamplingParams(temperature=0.9), key=KEY)
REPEATING = Request(sampling=SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5))
LONG = Request(prompt=tuple(at % VOCAB for at in range(150)), max_tokens=70)

SHORT = replace(LONG, prompt=LONG.prompt[:70], max_tokens=20)


def idle(desk: Desk, max_steps: int = 2000) -> None:
    """Let the engine go on until it has nothing to do."""
    for _ in range(max_steps):
        if not desk.step():
            return
    raise AssertionError("the engine never rests")


def served(desk: Desk, request: Request, weight: float = 0.4) -> Client:
    """Run one session with a drafter that is often wrong, to its end."""
    client = Client(desk, request, noisy_draft(weight))
    desk.run([client])
    return client


def believe_everything(_session: Any, test: Test, _rows: Any) -> Judged:
    return Judged(len(test.token_ids), len(test.token_ids), None if test.token_ids else 1)


# --- what is found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [Request(), COUPLED, REPEATING, LONG], ids=["greedy", "seeded", "history", "long"])
@pytest.mark.parametrize("runner", [ToyRunner, ClassesMatter], ids=["toy", "classes_matter"])
def test_a_right_engine_yields_only_matches(request_: Request, runner: Any) -> None:
    desk = Desk(ClassesMatter() if runner is ClassesMatter else None, ALL)
    served(desk, request_)
    idle(desk)
    counts = desk.engine.audit.counters
    assert counts == {"checked": 1, "tokens": request_.max_tokens}
    assert desk.runner.free_blocks == desk.runner.info.num_blocks


def test_a_resumed_session_is_checked_from_where_its_stream_began() -> None:
    desk = Desk(ClassesMatter(), ALL)
    first = served(desk, LONG)
    again = replace(
        LONG, prompt=tuple(first.committed[:180]), prompt_len=150, generation=Generation(2, 0),
        classes=first.opened().classes + tuple([type(first.opened().classes[0]).DECODE] * 30),
    )  # fmt: skip
    second = served(desk, again)
    idle(desk)
    assert second.committed == first.committed
    assert desk.engine.audit.counters == {"checked": 2, "tokens": 70 + 40}


@pytest.mark.parametrize("place", ["_compare", "_decide"])
def test_a_mistake_in_acceptance_is_found_and_told_without_the_text(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = getattr(judging, place)

    def wrong(*args: Any) -> Judged:
        test = next(arg for arg in args if isinstance(arg, Test))
        return believe_everything(None, test, None) if test.token_ids else right(*args)

    monkeypatch.setattr(judging, place, wrong)
    desk = Desk(settings=ALL)
    with caplog.at_level(logging.ERROR):
        client = served(desk, Request() if place == "_compare" else COUPLED, weight=0.9)
        idle(desk)
    counts = desk.engine.audit.counters
    assert (counts["checked"], counts["mismatch"]) == (1, 1)
    (line,) = (record.getMessage() for record in caplog.records)
    assert "session s (" in line
    assert f"of {len(client.output)} drawn" in line
    assert desk.engine.counters["failed_sessions"] == 0


def test_a_mistake_at_the_last_position_is_found(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(settings=ALL)
    client = Client(desk, Request(max_tokens=5))
    for _ in range(100):
        desk.step()
        if len(client.committed) == 8:
            break
    session = desk.engine._roster.sessions()[0]
    session.chain.tokens[-1] = (session.chain.tokens[-1] + 1) % VOCAB
    with caplog.at_level(logging.ERROR):
        idle(desk)
    assert desk.engine.audit.counters["mismatch"] == 1
    assert "at position 7, token 5 of 5 drawn" in caplog.text


def test_a_real_models_sessions_match_and_one_whose_cache_was_spoilt_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = TransformersRunner(random_model(3, vocab_size=VOCAB), name="tiny", num_blocks=16)
    runner.set_classes(RowClasses((16,), (16,), items_mix=False, spans_mix=False), "")
    assert runner.info.exactness == "bitwise"
    with torch.inference_mode():
        desk = Desk(runner, ALL)
        for request in (SHORT, replace(COUPLED, session_id="seeded", max_tokens=20)):
            served(desk, request)
            idle(desk)
        assert desk.engine.audit.counters == {"checked": 2, "tokens": 40}
        truncate = BlockSlot.truncate
        monkeypatch.setattr(BlockSlot, "truncate", lambda slot, length: spoil(runner, slot, length, truncate))
        served(desk, replace(SHORT, session_id="spoilt"), weight=1.0)
        idle(desk)
    assert desk.engine.audit.counters["mismatch"] == 1
    assert desk.engine.counters["failed_sessions"] == 0


def spoil(runner: TransformersRunner, slot: BlockSlot, length: int, truncate: Any) -> None:
    """Forget what was rejected, and a token before it too, by its values: no rollback may do that."""
    is_rollback = 0 < length < slot.length
    truncate(slot, length)
    if is_rollback:
        for layer in runner._kv.layers:
            layer[pool_rows(slot, length - 1, length)] = 1.0


# --- whom it costs nothing ----------------------------------------------------------------------------------------


def test_a_session_that_opens_gets_the_engine_at_once_and_the_twin_goes_on_later() -> None:
    desk = Desk(settings=ALL)
    served(desk, replace(LONG, session_id="first"))
    for _ in range(5):
        assert desk.step()  # the twin is under way
    assert desk.runner.free_blocks < desk.runner.info.num_blocks
    plain = Client(desk, Request(session_id="second"))
    alone = Desk(settings=EngineSettings())
    other = Client(alone, Request(session_id="second"))
    for _ in range(60):
        alone.step()
        desk.step()
        assert plain.committed == other.committed, "not one pass later than without a twin"
    assert plain.done
    idle(desk)
    assert desk.engine.audit.counters["checked"] == 2
    assert desk.engine.audit.counters["mismatch"] == 0
    assert not desk.engine.counters["kv_unbalanced"]


def test_no_twin_runs_while_a_session_is_open_even_if_it_has_nothing_to_do() -> None:
    desk = Desk(settings=ALL)
    served(desk, Request(session_id="first"))
    waiting = Client(desk, Request(session_id="second", patience_s=1e6), noisy_draft(0.4))
    for _ in range(50):
        desk.step()  # its drafter says nothing
    assert not waiting.done
    assert not desk.engine.audit.counters


def test_a_session_is_skipped_when_its_twin_was_given_up_too_often() -> None:
    desk = Desk(settings=ALL)
    served(desk, replace(LONG, session_id="first"))
    for number in range(MAX_TRIES):
        desk.step()
        desk.step()
        served(desk, Request(session_id=f"rejection-{number}", mode=Mode.REJECTION, sampling=SamplingParams(), key=KEY))
    idle(desk)
    assert desk.engine.audit.counters == {"given_up": 1}
    assert desk.runner.free_blocks == desk.runner.info.num_blocks


class FailsForTwins(ToyRunner):
    """A toy whose passes fail once it is told so."""

    broken = False

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        if self.broken:
            raise RuntimeError("no such kernel")
        return super().forward(feeds)


def test_a_twin_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    runner = FailsForTwins(ToyLanguage(VOCAB, seed=5))
    desk = Desk(runner, ALL)
    served(desk, Request())
    runner.broken = True
    with caplog.at_level(logging.ERROR):
        idle(desk)
    runner.broken = False
    assert desk.engine.audit.counters == {"failed": 1}
    assert "a twin of session s failed" in caplog.text
    assert len(served(desk, Request(session_id="next")).output) == 40
    assert desk.engine.counters["failed_passes"] == 0


# --- who is checked -----------------------------------------------------------------------------------------------


def test_a_share_of_one_in_four_checks_every_fourth() -> None:
    desk = Desk(settings=EngineSettings(audit=AuditSettings(share=0.25)))
    for number in range(9):
        served(desk, Request(session_id=f"s{number}", max_tokens=3))
        idle(desk)
    assert desk.engine.audit.counters["checked"] == 2


def test_nothing_is_checked_unless_it_is_asked_for() -> None:
    desk = Desk()
    served(desk, Request())
    idle(desk)
    assert not desk.engine.audit.counters


def test_a_session_without_seed_has_no_twin() -> None:
    desk = Desk(settings=ALL)
    served(desk, Request(mode=Mode.REJECTION, sampling=SamplingParams(), key=KEY))
    idle(desk)
    assert not desk.engine.audit.counters


def test_rows_that_depend_on_the_batch_are_not_held_against_anybody() -> None:
    runner = ToyRunner(ToyLanguage(VOCAB, seed=5))
    runner._info = replace(runner._info, exactness="distribution")
    desk = Desk(runner, ALL)
    served(desk, Request())
    idle(desk)
    assert not desk.engine.audit.counters


def test_only_so_many_positions_are_looked_at() -> None:
    desk = Desk(settings=EngineSettings(audit=AuditSettings(share=1.0, max_tokens=20)))
    served(desk, Request())
    idle(desk)
    assert desk.engine.audit.counters == {"checked": 1, "tokens": 17}
    served(desk, replace(LONG, session_id="long"))
    idle(desk)
    assert desk.engine.audit.counters["too_long"] == 1


def test_no_more_than_a_few_sessions_wait_for_idle_time() -> None:
    desk = Desk(settings=ALL)
    desk.run([Client(desk, Request(session_id=f"s{number}", max_tokens=4)) for number in range(MAX_QUEUED + 3)])
    idle(desk)
    assert desk.engine.audit.counters["checked"] == MAX_QUEUED
    assert desk.engine.audit.counters["queue_full"] == 3


def test_what_was_found_is_in_the_metrics() -> None:
    desk = Desk(settings=ALL)
    served(desk, Request())
    idle(desk)
    metrics = VerifyMetrics(VerifyServicer())
    metrics.watch(desk.engine)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"outrider_exactness_audit_{name}_total", labels)

    assert (value("checked"), value("mismatch"), value("tokens")) == (1, 0, 40)
    assert all(value("skipped", reason=reason) == 0 for reason in SKIPPED)
