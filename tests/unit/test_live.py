"""What the cluster view knows of workers when the registry is slow, away or not asked again yet."""

import asyncio
from typing import Any

import pytest

from orchestrator.access import Access
from orchestrator.channels import Channels
from orchestrator.http.front import Front
from orchestrator.http.live import MAX_WATCHERS, Live
from orchestrator.job import Settings, Tools
from orchestrator.language import load_language
from orchestrator.metrics import Metrics
from orchestrator.placement import Placement
from orchestrator.quotas import Quotas
from orchestrator.servicer import Desk
from orchestrator.sessions import Policy, Sessions
from outrider.errors import ResourceExhausted, Unavailable
from outrider.store.connect import open_client
from outrider.store.sessions import SessionStore
from outrider.store.usage import Usage
from tests.unit.registries import Registry
from tests.unit.test_placement import worker

WORKERS = (worker("v"), worker("d", "draft", drafter="toy"))


def opened(registry: Registry) -> tuple[Live, Sessions]:
    """Return a view of sessions of which none runs."""
    metrics = Metrics()
    placement = Placement(registry, Channels())
    client = open_client("redis://127.0.0.1:1/0")  # nothing here asks it
    tools = Tools(SessionStore(client), placement, metrics, Settings())
    sessions = Sessions(load_language("toy"), tools, Policy())
    desk = Desk(sessions, Access([], metrics.refused), Quotas(Usage(client), metrics.refused), metrics.refusing)
    front = Front(metrics, lambda: "")
    front.desk = desk
    return Live(front), sessions


def ids(seen: Any) -> list[str]:
    return [each.worker_id for each in seen.workers]


async def test_a_registry_that_is_away_is_told_and_the_workers_stay_as_they_were_known() -> None:
    registry = Registry(*WORKERS)
    view, _ = opened(registry)
    view.fresh_s = 0.0
    assert (ids(await view.seen()), (await view.seen()).problem) == (["v", "d"], "")
    registry.away = True
    assert ids(await view.seen()) == ["v", "d"]
    assert (await view.seen()).problem == "the workers cannot be listed: nobody answers"
    registry.away = False
    registry.all.pop()
    assert (ids(await view.seen()), (await view.seen()).problem) == (["v"], "")


async def test_however_many_ask_at_once_the_registry_is_read_once_per_role() -> None:
    registry = Registry(*WORKERS)
    view, _ = opened(registry)
    await asyncio.gather(*(view.seen() for _ in range(20)))
    assert registry.num_asked == 3


async def test_a_worker_whose_circuit_is_open_is_left_out() -> None:
    view, sessions = opened(Registry(*WORKERS))
    sessions.tools.placement.breakers.failed(worker("d").worker_id)
    assert (await view.seen()).left_out == {"d"}


async def test_a_stream_beyond_the_last_place_is_refused_and_leaving_gives_the_place_back() -> None:
    view, _ = opened(Registry(*WORKERS))
    watching = [view.moments() for _ in range(MAX_WATCHERS)]
    for each in watching:
        await anext(each)
    with pytest.raises(ResourceExhausted):
        view.require_room()
    with pytest.raises(ResourceExhausted):
        await anext(view.moments())
    await watching[0].aclose()
    view.require_room()
    for each in watching[1:]:
        await each.aclose()
    assert view.num_watchers == 0


async def test_a_stream_ends_with_its_last_event_and_when_the_process_stops() -> None:
    view, sessions = opened(Registry(*WORKERS))
    view.period_s, view.max_events = 0.0, 3
    assert len([each async for each in view.moments()]) == 3
    await sessions.drain(0.0)
    assert [each async for each in view.moments()] == []


async def test_before_the_orchestrator_takes_requests_nothing_is_shown() -> None:
    view, _ = opened(Registry(*WORKERS))
    view.front.desk = None
    with pytest.raises(Unavailable):
        await view.seen()
