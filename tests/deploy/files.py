"""The deployment files as the tools that run them understand them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "gpu", "gke", "eks")

Json = dict[str, Any]


def tool(name: str) -> str:
    """Return a program of this environment or of the machine; a test that needs it is skipped where it is missing."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def composed(*arguments: str, files: Sequence[str] = ("docker-compose.yml",), **variables: str) -> str:
    """Return what `docker compose ARGUMENTS` prints, under no variables but these; nothing of it needs an engine.

    Raises:
        AssertionError: it refuses the files, with what it says.
    """
    named = [part for file in files for part in ("-f", file)]
    run = subprocess.run(
        [tool("docker-compose"), *named, *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def project(*profiles: str, files: Sequence[str] = ("docker-compose.yml",), **variables: str) -> Json:
    """Return the whole project of some profiles; of the default ones if none is named."""
    chosen = [part for profile in profiles for part in ("--profile", profile)]
    return cast(Json, json.loads(composed(*chosen, "config", "--format", "json", files=files, **variables)))


@cache
def rendered(overlay: str) -> tuple[Json, ...]:
    """Return the objects of `deploy/kubernetes/OVERLAY`, as `kubectl kustomize` prints them."""
    return build(KUBERNETES / overlay)


def build(folder: Path) -> tuple[Json, ...]:
    """Return the objects of a folder of kustomize.

    Raises:
        AssertionError: it cannot be built, with what the tool says.
    """
    run = subprocess.run([tool("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return tuple(yaml.load_all(run.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def pod_of(workload: Json) -> Json:
    """Return the specification of a workload's pods."""
    return cast(Json, workload["spec"]["template"]["spec"])


def workloads(objects: Sequence[Json]) -> dict[str, Json]:
    """Return what runs pods, by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] in {"Deployment", "StatefulSet", "Job"}}


def containers(workload: Json) -> list[Json]:
    """Return all containers of a workload, those that run first too."""
    pod = pod_of(workload)
    return [*pod.get("initContainers", []), *pod["containers"]]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a selector of labels, as Kubernetes has it, takes an object with these."""
    if any(labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
        return False
    for rule in selector.get("matchExpressions") or []:
        assert rule["operator"] == "In", rule
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True
