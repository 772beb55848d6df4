"""The image: how it is built, what is in it, and what it runs as."""

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.files import ROOT, tool
from tests.deploy.plans import image_environment

DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
LAST_STAGE = DOCKERFILE.rpartition("\nFROM ")[2]


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    run = subprocess.run([tool("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


def test_it_is_built_in_stages_on_one_base_that_can_be_chosen() -> None:
    assert re.findall(r"^FROM (.*)$", DOCKERFILE, re.M) == ["${BASE} AS build", "build AS code", "${BASE}"]
    (base,) = re.findall(r"^ARG BASE=(.*)$", DOCKERFILE, re.M)
    assert ":" in base
    assert not base.endswith(":latest")


def test_it_runs_as_nobody_in_particular_and_asks_after_its_own_health() -> None:
    assert "USER 10001:10001" in LAST_STAGE
    assert 'CMD ["outrider", "health"]' in LAST_STAGE
    assert "pip install" not in LAST_STAGE
    assert "apt-get" not in DOCKERFILE


def test_what_it_writes_goes_to_places_that_can_be_written() -> None:
    """The root is read-only; /models is a volume and /tmp is memory."""
    paths = {name: value for name, value in image_environment().items() if value.startswith("/") and name != "PATH"}
    assert {"HOME", "OUTRIDER_CACHE", "HF_HOME", "NUMBA_CACHE_DIR", "MPLCONFIGDIR", "PYTHONPATH"} <= set(paths)
    assert all(value.startswith(("/tmp", "/models")) for value in paths.values()), paths


def test_only_what_is_named_is_sent_to_the_builder() -> None:
    """No weights, no tests, no secrets: whatever is not named stays outside."""
    lines = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    taken = {line.removeprefix("!") for line in lines if line.startswith("!")}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = {each.rstrip("*") for each in settings["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"constraints.txt", "pyproject.toml", "README.md", "LICENSE"} <= taken
    assert not {"benchmarks", "deploy", "docs", "tests", ".git", ".env", "tls"} & taken


def test_every_package_that_is_installed_in_it_is_pinned() -> None:
    """All that our own dependencies need in turn; torch's own parts for CUDA are pinned by torch."""
    pinned = {canonicalize_name(line.partition("==")[0]) for line in _lines("constraints.txt")}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    missing, todo, seen = set(), list(settings["project"]["dependencies"]), set()
    while todo:
        requirement = Requirement(todo.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        if name.startswith(("nvidia-", "cuda-")) or name == "triton":
            continue
        if name not in pinned:
            missing.add(name)
        try:
            todo += distribution(name).requires or []
        except PackageNotFoundError:
            pytest.fail(f"{name} is required, and not installed here")
    assert not missing
    assert len(seen) > len(settings["project"]["dependencies"])


def test_torch_has_one_version_everywhere() -> None:
    (pin,) = (line for line in _lines("constraints.txt") if line.startswith("torch=="))
    assert f"ARG TORCH={pin}" in DOCKERFILE
    assert f"TORCH  ?= {pin}" in (ROOT / "Makefile").read_text("utf-8")


def _lines(name: str) -> list[str]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
