"""What a deployment file says of each process, in one form for Compose and Kubernetes."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Json = dict[str, Any]

SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True)
class Probe:
    """How it is found out whether a process is well."""

    period_s: float
    timeout_s: float
    failures: int
    """In a row, after which it is not."""
    command: tuple[str, ...] = ()
    """Run beside the process; empty: gRPC is asked."""
    port: int = 0
    service: str = ""


@dataclass(frozen=True)
class Plan:
    """One process, as its file describes it."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_s: float
    """From SIGTERM until it is killed."""
    startup: Probe | None = None
    readiness: Probe | None = None
    first: Mapping[str, str] = field(default_factory=dict)
    """What has to be there before it is started -> "healthy" or "completed"."""
    replicas: int = 1
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Path that it sees -> name of the folder that is mounted there."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path that it sees -> name of the file that is mounted there."""
    read_only: frozenset[str] = frozenset()
    """Paths of volumes that it may not write to."""
    pre_stop_s: float = 0.0
    """From the decision to end it until SIGTERM."""

    def with_settings(self, settings: Mapping[str, str]) -> "Plan":
        """Return the plan with some of its variables changed; none that it lacks is added."""
        known = {name: value for name, value in settings.items() if name in self.environment}
        return replace(self, environment={**self.environment, **known})

    @property
    def grace_s(self) -> float:
        """What the service itself thinks it has from SIGTERM on."""
        return next(float(value) for name, value in self.environment.items() if name.endswith("_GRACE_S"))


def image_environment() -> dict[str, str]:
    """Return the variables that the image sets in its last stage."""
    last = (ROOT / "Dockerfile").read_text("utf-8").rpartition("\nFROM ")[2].replace("\\\n", " ")
    lines = [line.removeprefix("ENV ") for line in last.splitlines() if line.startswith("ENV ")]
    return {pair.partition("=")[0]: pair.partition("=")[2] for line in lines for pair in line.split()}


