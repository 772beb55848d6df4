"""What rendered NetworkPolicies let through, worked out as a network would."""

from tests.deploy.files import Json, rendered, selects, workloads


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
