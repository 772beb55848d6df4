"""`docker-compose.yml` and the file that lies over it, checked without an engine."""

import json
from importlib.resources import files
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from outrider.config import SERVICE_PREFIXES
from tests.deploy.files import ROOT, composed, project
from tests.deploy.plans import compose_plans, seconds

BOTH = ("docker-compose.yml", "docker-compose.tls.yml")
PROFILES = {
    "cpu": {"verifier", "draft"},
    "gpu": {"verifier-gpu", "draft-gpu"},
    "observe": {"prometheus", "grafana", "traces"},
}
ALWAYS = {"store", "models", "orchestrator"}
SERVICES = ("verifier", "draft", "orchestrator", "verifier-gpu", "draft-gpu")


def everything(*, tls: bool = False) -> dict[str, Any]:
    """Return all services of all profiles."""
    services = project(*PROFILES, files=BOTH if tls else BOTH[:1])["services"]
    assert isinstance(services, dict)
    return services


@pytest.mark.parametrize("file", BOTH)
def test_each_file_is_what_the_specification_of_compose_allows(file: str) -> None:
    schema = json.loads(
        files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text("utf-8")
    )
    found = yaml.safe_load((ROOT / file).read_text("utf-8"))
    assert [error.message for error in Draft202012Validator(schema).iter_errors(found)] == []
    found["services"]["orchestrator"]["heathcheck"] = {}
    assert [error.message for error in Draft202012Validator(schema).iter_errors(found)], "the schema refuses nothing"


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_compose_itself_takes_each_profile(profile: str, tls: bool) -> None:
    composed("--profile", profile, "config", "--quiet", files=BOTH if tls else BOTH[:1])


def test_without_a_profile_the_services_for_a_cpu_are_meant() -> None:
    assert set(project()["services"]) == ALWAYS | PROFILES["cpu"]
    assert set(project("gpu")["services"]) == ALWAYS | PROFILES["gpu"]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_no_container_may_more_than_it_needs(tls: bool) -> None:
    for name, service in everything(tls=tls).items():
        assert service.get("read_only"), name
        assert service.get("cap_drop") == ["ALL"], name
        assert service.get("security_opt") == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "pid", "ipc", "network_mode", "devices"} & set(service), name
        assert not [each for each in service.get("volumes", []) if "docker.sock" in str(each)], name


def test_every_image_has_a_version() -> None:
    for name, service in everything().items():
        tag = service["image"].rpartition(":")[2]
        assert "/" not in tag, name
        assert tag != "latest", name


def test_whoever_is_called_is_waited_for_until_it_is_well() -> None:
    services = everything()
    for name in SERVICES:
        assert services[name]["healthcheck"]["test"] == ["CMD", "outrider", "health"], name
        waits = {other: each["condition"] for other, each in services[name]["depends_on"].items()}
        assert waits["store"] == "service_healthy", name
        assert waits["models"] == "service_completed_successfully", name
    assert services["orchestrator"]["depends_on"]["verifier"]["condition"] == "service_healthy"
    assert services["store"]["healthcheck"]["test"] == ["CMD", "valkey-cli", "ping"]


def test_draft_workers_can_be_many() -> None:
    """No name, port or address of a replica stands in the file."""
    draft = everything()["draft"]
    assert not {"container_name", "hostname", "ports"} & set(draft)
    assert not [name for name in draft["environment"] if name.endswith(("_ADVERTISE", "_WORKER_ID"))]
    assert json.loads(composed("config", "--format", "json", "--no-interpolate"))["services"]["draft"]


def test_plaintext_is_offered_to_this_machine_alone() -> None:
    for name, service in everything().items():
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name


def test_workers_and_store_reach_nothing_outside() -> None:
    found = project(*PROFILES)
    assert found["networks"]["inside"]["internal"]
    for name in ("store", "verifier", "draft", "verifier-gpu", "draft-gpu"):
        assert set(found["services"][name]["networks"]) == {"inside"}, name


def test_each_gpu_belongs_to_one_service() -> None:
    """Replicas of one service would all be given the same."""
    taken = [
        device
        for service in everything().values()
        for each in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        for device in each["device_ids"]
    ]
    assert sorted(taken) == ["0", "1"]


def test_a_container_is_killed_only_after_its_service_has_had_its_time() -> None:
    plans = compose_plans(project(*PROFILES))
    for name in SERVICES:
        assert plans[name].stop_s >= plans[name].grace_s + 5, name


def test_sessions_survive_the_store() -> None:
    store = everything()["store"]
    assert store["volumes"][0]["target"] == "/data"
    command = " ".join(store["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--dir /data" in command


def test_the_tls_file_leaves_no_edge_in_plaintext() -> None:
    services = everything(tls=True)
    for name in SERVICES:
        prefix = next(each for each in SERVICE_PREFIXES if f"{each}LISTEN" in services[name]["environment"])
        settings = services[name]["environment"]
        assert settings[f"{prefix}STORE_URL"].startswith("rediss://"), name
        parts = ("TLS_CERT", "TLS_KEY", "TLS_CA", "STORE_TLS_CERT", "STORE_TLS_KEY", "STORE_TLS_CA")
        files_named = [settings[prefix + part] for part in parts]
        mounted = {f"/run/secrets/{each['target'].rpartition('/')[2]}" for each in services[name]["secrets"]}
        assert set(files_named) <= mounted, name
    orchestrator = services["orchestrator"]["environment"]
    assert orchestrator["OUTRIDER_ORCHESTRATOR_REQUIRE_KEYS"] == "true"
    assert {"OUTRIDER_ORCHESTRATOR_SERVE_TLS_CERT", "OUTRIDER_ORCHESTRATOR_SERVE_TLS_KEY"} <= set(orchestrator)
    store = services["store"]["command"]
    assert store[store.index("--port") + 1] == "0"


def test_no_secret_stands_in_a_file() -> None:
    for file in (*BOTH, ".env"):
        text = (ROOT / file).read_text("utf-8").lower()
        assert "password" not in text, file
        assert "begin" not in text, file


@pytest.mark.parametrize(("text", "expected"), [("10m0s", 600), ("30s", 30), ("1h1m1s", 3661), ("2s", 2)])
def test_durations_are_read(text: str, expected: float) -> None:
    assert seconds(text) == expected
