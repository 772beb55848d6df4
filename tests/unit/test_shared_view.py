"""Generations that look for workers again and again share what one of them has read."""

import asyncio
from dataclasses import replace

import pytest

from orchestrator.channels import Channels
from orchestrator.events import DrafterChosen
from orchestrator.job import Settings, Tools
from orchestrator.metrics import Metrics
from orchestrator.peers import Fed, Peers
from orchestrator.placement import Placement, Wanted
from orchestrator.search import Search
from orchestrator.shared_view import FRESH_S, SharedView
from outrider.ids import Generation
from outrider.store.connect import open_client
from outrider.store.sessions import SessionStore
from tests.unit.registries import Registry
from tests.unit.test_placement import Clock, worker
from tests.unit.test_showing import JOB

NUM_GENERATIONS = 50
DRAFTER = worker("d", "draft", drafter="toy")


def searching(registry: Registry) -> tuple[list[Search], list[Fed]]:
    """Return the searches of generations of one process, and what comes of them."""
    store = SessionStore(open_client("redis://127.0.0.1:1/0"))  # nothing here asks it
    tools, fed = Tools(store, Placement(registry, Channels()), Metrics(), Settings()), list[Fed]()
    job = replace(JOB, verifier=worker("v"))

    def feed(event: Fed) -> None:
        fed.append(event)

    return [Search(job, tools, Peers(job, tools, feed), feed) for _ in range(NUM_GENERATIONS)], fed


@pytest.mark.parametrize("found", [True, False], ids=["found", "none is there"])
async def test_generations_without_a_draft_worker_share_one_read_of_the_registry(found: bool) -> None:
    registry = Registry(DRAFTER) if found else Registry()
    searches, fed = searching(registry)
    await asyncio.gather(*(search.drafter(length=8) for search in searches))
    for search in searches:
        await search.drafter(length=8)
    assert registry.num_asked == 1
    assert fed == [DrafterChosen(DRAFTER.worker_id)] * (2 * NUM_GENERATIONS if found else 0)


async def test_generations_of_a_verifier_that_stops_share_one_read_of_the_registry() -> None:
    registry = Registry(replace(worker("other", context_len=2048), model=JOB.state.model))
    searches, fed = searching(registry)
    await asyncio.gather(*(search.hand_over(Generation()) for search in searches))
    assert (registry.num_asked, len(fed)) == (1, NUM_GENERATIONS)


async def test_a_generation_that_begins_reads_anew() -> None:
    registry = Registry(DRAFTER)
    placement, verifier = Placement(registry, Channels()), worker("v")
    assert (await placement.choose_drafter(verifier, Wanted(again=True)))[0] == DRAFTER
    registry.all.clear()
    assert (await placement.choose_drafter(verifier, Wanted(again=True)))[0] == DRAFTER
    assert (await placement.choose_drafter(verifier, Wanted(new=True)))[0] is None


async def test_what_was_read_is_used_for_a_moment_only_and_by_role() -> None:
    registry, clock = Registry(DRAFTER), Clock()
    view = SharedView(registry, clock)
    assert await view.workers("draft") == [DRAFTER]
    assert await view.workers("verify") == []
    registry.all.clear()
    clock.now_s += 0.9 * FRESH_S
    assert await view.workers("draft") == [DRAFTER]
    clock.now_s += 0.2 * FRESH_S
    assert await view.workers("draft") == []
    assert registry.num_asked == 3


async def test_a_registry_that_is_away_is_asked_for_all_together_and_again_a_moment_later() -> None:
    registry, clock = Registry(DRAFTER), Clock()
    view = SharedView(registry, clock)
    registry.away = True
    told = await asyncio.gather(*(view.workers("draft") for _ in range(NUM_GENERATIONS)), return_exceptions=True)
    assert [str(each) for each in told] == ["nobody answers"] * NUM_GENERATIONS
    assert registry.num_asked == 1
    registry.away = False
    clock.now_s += 1.1 * FRESH_S
    assert await view.workers("draft") == [DRAFTER]


async def test_who_leaves_while_it_is_read_takes_nothing_from_the_others() -> None:
    registry = Registry(DRAFTER)
    view = SharedView(registry)
    first, second = (asyncio.create_task(view.workers("draft")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == [DRAFTER]
    assert first.cancelled()
