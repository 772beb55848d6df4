"""Generations move from a busy draft worker to one with room, one at a time; looking for one costs one question."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.channels import Channels
from orchestrator.placement import Placement, Wanted
from orchestrator.rebalancing import Rebalancer
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription
from tests.unit.test_placement import worker


@dataclass
class Workers:
    """A source that counts who asks."""

    all: list[WorkerDescription]
    num_asked: int = 0

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        self.num_asked += 1
        return [each for each in self.all if each.role == role]


@dataclass
class Running:
    """A generation that a draft worker drafts for."""

    drafter_id: WorkerId
    moved: bool = False
    verifier: WorkerDescription = field(default_factory=lambda: worker("v"))
    wanted: Wanted = field(default_factory=Wanted)

    def leave_drafter(self) -> None:
        self.moved = True


def balancing(*loads: int) -> tuple[Rebalancer, Workers, list[Running]]:
    """Return a rebalancer of draft workers with a capacity of 8 and these loads, each with as many generations."""
    workers = [worker(f"d{number}", "draft", load=load, drafter="toy") for number, load in enumerate(loads)]
    source = Workers(workers)
    running = [Running(each.worker_id) for each in workers for _ in range(each.load)]
    lot = random.Random(3)
    return Rebalancer(Placement(source, Channels(), lot=lot), lambda: running, 1.0, lot), source, running


async def test_a_generation_leaves_a_busy_worker_for_one_with_room_and_a_second_one_waits_for_news() -> None:
    rebalancer, source, running = balancing(7, 1)
    moved = await rebalancer.move_one()
    assert [each for each in running if each.moved] == [moved]
    assert moved is not None
    assert moved.drafter_id == "d0"
    assert await rebalancer.move_one() is None, "its load is that of before the move"
    source.all[0] = worker("d0", "draft", load=6, drafter="toy")
    assert await rebalancer.move_one() is not None


async def test_where_no_worker_is_to_be_left_the_workers_are_asked_for_once() -> None:
    rebalancer, source, running = balancing(4, 3, 5)
    assert len(running) == 12
    assert await rebalancer.move_one() is None
    assert source.num_asked == 1
