"""The lock of a data folder is let go of when waiting for it is given up."""

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from outrider.store.embedded import _locked


def num_open(path: Path) -> int:
    """Return how many descriptors of this process are of a file."""
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(link.is_symlink() and os.readlink(link) == str(path) for link in links)


async def test_a_wait_that_is_called_off_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = tmp_path / "outrider.lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = asyncio.create_task(_locked(tmp_path))
        for _ in range(10):
            await asyncio.sleep(0)
        assert num_open(path) == 2
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert num_open(path) == 1
