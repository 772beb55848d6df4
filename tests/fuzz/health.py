"""What must be as it was before: every service alive and serving, nothing left in use, logs without defects."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc import channel
from tests.e2e.toys import Toys

WATCHED: Mapping[str, tuple[str, ...]] = {
    "orchestrate": ("outrider_asyncio_tasks", "outrider_num_requests_running"),
    "verify": ("outrider_asyncio_tasks", "outrider_num_requests_running", "outrider_num_requests_waiting"),
    "draft": ("outrider_asyncio_tasks", "outrider_draft_sessions"),
}
RETURN_S = 60.0
"""How long what was used may take to return."""
SPOKEN_DEFECTS = ("Traceback", "never retrieved", "never awaited", "unexpected error", "Fatal Python error")
Usage = dict[str, float]


def names(toys: Toys) -> list[str]:
    """Return all services that are alive."""
    return [name for role in WATCHED for name in toys.running(role)]


async def usage(toys: Toys) -> Usage:
    """Return what every service has in use, as its metrics say."""
    found: Usage = {}
    for role, samples in WATCHED.items():
        for name in toys.running(role):
            for sample in samples:
                found[f"{name} {sample}"] = await asyncio.to_thread(toys.metric, name, sample)
    return found


async def at_rest(toys: Toys, within_s: float = RETURN_S) -> Usage:
    """Return the most that is in use during a second at whose end it is no less than at its beginning."""
    end_s = time.monotonic() + within_s
    while True:
        seen = [await usage(toys)]
        for _ in range(10):
            await asyncio.sleep(0.1)
            seen.append(await usage(toys))
        if sum(seen[-1].values()) >= sum(seen[0].values()) or time.monotonic() > end_s:
            return {each: max(found[each] for found in seen) for each in seen[0]}


async def returned(toys: Toys, before: Usage, within_s: float = RETURN_S) -> list[str]:
    """Wait until nothing more is in use than before; return what still is when that takes too long."""
    end_s = time.monotonic() + within_s
    while True:
        now = await usage(toys)
        more = [f"{each} is {now.get(each)}, was {value}" for each, value in before.items() if now.get(each, 0) > value]
        if not more or time.monotonic() > end_s:
            return more
        await asyncio.sleep(0.2)


async def not_serving(toys: Toys) -> list[str]:
    """Return the services that do not say that they serve."""
    found = []
    for name in names(toys):
        async with channel(await toys.address(name)) as to:
            try:
                asked = health_pb2.HealthCheckRequest()
                answer = await health_pb2_grpc.HealthStub(to).Check(asked, timeout=60)
                said = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            except grpc.aio.AioRpcError as error:
                said = error.code().name
        if said != "SERVING":
            found.append(f"{name} is {said}")
    return found


@dataclass(frozen=True, slots=True)
class Witness:
    """Remembers who was alive, and how long the logs were."""

    toys: Toys
    lengths: dict[str, int]

    @classmethod
    def of(cls, toys: Toys) -> "Witness":
        """Begin to watch."""
        return cls(toys, {name: len(toys.log(name)) for name in names(toys)})

    def defects(self) -> list[str]:
        """Return who has died since, and which lines of the logs tell of defects."""
        alive = names(self.toys)
        found = [f"{name} is dead" for name in self.lengths if name not in alive]
        for name, length in self.lengths.items():
            found += _spoken(name, self.toys.log(name)[length:])
        return found


def _spoken(name: str, log: str) -> list[str]:
    lines = log.splitlines()
    return [
        f"{name} logged: {' | '.join(lines[max(0, i - 1) : i + 40])}"
        for i, line in enumerate(lines)
        if any(words in line for words in SPOKEN_DEFECTS)
    ]
