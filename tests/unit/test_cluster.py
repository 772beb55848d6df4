"""A local cluster waits for no service for ever."""

from pathlib import Path

import pytest

from outrider.cluster import LocalCluster, Service, ServiceSpec
from outrider.errors import Unavailable


async def test_a_service_that_never_announces_itself_is_given_up(valkey_url: str, tmp_path: Path) -> None:
    async with LocalCluster([], store_url=valkey_url, start_timeout_s=0.2) as cluster:
        cluster.services["late"] = Service(ServiceSpec("late", "draft"), {}, tmp_path)
        with pytest.raises(Unavailable, match=r"late did not announce itself within 0\.2 s"):
            await cluster.announced("late")
