"""Dashboard, rules, alerts and pages agree with each other, and with the metrics that the services have."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.metrics_page import families, page, registries, shown_name

ROOT = Path(__file__).parents[2]
OBSERVE = ROOT / "deploy" / "observe"
NAME = re.compile(r"\boutrider_[a-z0-9_]+")
RECORDED = re.compile(r"\boutrider:[a-z0-9_:]+")
SUFFIXES = ("", "_bucket", "_sum", "_count")


def read(name: str) -> Any:
    return yaml.safe_load((OBSERVE / name).read_text("utf-8"))


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in read(name)["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OBSERVE / "grafana" / "dashboards" / "outrider.json").read_text("utf-8"))
    return found


def queries() -> Iterator[str]:
    """Yield every expression of the dashboard, the rules and the alerts."""
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for name in ("rules.yml", "alerts.yml"):
        yield from (rule["expr"] for rule in rules(name))


def series_at_start() -> set[tuple[str, str, str]]:
    """Return name, label and value of every series that a service has before anything happened."""
    with registries() as named:
        samples = [each for registry in named.values() for family in registry.collect() for each in family.samples]
    return {(each.name, label, value) for each in samples for label, value in each.labels.items()}


async def test_every_metric_that_is_asked_for_is_one_that_a_service_has() -> None:
    with registries() as named:
        known = {
            shown_name(family) + end for registry in named.values() for family in families(registry) for end in SUFFIXES
        }
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert len(asked) > 40
    assert asked - known == set()


def test_every_recorded_series_that_is_asked_for_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules("rules.yml")}
    asked = {name for query in queries() for name in RECORDED.findall(query)}
    assert asked - recorded == set()
    assert recorded - asked - {"outrider:tokens:rate5m"} == set(), "recorded for nobody"


async def test_what_alerts_wait_for_is_there_at_0_from_the_start() -> None:
    """A series that begins with its first event shows no increase."""
    known = series_at_start()
    for rule in rules("alerts.yml"):
        for name, label, value in re.findall(r'increase\((outrider_[a-z_]+)\{([a-z]+)="([a-z_]+)"\}', rule["expr"]):
            # A worker's circuit has a name that nobody knows beforehand; its alert waits for several openings.
            assert (name, label, value) in known or label == "state", rule["alert"]


def test_every_alert_has_its_entry_in_the_runbook_and_every_entry_its_alert() -> None:
    titles = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text("utf-8"), re.MULTILINE)
    alerts = [rule["alert"] for rule in rules("alerts.yml")]
    assert sorted(titles) == sorted(alerts)
    for rule in rules("alerts.yml"):
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_every_rule_and_alert_has_a_unit_test_that_could_fail() -> None:
    tests = read("rules_test.yml")["tests"]
    checks = [check for test in tests for check in test.get("alert_rule_test", ())]
    for rule in rules("alerts.yml"):
        mine = [bool(check["exp_alerts"]) for check in checks if check["alertname"] == rule["alert"]]
        assert sorted(mine) == [False, True], f"{rule['alert']}: one that fires and one that does not"
    recorded = " ".join(test["name"] for test in tests if "promql_expr_test" in test)
    assert all(rule["record"] in recorded for rule in rules("rules.yml"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed")
@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", "rules.yml", "alerts.yml"),
        ("test", "rules", "rules_test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=["rules", "unit_tests", "config"],
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=OBSERVE, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_jobs_that_are_scraped_are_those_that_alerts_name() -> None:
    jobs = {job["job_name"] for job in read("prometheus.yml")["scrape_configs"]}
    named = {job for query in queries() for job in re.findall(r'job="(outrider-[a-z]+)"', query)}
    assert jobs == {"outrider-orchestrator", "outrider-verifier", "outrider-draft"}
    assert named <= jobs
    relabelled = read("prometheus-kubernetes.yml")["scrape_configs"][0]["relabel_configs"]
    assert {"target_label": "job", "replacement": "outrider-$1"}.items() <= next(
        each for each in relabelled if each.get("target_label") == "job"
    ).items()


def test_panels_have_their_own_place_and_a_source_that_is_provisioned_or_chosen() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${source}"
    assert [each["name"] for each in dashboard()["templating"]["list"]] == ["source"]
    source = read("grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    provider = read("grafana/provisioning/dashboards/outrider.yml")["providers"][0]
    assert source["type"] == "prometheus"
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


async def test_the_page_of_metrics_is_what_the_services_have() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert written == await page(), "run python -m tests.metrics_page > docs/metrics.md"
