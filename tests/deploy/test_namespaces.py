"""The pods of `cpu-demo` as hosts of their own, with time between them and the NetworkPolicies in force.

Every process listens on all interfaces, keeps its ports, and finds out by itself which address to announce.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.deploy.files import rendered
from tests.deploy.namespaces import Network, possible
from tests.deploy.plans import kubernetes_plans
from tests.deploy.policies import allows, applying, labels_of, reaches
from tests.deploy.stage import Stage, staged
from tests.deploy.test_processes import COSTS, DEPLOYMENTS, ORCHESTRATOR, TOY

CASE = "overlays/cpu-demo"
CLIENT = "client"
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def is_open(source: str, sink: str, port: int) -> bool:
    """Return whether the rendered policies let one pod call another."""
    pods = labels_of(CASE)
    if source == CLIENT:
        rules = [each["spec"].get("ingress", []) for each in applying(CASE, pods[sink], "Ingress")]
        return any(allows(each, "from", {"outrider/client": "true"}, port) for each in rules)
    return sink in pods and reaches(CASE, pods[source], pods[sink], port)


@pytest.fixture(scope="module")
async def network() -> AsyncIterator[Network]:
    reason = possible()
    if reason:
        pytest.skip(f"no network namespaces here: {reason}")
    async with Network(is_open) as made:
        yield made


@pytest.fixture(scope="module")
async def hosts(network: Network, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    plans = kubernetes_plans(rendered(CASE))
    async with staged(plans, tmp_path_factory.mktemp("hosts"), {**COSTS, **TOY}, network) as stage:
        await stage.start("store")
        await stage.run("fetch-models")
        for name in DEPLOYMENTS:
            await stage.start(name)
        network.join("client", CLIENT)
        yield stage


async def on_the_clients_host(network: Network, *command: str) -> tuple[int, str]:
    """Run a command as a client; return its status and output."""
    program = await asyncio.create_subprocess_exec(
        *network.inside("client"), *command, cwd=ROOT, env={**os.environ, "GRPC_VERBOSITY": "ERROR"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(120):
        output, _ = await program.communicate()
    assert program.returncode is not None
    return program.returncode, output.decode()


@pytest.mark.parametrize("delay_ms", [0, 1, 5, 20])
async def test_texts_are_the_same_however_far_the_pools_are_apart(
    delay_ms: int, hosts: Stage, network: Network
) -> None:
    network.delay_s = delay_ms / 1e3
    (address,) = hosts.addresses("orchestrator", ORCHESTRATOR)
    status, said = await on_the_clients_host(network, sys.executable, "-m", "tests.deploy.load", address, "4", "8")
    assert status == 0, said
    found = json.loads(said.splitlines()[-1])
    assert found["done"] >= 8
    assert found["wrong"] == []


async def test_every_edge_of_the_design_is_used_and_no_other_is_tried(hosts: Stage, network: Network) -> None:
    """Whatever ran before this test, or its first request, is what is counted."""
    network.delay_s = 0.0
    (address,) = hosts.addresses("orchestrator", ORCHESTRATOR)
    status, said = await on_the_clients_host(network, sys.executable, "-m", "tests.deploy.load", address, "2", "2")
    assert status == 0, said
    assert set(network.passed) == {
        (CLIENT, "orchestrator", 7400),
        ("orchestrator", "verifier", 7401),
        ("orchestrator", "draft", 7402),
        ("draft", "verifier", 7401),
        ("orchestrator", "store", 6379),
        ("verifier", "store", 6379),
        ("draft", "store", 6379),
    }
    assert not network.refused


async def test_what_the_policies_do_not_allow_does_not_get_through(hosts: Stage, network: Network) -> None:
    network.refused.clear()
    (verifier,) = hosts.addresses("verifier", 7401)
    status, _ = await on_the_clients_host(
        network, str(Path(sys.executable).parent / "outrider"), "health", "--address", verifier, "--timeout-s", "2"
    )
    assert status == 1
    assert network.refused[CLIENT, "verifier", 7401] > 0
    network.refused.clear()
