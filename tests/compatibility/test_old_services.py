"""Services of the oldest supported revision, beside those of this one: the same texts, and drafts that are accepted.

The old ones run from that revision's own files, taken out of the repository; a checkout without its history has none,
and skips (what crosses the wire is compared in `test_wire` in any case).
"""

import functools
import io
import os
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.ids import TokenKind
from tests.e2e.toys import _PREFIX, _SETTINGS, ask, expected, hear

OLDEST = "58c67db2a99e"
"""Revision that `oldest.binpb` and `messages.json` are of."""
ROOT = Path(__file__).parents[2]


@functools.cache
def archive() -> bytes:
    """Return the old revision's packages as a tar file; empty: it is not in this checkout."""
    packages = ["outrider", "draft_service", "verify_service", "orchestrator"]
    done = subprocess.run(["git", "archive", OLDEST, *packages], cwd=ROOT, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else b""


@pytest.fixture
def old_tree(tmp_path: Path) -> Path:
    """The old revision's packages in a folder."""
    if not archive():
        pytest.skip(f"revision {OLDEST} is not in this checkout")
    with tarfile.open(fileobj=io.BytesIO(archive())) as files:
        files.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


def spec(role: str, old: Path | None) -> ServiceSpec:
    """Return a service of the toy model, of this revision or from the old one's folder."""
    settings = {_PREFIX[role] + name: value for name, value in _SETTINGS[role].items()}
    made = ServiceSpec(f"{role}-1", role, settings)
    # Safe path: the folder it is started in, that of this revision, is not looked at.
    path = {"PYTHONPATH": str(old), "PYTHONSAFEPATH": "1"} if old is not None else {"PYTHONPATH": str(ROOT)}
    return replace(made, settings={**settings, **path})


@pytest.mark.parametrize(
    "old_role",
    ["draft", pytest.param("verify", marks=pytest.mark.slow), pytest.param("orchestrate", marks=pytest.mark.slow)],
)
async def test_an_old_service_works_with_new_ones(old_role: str, old_tree: Path) -> None:
    specs = [spec(role, old_tree if role == old_role else None) for role in ("verify", "draft", "orchestrate")]
    async with LocalCluster(specs) as cluster:
        assert_runs_from(old_tree, cluster.services[f"{old_role}-1"].pid)
        async with Client(cluster.address) as client:
            greedy = await hear(client, ask())
            seeded = await hear(client, ask(seed=7, sampling=replace(ask().sampling, temperature=1.0)))
    assert greedy.token_ids == expected("the cat sat on ", 40)
    assert seeded.token_ids == expected("the cat sat on ", 40, seed=7)
    assert greedy.kinds.count(TokenKind.ACCEPTED) > 10


def assert_runs_from(folder: Path, pid: int) -> None:
    """Require that a process was told where to look; its imports would fail otherwise."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    assert f"PYTHONPATH={folder}" in environment
    assert os.path.isdir(folder / "outrider")
