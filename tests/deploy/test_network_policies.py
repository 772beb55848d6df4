"""Who may talk to whom, worked out from the rendered policies as a network would."""

from typing import Any

import pytest

from tests.deploy.files import OVERLAYS, Json, rendered, selects, workloads

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


def allows(rules: list[Json], side: str, labels: dict[str, str], port: int) -> bool:
    """Return whether one of the rules of a policy lets a pod of this namespace in, or out to it."""
    return any(
        any(_is_peer(peer, labels) for peer in rule.get(side, []))
        and any(each["port"] == port and each["protocol"] == "TCP" for each in rule.get("ports", []))
        for rule in rules
    )


def _is_peer(peer: Json, labels: dict[str, str]) -> bool:
    if "podSelector" not in peer:
        return False
    if peer.get("namespaceSelector"):
        return False  # another namespace: this one has none of its labels
    return selects(peer["podSelector"], labels)


def applying(case: str, labels: dict[str, str], kind: str) -> list[Json]:
    """Return the policies of one direction that concern a pod."""
    return [
        each
        for each in rendered(case)
        if each["kind"] == "NetworkPolicy"
        and kind in each["spec"]["policyTypes"]
        and selects(each["spec"]["podSelector"], labels)
    ]


def labels_of(case: str) -> dict[str, dict[str, str]]:
    return {name: each["spec"]["template"]["metadata"]["labels"] for name, each in workloads(rendered(case)).items()}


def reaches(case: str, source: dict[str, str], sink: dict[str, str], port: int) -> bool:
    """Return whether a connection is let out on one side and in on the other."""
    out = [each["spec"].get("egress", []) for each in applying(case, source, "Egress")]
    into = [each["spec"].get("ingress", []) for each in applying(case, sink, "Ingress")]
    assert out, "a pod that no policy concerns may do anything"
    assert into, "a pod that no policy concerns may be asked anything"
    return any(allows(rules, "to", sink, port) for rules in out) and any(
        allows(rules, "from", source, port) for rules in into
    )


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
