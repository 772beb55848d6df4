"""`deploy/kubernetes`, rendered and checked without a cluster."""

import itertools
import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor
from pydantic import BaseModel, ValidationError

from tests.deploy.files import KUBERNETES, OVERLAYS, Json, build, containers, pod_of, rendered, selects, workloads
from tests.deploy.plans import kubernetes_plans

VERSIONS = ("1.30", "1.37")
CASES = ("base", *(f"overlays/{name}" for name in OVERLAYS))
CUSTOM: dict[str, type[BaseModel]] = {"ScaledObject": ScaledObject, "ServiceMonitor": ServiceMonitor}
SERVICES = ("verifier", "draft", "orchestrator")
PORTS = {"verifier": 7401, "draft": 7402, "orchestrator": 7400}


def with_component(name: str, folder: Path) -> Path:
    """Write an overlay of the base with one component, and return its folder."""
    where = os.path.relpath(KUBERNETES, folder)
    (folder / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{where}/base]\ncomponents: [{where}/components/{name}]\n"
    )
    return folder


def problems(each: Json, version: str) -> list[str]:
    """Return what a version of Kubernetes, or an operator, would refuse of an object."""
    if each["kind"] in CUSTOM:
        return custom_problems(each, CUSTOM[each["kind"]])
    try:
        kubernetes_validate.validate(each, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{each['kind']} {each['metadata']['name']}: {error.message}"]
    return []


def custom_problems(each: Json, model: type[BaseModel]) -> list[str]:
    """Return what is wrong by the operators' own definitions, and every field that they do not know."""
    try:
        read = model.model_validate(each).model_dump(mode="json", by_alias=True, exclude_unset=True)
    except ValidationError as error:
        return [str(error)]
    return [f"{each['kind']}: {path} is unknown" for path in sorted(set(paths(each)) - set(paths(read)))]


def paths(value: Any, at: str = "") -> list[str]:
    """Return the paths of all fields."""
    if isinstance(value, dict):
        return [f"{at}.{key}" for key in value] + [
            path for key, inner in value.items() for path in paths(inner, f"{at}.{key}")
        ]
    if isinstance(value, list):
        return [path for index, inner in enumerate(value) for path in paths(inner, f"{at}[{index}]")]
    return []


@pytest.mark.parametrize("version", VERSIONS)
def test_two_versions_of_kubernetes_take_every_object(version: str, tmp_path: Path) -> None:
    found: dict[str, Json] = {}
    for each in itertools.chain(*map(rendered, CASES), build(with_component("tls", tmp_path))):
        found[repr(each)] = each
    assert len(found) > 50
    assert [problem for each in found.values() for problem in problems(each, version)] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_or_misspelt_field_would_be_seen(version: str) -> None:
    objects = {(each["kind"], each["metadata"]["name"]): each for each in rendered("overlays/gpu")}
    for key in (
        ("Deployment", "draft"),
        ("NetworkPolicy", "draft"),
        ("ScaledObject", "draft"),
        ("ServiceMonitor", "outrider"),
    ):
        spec = {**objects[key]["spec"], "replica": 3}
        assert problems({**objects[key], "spec": spec}, version), key


@pytest.mark.parametrize("case", CASES)
def test_pods_may_no_more_than_the_restricted_standard_allows(case: str) -> None:
    namespace = next(each for each in rendered(case) if each["kind"] == "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, workload in workloads(rendered(case)).items():
        pod = pod_of(workload)
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["serviceAccountName"] == name, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        assert not [volume for volume in pod.get("volumes", []) if "hostPath" in volume], name
        for container in containers(workload):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"], name
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert "privileged" not in context, name


@pytest.mark.parametrize("case", CASES)
def test_every_container_says_what_it_needs_and_which_version_it_is(case: str) -> None:
    for name, workload in workloads(rendered(case)).items():
        for container in containers(workload):
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
            assert "memory" in container["resources"]["limits"], name
            repository, _, tag = container["image"].rpartition(":")
            assert repository, name
            assert tag != "latest", name


@pytest.mark.parametrize("case", CASES)
def test_probes_leave_time_to_load_and_never_restart_what_only_waits_for_others(case: str) -> None:
    found = workloads(rendered(case))
    for name in SERVICES:
        (container,) = pod_of(found[name])["containers"]
        start, ready, live = (container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
        least_s = 60 if name == "orchestrator" else 600
        assert start["periodSeconds"] * start["failureThreshold"] >= least_s, name
        assert {probe["grpc"]["port"] for probe in (start, ready, live)} == {PORTS[name]}, name
        assert "service" not in ready["grpc"], name
        assert live["periodSeconds"] * live["failureThreshold"] >= 60, name
    assert pod_of(found["orchestrator"])["containers"][0]["livenessProbe"]["grpc"]["service"] == "live"


@pytest.mark.parametrize("case", CASES)
def test_a_pod_is_killed_only_after_its_service_has_had_its_time(case: str) -> None:
    plans = kubernetes_plans(rendered(case))
    for name in SERVICES:
        assert plans[name].pre_stop_s > 0, name
        assert plans[name].stop_s >= plans[name].grace_s + 5, name


@pytest.mark.parametrize("case", [case for case in CASES if case != "overlays/cpu-demo"])
def test_verifiers_and_draft_workers_live_on_pools_of_their_own(case: str) -> None:
    found = workloads(rendered(case))
    pools = {}
    for name in SERVICES:
        pod = pod_of(found[name])
        pools[name] = pod["nodeSelector"]["outrider/pool"]
        taint = {"key": "outrider/pool", "operator": "Equal", "value": pools[name], "effect": "NoSchedule"}
        assert taint in pod["tolerations"], name
    assert len(set(pools.values())) == len(SERVICES)


@pytest.mark.parametrize("case", CASES)
def test_replicas_of_a_service_keep_apart_from_each_other(case: str) -> None:
    for name, workload in workloads(rendered(case)).items():
        if name not in SERVICES:
            continue
        pod, labels = pod_of(workload), workload["spec"]["template"]["metadata"]["labels"]
        (apart,) = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        (spread,) = pod["topologySpreadConstraints"]
        assert selects(apart["podAffinityTerm"]["labelSelector"], labels), name
        assert selects(spread["labelSelector"], labels), name


@pytest.mark.parametrize("case", ["overlays/gpu", "overlays/gke", "overlays/eks"])
def test_models_run_on_gpus_where_there_are_some(case: str) -> None:
    found = workloads(rendered(case))
    for name, prefix in (("verifier", "VERIFY"), ("draft", "DRAFT")):
        (container,) = pod_of(found[name])["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1", name
        assert {"name": f"OUTRIDER_{prefix}_DEVICE", "value": "cuda"} in container["env"], name
        assert container["image"].endswith("-cuda"), name
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod_of(found[name])[
            "tolerations"
        ]


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_what_they_are_for(case: str) -> None:
    """A service, a budget or a monitor whose labels nobody has would be accepted, and do nothing."""
    objects = rendered(case)
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in workloads(objects).values()]
    services = [each for each in objects if each["kind"] == "Service"]
    for each in services:
        assert any(selects({"matchLabels": each["spec"]["selector"]}, labels) for labels in pods), each["metadata"]
    for each in objects:
        if each["kind"] in {"PodDisruptionBudget", "Deployment", "StatefulSet"}:
            assert any(selects(each["spec"]["selector"], labels) for labels in pods), each["metadata"]
        if each["kind"] == "NetworkPolicy" and each["spec"]["podSelector"]:
            assert any(selects(each["spec"]["podSelector"], labels) for labels in pods), each["metadata"]
        if each["kind"] == "ServiceMonitor":
            watched = [s for s in services if selects(each["spec"]["selector"], s["metadata"].get("labels", {}))]
            assert {s["metadata"]["name"] for s in watched} == {"verifier", "draft", "orchestrators"}
            assert all("metrics" in {port["name"] for port in s["spec"]["ports"]} for s in watched)


@pytest.mark.parametrize("case", CASES)
def test_every_service_that_matters_has_a_budget_and_a_name(case: str) -> None:
    objects = rendered(case)
    budgets = {each["metadata"]["name"] for each in objects if each["kind"] == "PodDisruptionBudget"}
    headless = {
        each["metadata"]["name"]
        for each in objects
        if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None"
    }
    assert set(SERVICES) <= budgets
    assert {"verifier", "draft", "orchestrators"} <= headless


@pytest.mark.parametrize("case", ["overlays/gpu", "overlays/gke", "overlays/eks"])
def test_what_scales_a_workload_is_alone_in_saying_how_many_there_are(case: str) -> None:
    objects = rendered(case)
    scaled = [each for each in objects if each["kind"] in {"HorizontalPodAutoscaler", "ScaledObject"}]
    names = {each["spec"]["scaleTargetRef"]["name"] for each in scaled}
    assert names == set(SERVICES)
    assert all("replicas" not in workloads(objects)[name]["spec"] for name in names)


@pytest.mark.parametrize("case", CASES)
def test_models_are_read_from_one_volume_that_only_the_job_writes_to(case: str) -> None:
    plans = kubernetes_plans(rendered(case))
    assert plans["fetch-models"].volumes["/models"] == "models"
    assert "/models" not in plans["fetch-models"].read_only
    for name in SERVICES:
        assert plans[name].volumes["/models"] == "models", name
        assert "/models" in plans[name].read_only, name
        assert plans[f"{name}/wait-for-models"].command[:2] == ("outrider", "fetch"), name


@pytest.mark.parametrize("name", ["verifier", "draft", "orchestrator"])
def test_with_tls_between_services_probes_need_no_certificate_of_the_kubelet(name: str, tmp_path: Path) -> None:
    (container,) = pod_of(workloads(build(with_component("tls", tmp_path)))[name])["containers"]
    for kind in ("startup", "readiness", "liveness"):
        probe = container[f"{kind}Probe"]
        assert ("exec" in probe) is (name != "orchestrator"), kind
        assert ("grpc" in probe) is (name == "orchestrator"), kind
