"""`outrider drafters list|detach|attach|split|reset`: which drafters a running cluster uses, without a restart.

What is written is one record in the cluster's store, which every orchestrator reads each second.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from outrider.cli.keys import Store, required
from outrider.drafter_policy import STANDING, DrafterPolicy, names_of, sort_of, split_of
from outrider.errors import InvalidRequest
from outrider.messages import WorkerDescription
from outrider.store.connect import StoreClient, open_client
from outrider.store.drafters import PolicyStore
from outrider.store.registry import Registry

console = Console(highlight=False)
notes = Console(stderr=True, highlight=False)


def list_(*, store: Store = "") -> None:
    """List the draft workers, what orchestrators have measured of them, and who gets no sessions and why.

    Args:
        store: URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL.
    """
    drafters, orchestrators, policy = asyncio.run(_looked(required(store)))
    table = Table("worker", "label", "kinds", "load", "accepted", "times plain", "state", box=None, pad_edge=False)
    standings = Standings(orchestrators)
    for worker in drafters:
        table.add_row(*row(worker, standings, policy))
    console.print(table, markup=False)
    _print(policy)


def detach(name: str, /, *, store: Store = "") -> None:
    """Give sessions no such drafter any more; those that have it move to another one, or go on plain.

    Args:
        name: Id or label of draft workers, or a kind of drafter.
        store: URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL.
    """
    _change(store, lambda policy: policy.detach(name), [name])


def attach(name: str, /, *, store: Store = "") -> None:
    """Undo `outrider drafters detach NAME`.

    Args:
        name: As it was detached.
        store: URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL.
    """
    _change(store, lambda policy: policy.attach(name), [])


def split(*shares: str, clear: Annotated[bool, Parameter(negative="")] = False, store: Store = "") -> None:
    """Assign sessions to drafters by shares, such as: feature=80 prompt_lookup=20.

    Args:
        shares: NAME=WEIGHT, where a name is a label of draft workers, a kind of drafter, or a worker's id. Weights are
            shares of their sum.
        clear: Assign them to none.
        store: URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL.
    """
    if clear == bool(shares):
        raise InvalidRequest("split", " ".join(shares), "shares such as feature=80 prompt_lookup=20, or --clear alone")
    wanted = split_of(shares)
    total = sum(weight for _, weight in wanted)
    if wanted and total != 100:
        notes.print(f"the shares add up to {total}, not 100: each is taken as its part of {total}")
    _change(store, lambda policy: policy.divide(wanted), [name for name, _ in wanted])


def reset(*, store: Store = "") -> None:
    """Detach nothing and split nothing, also where the record is damaged.

    Args:
        store: URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL.
    """
    asyncio.run(_reset(required(store)))
    _print(DrafterPolicy())


# -- what is shown -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """What all orchestrators together have seen of a sort of drafters."""

    tested: int
    accepted: int
    gains: tuple[float, ...]
    num_aside: int
    """Orchestrators that have set it aside."""


class Standings:
    """What orchestrators say of sorts of drafters."""

    def __init__(self, orchestrators: Sequence[WorkerDescription]) -> None:
        """Read what they announce."""
        self.num_orchestrators = len(orchestrators)
        self._said: dict[str, list[dict[str, Any]]] = {}
        for each in orchestrators:
            for name, value in each.attributes.items():
                if name.startswith(STANDING):
                    self._said.setdefault(name.removeprefix(STANDING), []).append(json.loads(value))

    def of(self, worker: WorkerDescription) -> Seen:
        """Return what is said of a worker's sort: its label, else its kind."""
        said = self._said.get(sort_of(worker), [])
        return Seen(
            sum(each["tested"] for each in said),
            sum(each["accepted"] for each in said),
            tuple(each["gain"] for each in said if each["gain"] is not None),
            sum(each["set_aside"] for each in said),
        )


def row(worker: WorkerDescription, standings: Standings, policy: DrafterPolicy) -> tuple[str, ...]:
    """Return a draft worker's line of the list."""
    seen = standings.of(worker)
    return (
        worker.worker_id,
        worker.label,
        worker.drafter,
        f"{worker.load}/{worker.capacity}",
        f"{seen.accepted / seen.tested:.2f}" if seen.tested else "",
        f"{sum(seen.gains) / len(seen.gains):.2f}" if seen.gains else "",
        _state(worker, seen, standings.num_orchestrators, policy),
    )


def _state(worker: WorkerDescription, seen: Seen, num_orchestrators: int, policy: DrafterPolicy) -> str:
    name = policy.why_detached(worker)
    if name:
        return f"detached ({name})"
    if worker.draining:
        return "stopping"
    if seen.num_aside:
        return f"set aside by {seen.num_aside} of {num_orchestrators} orchestrators: below plain"
    return "in use"


def _print(policy: DrafterPolicy) -> None:
    total = sum(weight for _, weight in policy.split)
    shares = ", ".join(f"{name} {weight / total:.1%}" for name, weight in policy.split)
    notes.print(f"detached: {', '.join(policy.detached) or 'none'}; split: {shares or 'none'}", markup=False)


# -- the store ---------------------------------------------------------------------------------------------------------


def _change(store: str, changed: Callable[[DrafterPolicy], DrafterPolicy], names: Sequence[str]) -> None:
    """Change the policy, and say which of the names nobody has now."""
    policy, drafters = asyncio.run(_changed(required(store), changed))
    for name in names:
        if not any(name in names_of(each) for each in drafters):
            notes.print(f"no draft worker is, or has, {name} now; it holds for those that come", markup=False)
    _print(policy)


@asynccontextmanager
async def _opened(store: str) -> AsyncIterator[StoreClient]:
    client = open_client(store)
    try:
        yield client
    finally:
        await client.aclose()


async def _changed(
    store: str, changed: Callable[[DrafterPolicy], DrafterPolicy]
) -> tuple[DrafterPolicy, list[WorkerDescription]]:
    async with _opened(store) as client:
        return await PolicyStore(client).change(changed), await Registry(client).workers("draft")


async def _looked(store: str) -> tuple[list[WorkerDescription], list[WorkerDescription], DrafterPolicy]:
    async with _opened(store) as client:
        registry = Registry(client)
        drafters, orchestrators = await registry.workers("draft"), await registry.workers("orchestrate")
        return drafters, orchestrators, await PolicyStore(client).read()


async def _reset(store: str) -> None:
    async with _opened(store) as client:
        await PolicyStore(client).reset()
