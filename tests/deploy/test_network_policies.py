"""Who may talk to whom, worked out from the rendered policies as a network would."""

from typing import Any

import pytest

from tests.deploy.files import OVERLAYS
from tests.deploy.policies import allows, applying, labels_of, reaches

PEERS = ("orchestrator", "verifier", "draft", "store", "fetch-models")
PORTS = {"orchestrator": 7400, "verifier": 7401, "draft": 7402, "store": 6379, "fetch-models": 80}
METRICS, HTTP = 9400, 8000
EDGES = {
    ("orchestrator", "verifier"),
    ("orchestrator", "draft"),
    ("draft", "verifier"),
    ("orchestrator", "store"),
    ("verifier", "store"),
    ("draft", "store"),
}
CASES = [f"overlays/{name}" for name in OVERLAYS]


@pytest.mark.parametrize("case", CASES)
def test_the_edges_of_the_design_are_open_and_no_others(case: str) -> None:
    pods = labels_of(case)
    inside = [name for name in PEERS if name in pods]
    ports = sorted({*PORTS.values(), METRICS, HTTP, 22, 443})
    found = {
        (source, sink, port)
        for source in inside
        for sink in inside
        if source != sink
        for port in ports
        if reaches(case, pods[source], pods[sink], port)
    }
    assert found == {(source, sink, PORTS[sink]) for source, sink in EDGES if sink in pods}


@pytest.mark.parametrize("case", CASES)
def test_a_pod_of_the_namespace_that_is_nobodys_reaches_nobody(case: str) -> None:
    stranger = {"app": "stranger"}
    for name, labels in labels_of(case).items():
        assert not reaches(case, stranger, labels, PORTS.get(name, 80)), name


@pytest.mark.parametrize("case", CASES)
def test_clients_reach_orchestrators_alone(case: str) -> None:
    client: dict[str, Any] = {"outrider/client": "true"}
    for name, labels in labels_of(case).items():
        rules = [each["spec"].get("ingress", []) for each in applying(case, labels, "Ingress")]
        for port in (PORTS[name], HTTP):
            assert any(allows(each, "from", client, port) for each in rules) is (name == "orchestrator"), (name, port)


@pytest.mark.parametrize("case", CASES)
def test_everybody_may_ask_for_names(case: str) -> None:
    for name, labels in labels_of(case).items():
        ports = [
            (port["port"], port["protocol"])
            for each in applying(case, labels, "Egress")
            for rule in each["spec"].get("egress", [])
            for port in rule.get("ports", [])
        ]
        assert {(53, "UDP"), (53, "TCP")} <= set(ports), name


@pytest.mark.parametrize("case", CASES)
def test_there_is_a_way_to_the_store_wherever_it_is(case: str) -> None:
    for name in ("orchestrator", "verifier", "draft"):
        rules = [
            rule for each in applying(case, labels_of(case)[name], "Egress") for rule in each["spec"].get("egress", [])
        ]
        assert any(port["port"] == 6379 for rule in rules for port in rule.get("ports", [])), name
