"""Settings: nothing misspelt or out of range starts a service."""

import os

import pytest
from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict

from draft_service.config import DraftSettings
from outrider.config import ServiceSettings
from outrider.errors import InvalidRequest
from verify_service.config import VerifySettings


class ExampleSettings(ServiceSettings):
    """A service's own settings."""

    window: int = Field(default=8, ge=0)
    """A number of the service's own."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)


def test_defaults_need_no_environment() -> None:
    settings = ExampleSettings.load()
    assert (settings.window, settings.metrics_port, settings.log_format) == (8, 0, "plain")


def test_variables_are_read_and_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_WINDOW", "3")
    monkeypatch.setenv("OUTRIDER_LISTEN", "0.0.0.0:7000")
    settings = ExampleSettings.load(window=5)
    assert (settings.window, settings.listen) == (5, "0.0.0.0:7000")


@pytest.mark.parametrize("name", ["OUTRIDER_WINDWO", "outrider_windwo"])
def test_an_unknown_variable_is_an_error_that_names_it_and_the_nearest_known(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "3")
    with pytest.raises(InvalidRequest) as caught:
        ExampleSettings.load()
    assert caught.value.field == name
    assert caught.value.message == f"{name}: there is no such variable; the nearest is OUTRIDER_WINDOW"


class DraftLikeSettings(ServiceSettings):
    """Settings behind a service's own prefix."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFT_", frozen=True, extra="forbid")


def test_one_environment_holds_the_variables_of_several_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_VERIFY_ANYTHING", "1")
    monkeypatch.setenv("OUTRIDER_CACHE", "/somewhere")
    monkeypatch.setenv("OUTRIDER_DRAFT_LISTEN", "unix:/x")
    assert DraftLikeSettings.load().listen == "unix:/x"


@pytest.mark.parametrize("name", ["OUTRIDER_DRAFT_LISTNE", "OUTRIDER_DARFT_LISTEN", "OUTRIDER_LISTEN"])
def test_a_variable_that_no_service_knows_is_refused_by_every_service(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "unix:/x")
    with pytest.raises(InvalidRequest) as caught:
        DraftLikeSettings.load()
    assert caught.value.field == name


def test_a_variable_without_a_service_is_refused_by_one_that_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_WINDOW", "3")
    with pytest.raises(InvalidRequest):
        ServiceSettings.load()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WINDOW", "-1"),
        ("WINDOW", "many"),
        ("METRICS_PORT", "65536"),
        ("LOG_FORMAT", "xml"),
        ("GRACE_S", "-0.5"),
        ("GRACE_S", "inf"),
        ("LISTEN", "localhost"),
        ("LISTEN", "127.0.0.1:99999"),
        ("LISTEN", "unix:"),
    ],
)
def test_a_bad_value_is_an_error_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"OUTRIDER_{name}", value)
    with pytest.raises(InvalidRequest) as caught:
        ExampleSettings.load()
    assert caught.value.field == f"OUTRIDER_{name}"
    assert value in caught.value.value
    assert "should" not in caught.value.allowed


BEYOND = [
    (service, name, value)
    for service in (DraftSettings, VerifySettings)
    for name, field in service.model_fields.items()
    for value in ("inf", "nan", "1e30")
    if field.annotation is float and not (value == "1e30" and name.startswith("toy_"))  # toys may be as odd as a test
]


@pytest.mark.parametrize(("service", "name", "value"), BEYOND)
def test_no_number_of_a_worker_is_beyond_all_measure(
    monkeypatch: pytest.MonkeyPatch, service: type[ServiceSettings], name: str, value: str
) -> None:
    monkeypatch.setenv(service.variable(name), value)
    with pytest.raises(InvalidRequest) as caught:
        service.load()
    assert caught.value.field == service.variable(name)


@pytest.mark.parametrize("listen", ["[::]:7400", "0.0.0.0:0", "orchestrator.example:65535", "unix:/tmp/x", ":7400"])
def test_what_can_be_listened_on_is_taken(monkeypatch: pytest.MonkeyPatch, listen: str) -> None:
    monkeypatch.setenv("OUTRIDER_LISTEN", listen)
    assert ServiceSettings.load().listen == listen


def test_an_unknown_override_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="OUTRIDER_NO_SUCH"):
        ExampleSettings.load(no_such=1)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        ExampleSettings.load().window = 4  # type: ignore[misc]