def seconds(text: str) -> float:
    """Return a duration such as 1m30s in seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(h|m|s)(?!\w*ms)", text)
    assert "".join(number + unit for number, unit in parts) == text, text
    return sum(float(number) * SECONDS[unit] for number, unit in parts)


# -- Compose -----------------------------------------------------------------------------------------------------------


def compose_plans(project: Json) -> dict[str, Plan]:
    """Read what `docker compose config --format json` prints."""
    services = project["services"]
    return {name: _compose_plan(name, service, services) for name, service in services.items()}


def _compose_plan(name: str, service: Json, others: Json) -> Plan:
    conditions = {
        "service_started": "healthy", "service_healthy": "healthy", "service_completed_successfully": "completed",
    }  # fmt: skip
    check = service.get("healthcheck") or {}
    mounts = service.get("volumes", [])
    secrets = {
        f"/run/secrets/{each['target'].rpartition('/')[2]}": each["source"] for each in service.get("secrets", [])
    }
    return Plan(
        name=name,
        command=tuple(service.get("command") or ()),
        environment=service.get("environment") or {},
        stop_s=seconds(service.get("stop_grace_period", "10s")),
        startup=None if not check or check.get("disable") else _health_check(check, starting=True),
        readiness=None if not check or check.get("disable") else _health_check(check, starting=False),
        first={
            other: conditions[each["condition"]]
            for other, each in service.get("depends_on", {}).items()
            if other in others or each["required"]
        },
        volumes={each["target"]: each["source"] for each in mounts if each["type"] in {"volume", "bind"}},
        files=secrets,
        read_only=frozenset(each["target"] for each in mounts if each.get("read_only")),
    )


def _health_check(check: Json, *, starting: bool) -> Probe:
    kind, *command = check["test"]
    assert kind == "CMD", check
    period_s = seconds(check["start_interval"] if starting else check["interval"])
    failures = int(seconds(check["start_period"]) / period_s) if starting else int(check["retries"])
    return Probe(period_s, seconds(check["timeout"]), failures, tuple(command))


# -- Kubernetes --------------------------------------------------------------------------------------------------------


def kubernetes_plans(objects: Sequence[Json]) -> dict[str, Plan]:
    """Read the workloads among rendered manifests; what runs before a container is a plan of its own, NAME/INIT."""
    plans: dict[str, Plan] = {}
    for each in objects:
        if each["kind"] in {"Deployment", "StatefulSet", "Job"}:
            plans |= {plan.name: plan for plan in _workload(each, objects)}
    return plans


def _workload(workload: Json, objects: Sequence[Json]) -> list[Plan]:
    name, spec = workload["metadata"]["name"], workload["spec"]
    pod = spec["template"]["spec"]
    claims = [each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])]
    sources = {each["name"]: _source(each) for each in pod.get("volumes", [])} | {each: each for each in claims}
    before = {container["name"]: _container(container, objects) for container in pod.get("initContainers", [])}
    plans = [
        replace(plan, name=f"{name}/{init}", volumes=_mounts(plan, sources), stop_s=30.0)
        for init, plan in before.items()
    ]
    (container,) = pod["containers"]
    plan = _container(container, objects)
    hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    return [
        *plans,
        replace(
            plan,
            name=name,
            replicas=spec.get("replicas", 1),
            volumes=_mounts(plan, sources),
            stop_s=float(pod.get("terminationGracePeriodSeconds", 30)) - hook.get("seconds", 0),
            pre_stop_s=float(hook.get("seconds", 0)),
            first={f"{name}/{init}": "completed" for init in before},
        ),
    ]


def _container(container: Json, objects: Sequence[Json]) -> Plan:
    environment: dict[str, str] = {}
    for source in container.get("envFrom", []):
        environment |= _named(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container.get("env", []):
        environment[variable["name"]] = _value(variable, objects)
    mounts = container.get("volumeMounts", [])
    return Plan(
        name=container["name"],
        command=tuple(container["command"]),
        environment=environment,
        stop_s=0.0,
        startup=_probe(container.get("startupProbe")),
        readiness=_probe(container.get("readinessProbe")),
        volumes={each["mountPath"]: each["name"] for each in mounts},
        read_only=frozenset(each["mountPath"] for each in mounts if each.get("readOnly")),
    )


def _value(variable: Json, objects: Sequence[Json]) -> str:
    if "value" in variable:
        return str(variable["value"])
    if "fieldRef" in variable["valueFrom"]:
        return f"${{{variable['valueFrom']['fieldRef']['fieldPath']}}}"  # known when there is a pod
    reference = variable["valueFrom"]["secretKeyRef"]
    secret = next((each for each in objects if _is(each, "Secret", reference["name"])), None)
    return _decoded(secret)[reference["key"]] if secret else ""


def _decoded(secret: Json) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}


def _named(objects: Sequence[Json], kind: str, name: str) -> Json:
    return next(each for each in objects if _is(each, kind, name))


def _is(each: Json, kind: str, name: str) -> bool:
    return bool(each["kind"] == kind and each["metadata"]["name"] == name)


def _source(volume: Json) -> str:
    """Return what a volume is, beside its name in the pod."""
    return str(volume.get("persistentVolumeClaim", {}).get("claimName", volume["name"]))


def _mounts(plan: Plan, sources: Mapping[str, str]) -> dict[str, str]:
    return {path: sources[name] for path, name in plan.volumes.items()}


def _probe(probe: Json | None) -> Probe | None:
    if probe is None:
        return None
    period_s, timeout_s = float(probe.get("periodSeconds", 10)), float(probe.get("timeoutSeconds", 1))
    failures = int(probe.get("failureThreshold", 3))
    if "exec" in probe:
        return Probe(period_s, timeout_s, failures, tuple(probe["exec"]["command"]))
    assert "grpc" in probe, probe
    return Probe(period_s, timeout_s, failures, port=probe["grpc"]["port"], service=probe["grpc"].get("service", ""))
