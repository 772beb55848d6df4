"""Every OUTRIDER_* variable in a deployment file is one that the service knows, with a value that it takes."""

import os
from collections.abc import Iterator, Mapping

import pytest

from draft_service.config import DraftSettings
from orchestrator.config import OrchestratorSettings
from outrider.cli.local import AUTO, LocalSettings
from outrider.config import SERVICE_PREFIXES, SHARED_VARIABLES, ServiceSettings
from outrider.errors import InvalidRequest
from outrider.model.names import DEFAULT_MODEL
from tests.deploy.files import OVERLAYS, build, project, rendered
from tests.deploy.plans import Plan, compose_plans, image_environment, kubernetes_plans
from tests.deploy.test_kubernetes import with_component
from verify_service.config import VerifySettings

MODULES: Mapping[str, type[ServiceSettings]] = {
    "verify_service": VerifySettings, "draft_service": DraftSettings, "orchestrator": OrchestratorSettings,
}  # fmt: skip
CASES = ("compose", "compose-tls", "base", *OVERLAYS, "tls-component")


def plans(case: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """Return all processes of a case."""
    if case.startswith("compose"):
        names = ("docker-compose.yml", "docker-compose.tls.yml")
        yield from compose_plans(
            project("cpu", "gpu", "observe", files=names if case.endswith("tls") else names[:1])
        ).values()
    elif case == "tls-component":
        yield from kubernetes_plans(build(with_component("tls", tmp_path_factory.mktemp("tls")))).values()
    else:
        yield from kubernetes_plans(rendered(case if case == "base" else f"overlays/{case}")).values()


def accepted(plan: Plan, settings: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """Let a service read what it would be given."""
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
            patch.delenv(name)
        for name, value in {**image_environment(), **plan.environment}.items():
            if name.startswith("OUTRIDER_"):
                patch.setenv(name, value)
        return settings.load()


@pytest.mark.parametrize("case", CASES)
def test_each_service_takes_what_it_is_given(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    served = set()
    for plan in plans(case, tmp_path_factory):
        module = plan.command[-1] if plan.command else ""
        others = [name for name in plan.environment if name.startswith("OUTRIDER_")]
        if module not in MODULES:
            assert all(name.startswith(SERVICE_PREFIXES) or name in SHARED_VARIABLES for name in others), plan.name
            continue
        settings = accepted(plan, MODULES[module], monkeypatch)
        served.add(module)
        assert settings.listen.startswith("0.0.0.0:"), plan.name
        assert settings.metrics_port == 9400, plan.name
        assert settings.log_format == "json", plan.name
        assert settings.grace_s == plan.grace_s, plan.name
    assert served == set(MODULES)


def drafting(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return a draft worker's model, and what drafts, as the services' variables spell it."""
    settings = accepted(plan, DraftSettings, monkeypatch)
    assert isinstance(settings, DraftSettings)
    return settings.model, ",".join(settings.kinds)


def drafting_here(target: str) -> tuple[str, str]:
    """Return the same of what `outrider up` starts for a target."""
    (found,) = (spec.settings for spec in LocalSettings(target, AUTO).specs() if spec.role == "draft")
    return found["OUTRIDER_DRAFT_MODEL"], found["OUTRIDER_DRAFT_DRAFTER"]


@pytest.mark.parametrize("case", ["compose", "base", "cpu-demo"])
def test_the_default_target_is_drafted_for_as_by_the_command_line(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workers = [plan for plan in plans(case, tmp_path_factory) if plan.name in ("draft", "draft/draft")]
    assert [drafting(plan, monkeypatch) for plan in workers] == [drafting_here(DEFAULT_MODEL)]


def test_another_target_needs_no_other_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compose_plans(project(TARGET="somebody/else"))
    assert drafting(found["draft"], monkeypatch) == drafting_here("somebody/else")
    assert found["models"].command[-2:] == ("somebody/else",) * 2


def test_a_misspelt_variable_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compose_plans(project())["verifier"]
    wrong = Plan(plan.name, plan.command, {**plan.environment, "OUTRIDER_VERIFY_THREAD": "2"}, plan.stop_s)
    with pytest.raises(InvalidRequest, match="OUTRIDER_VERIFY_THREAD"):
        accepted(wrong, VerifySettings, monkeypatch)
