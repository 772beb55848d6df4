"""The standing fault run in its short form, and what it must not overlook.

`make chaos` is the long form. Both repeat a sequence by its seed: `python -m tests.chaos --seed N --faults M`.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.client import Client
from outrider.generation import Chunk
from tests.chaos.__main__ import conclude
from tests.chaos.balance import check_leases, check_logs, check_usage, usage
from tests.chaos.campaign import Campaign, Run
from tests.chaos.clocks import find_library
from tests.chaos.fleet import Fleet
from tests.chaos.listeners import Book, Events, Listener
from tests.chaos.report import rows
from tests.chaos.schedule import ORCHESTRATORS, VERIFIERS, Kind, essentials
from tests.chaos.twins import Script, scripts

pytestmark = pytest.mark.timeout(300)

SEED = 4
"""Fixed, so that one tree has one outcome; the long form draws a fresh seed."""


@pytest.fixture(scope="module")
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """A fleet whose logs are kept if a test fails."""
    folder, failed = Path(tempfile.mkdtemp(prefix="outrider-chaos-")), request.session.testsfailed
    async with Fleet(folder, find_library(), forked=True) as made:
        yield made
    if request.session.testsfailed == failed:
        shutil.rmtree(folder)


async def test_texts_logs_and_places_survive_a_fault_of_every_kind(fleet: Fleet) -> None:
    kinds = [kind for kind in Kind if find_library() is not None or kind is not Kind.CLOCK]
    faults = essentials(SEED, kinds=kinds)
    run = await Campaign(fleet, scripts(), on_news=print).play(faults)
    assert not run.book.violations, f"seed {SEED}, logs in {fleet.folder}: {run.book.violations}"
    assert len(run.outcomes) == len(faults)
    assert {outcome.fault.kind for outcome in run.outcomes if outcome.was_seen} == set(kinds)
    assert run.book.num_sessions >= 16
    assert run.book.num_turns > run.book.num_sessions
    assert all(len(outcome.waits_s) == 16 for outcome in run.outcomes)
    assert sum(int(str(row[2])) + int(str(row[3])) for row in rows(run)) == len(faults)


# --- negative controls: each mistake is planted, and must be told -------------------------------------------------


class Forgetful(Listener):
    """A client that loses a token of the second chunk."""

    async def _altered(self, events: Events) -> Events:
        number = 0
        async for event in events:
            if isinstance(event, Chunk):
                number += 1
                if number == 2:
                    yield replace(event, token_ids=event.token_ids[1:])
                    continue
            yield event


class Repeating(Listener):
    """A client that hears its second chunk twice."""

    async def _altered(self, events: Events) -> Events:
        number = 0
        async for event in events:
            yield event
            if isinstance(event, Chunk):
                number += 1
                if number == 2:
                    yield event


def few() -> tuple[Script, ...]:
    return scripts(2, 40, later_every=0)


async def found_by(fleet: Fleet, kind: type[Listener], asked: tuple[Script, ...]) -> Run:
    return await Campaign(fleet, asked, listener=kind, quiet_s=0.2).play(())


@pytest.mark.parametrize(("kind", "word"), [(Forgetful, "token missing"), (Repeating, "token twice")])
async def test_a_token_that_is_lost_or_heard_twice_is_told(
    fleet: Fleet, kind: type[Listener], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = await found_by(fleet, kind, few())
    told = {violation.what for violation in run.book.violations}
    assert {word, "other text"} <= told
    assert conclude(run, 17, fleet.folder, tmp_path) == 1
    assert "seed 17" in capsys.readouterr().err
    assert (tmp_path / "seed-17" / "verify-0.log").exists()


async def test_the_text_of_another_seed_is_told(fleet: Fleet) -> None:
    greedy, seeded = few()
    run = await found_by(fleet, Listener, (greedy, replace(seeded, seed=999)))
    assert {violation.what for violation in run.book.violations} == {"twin", "other text", "log differs"}
    assert all("seed 101" in violation.words or "session" in violation.words for violation in run.book.violations)


async def test_a_quiet_run_has_nothing_to_tell(fleet: Fleet, tmp_path: Path) -> None:
    run = await found_by(fleet, Listener, few())
    assert run.book.num_sessions >= 2
    assert conclude(run, 17, fleet.folder, tmp_path) == 0


async def test_a_session_that_stays_open_is_told_by_places_kv_and_lease(fleet: Fleet) -> None:
    before, book = await usage(fleet), Book()
    (script,) = scripts(1, 3000, later_every=0)
    async with Client(fleet.address(ORCHESTRATORS[0])) as client:
        events = client.generate(script.request())
        try:
            await anext(events)
            async with asyncio.timeout(60):
                await _kv_in_use(fleet)
            await check_usage(fleet, before, book, within_s=0.0)
            await check_leases(fleet, book, within_s=0.0)
        finally:
            await events.aclose()
    told = " ".join(violation.what + violation.words for violation in book.violations)
    assert "lease held" in told
    assert "orchestrate-0: outrider_num_requests_running" in told
    assert "outrider_kv_used_bytes" in told
    after = Book()
    await check_usage(fleet, before, after)
    assert not after.violations


async def _kv_in_use(fleet: Fleet) -> None:
    """Wait until a verifier has fed something."""
    while True:
        now = await usage(fleet)
        if any(now[name]["outrider_kv_used_bytes"] for name in VERIFIERS):
            return
        await asyncio.sleep(0.02)


async def test_a_log_that_differs_from_what_the_client_saw_is_told(fleet: Fleet) -> None:
    book = Book()
    (script,) = scripts(1, 20)
    async with Client(fleet.address(ORCHESTRATORS[0])) as client:
        listener = Listener(script, [client], book)
        await listener.one_session()
    (session_id, seen, prompt_len), book.violations = book.done[0], []
    assert seen == script.token_ids
    assert len(script.turns) == 2
    book.done = [(session_id, (*seen[:-1], 1), prompt_len)]
    await check_logs(fleet, book)
    assert [violation.what for violation in book.violations] == ["log differs"]
