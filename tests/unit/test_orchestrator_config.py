"""Settings of an orchestrator that depend on each other."""

import os

import pytest

from orchestrator.config import OrchestratorSettings
from outrider.config import ServiceSettings
from outrider.errors import InvalidRequest
from outrider.messages import Speculation

PREFIX = "OUTRIDER_ORCHESTRATOR_"
OWN = sorted(set(OrchestratorSettings.model_fields) - set(ServiceSettings.model_fields))
WAITS = [name for name in OWN if name.endswith("_s") and name != "hand_over_after_s"]
"""In seconds; the one that is left out is bounded by the grace."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)


def load(monkeypatch: pytest.MonkeyPatch, **variables: str) -> OrchestratorSettings:
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    return OrchestratorSettings.load()


@pytest.mark.parametrize(
    ("variables", "plan"),
    [
        ({}, Speculation(4, 3, 8)),
        ({"GAMMA": "20"}, Speculation(20, 3, 40)),
        ({"GAMMA": "2"}, Speculation(2, 2, 4)),
        ({"GAMMA": "256"}, Speculation(256, 3, 512)),
        ({"GAMMA": "20", "WINDOW": "20", "RESTART_GAMMA": "20"}, Speculation(20, 20, 20)),
        ({"WINDOW": "5"}, Speculation(4, 3, 5)),
    ],
)
def test_an_unset_window_and_first_proposal_follow_gamma(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], plan: Speculation
) -> None:
    assert load(monkeypatch, **variables).generations().limits.default == plan


@pytest.mark.parametrize(
    ("variables", "field", "allowed"),
    [
        ({"GAMMA": "20", "WINDOW": "8"}, "WINDOW", "at least gamma (20)"),
        ({"GAMMA": "2", "RESTART_GAMMA": "3"}, "RESTART_GAMMA", "at most gamma (2)"),
        ({"WINDOW": "3"}, "WINDOW", "at least gamma (4)"),
        ({"MAX_GAMMA": "3"}, "MAX_GAMMA", "at least gamma (4)"),
        ({"GAMMA": "20", "MAX_GAMMA": "16"}, "MAX_GAMMA", "at least gamma (20)"),
        ({"HAND_OVER_AFTER_S": "10"}, "HAND_OVER_AFTER_S", "0, or less than grace_s (10)"),
        ({"HAND_OVER_AFTER_S": "3", "GRACE_S": "2"}, "HAND_OVER_AFTER_S", "0, or less than grace_s (2)"),
        ({"MIN_PATIENCE_S": "5"}, "MIN_PATIENCE_S", "at most max_patience_s (2)"),
        ({"MIN_PATIENCE_S": "0.5", "MAX_PATIENCE_S": "0.2"}, "MIN_PATIENCE_S", "at most max_patience_s (0.2)"),
    ],
)
def test_a_set_one_that_contradicts_another_is_refused_in_a_whole_sentence(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], field: str, allowed: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(monkeypatch, **variables)
    assert caught.value.field == PREFIX + field
    assert caught.value.message.endswith(f"is not allowed; expected {allowed}")


def test_an_unset_least_patience_follows_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch).generations().limits.min_patience_s == 0.1
    limits = load(monkeypatch, MAX_PATIENCE_S="0.05").generations().limits
    assert (limits.min_patience_s, limits.max_patience_s) == (0.05, 0.05)


@pytest.mark.parametrize(("gamma", "most"), [("2", 16), ("16", 16), ("20", 20), ("256", 256)])
def test_an_unset_bound_of_gamma_leaves_room_for_gamma(monkeypatch: pytest.MonkeyPatch, gamma: str, most: int) -> None:
    assert load(monkeypatch, GAMMA=gamma).generations().limits.max_gamma == most


@pytest.mark.parametrize("name", WAITS)
def test_every_wait_has_an_upper_limit_that_its_refusal_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"(less than or equal to|at most max_patience_s)") as caught:
        load(monkeypatch, **{name.upper(): "1e30"})
    assert caught.value.field == PREFIX + name.upper()


def test_a_verifier_waits_for_a_drafter_no_longer_than_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, MAX_PATIENCE_S="60").generations().limits.max_patience_s == 60.0
    with pytest.raises(InvalidRequest, match=r"MAX_PATIENCE_S.*less than or equal to 60"):
        load(monkeypatch, MAX_PATIENCE_S="61")


def test_a_bad_gamma_is_named_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(monkeypatch, GAMMA="0")
    assert caught.value.field == PREFIX + "GAMMA"


def test_draft_addresses_without_verify_addresses_are_refused_and_both_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(monkeypatch, DRAFT_ADDRESSES="127.0.0.1:7402")
    assert caught.value.field == PREFIX + "DRAFT_ADDRESSES"
    assert PREFIX + "VERIFY_ADDRESSES" in caught.value.allowed


def test_draft_addresses_beside_verify_addresses_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(monkeypatch, DRAFT_ADDRESSES="a:1, b:2", VERIFY_ADDRESSES="c:3")
    assert (settings.draft_addresses, settings.verify_addresses) == (("a:1", "b:2"), ("c:3",))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"KEY_FILE": "/keys"}, "KEY_FILE"),
        ({"REQUIRE_KEYS": "true", "STORE_KEYS": "false"}, "STORE_KEYS"),
        ({"KEY_CACHE_S": "3600"}, "KEY_CACHE_S"),
        ({"MAX_REQUEST_BYTES": "1"}, "MAX_REQUEST_BYTES"),
    ],
)
def test_settings_of_keys_that_would_protect_nothing_or_let_nobody_in_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], field: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"OUTRIDER_ORCHESTRATOR_{name}", value)
    with pytest.raises(InvalidRequest) as refused:
        OrchestratorSettings.load()
    assert refused.value.field == f"OUTRIDER_ORCHESTRATOR_{field}"
