"""A cluster of processes that cannot start says why."""

import asyncio
import signal

import pytest

from outrider.cluster import LocalCluster, ServiceSpec
from outrider.errors import Unavailable

TOY = {"OUTRIDER_VERIFY_MODEL": "toy"}
NOWHERE = {"OUTRIDER_ORCHESTRATOR_MODEL": "toy", "OUTRIDER_ORCHESTRATOR_LISTEN": "256.1.1.1:1"}


async def test_the_end_of_one_service_is_heard_while_another_one_is_waited_for() -> None:
    """The verifier is frozen before it can announce itself, as if its model took long to load."""
    specs = [ServiceSpec("verify-1", "verify", TOY), ServiceSpec("orchestrator-1", "orchestrate", NOWHERE)]
    cluster = LocalCluster(specs, start_timeout_s=100.0)
    starting = asyncio.create_task(cluster.__aenter__())
    while not ("verify-1" in cluster.services and cluster.services["verify-1"].running):  # noqa: ASYNC110  (nothing announces it)
        await asyncio.sleep(0)
    cluster.services["verify-1"].signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match=r"orchestrator-1 ended .* cannot listen"):
        await starting
