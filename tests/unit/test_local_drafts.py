"""What `--draft` makes of a local cluster's draft worker."""

from pathlib import Path

import pytest

from outrider.cli.ask import Ask
from outrider.cli.local import LocalSettings, free_ports
from outrider.drafting.shipped import FEATURE, FOLDER
from outrider.errors import InvalidRequest
from outrider.generation import TextPrediction
from outrider.model.names import DEFAULT_MODEL

SHIPPED = str(FOLDER / FEATURE)
IN_ORDER = ("OUTRIDER_VERIFY", "OUTRIDER_ORCHESTRATOR", "OUTRIDER_DRAFT")


def variables(draft: str, target: str = DEFAULT_MODEL) -> dict[str, str]:
    """Return the draft worker's own variables, by name without their prefix."""
    [worker] = [spec for spec in LocalSettings(target, draft).specs() if spec.name == "draft-1"]
    own = {name.removeprefix("OUTRIDER_DRAFT_"): value for name, value in worker.settings.items()}
    return {name: own[name] for name in ("DRAFTER", "MODEL", "CHECKPOINT", "LAYERS") if name in own}


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        ("prompt-lookup", {"DRAFTER": "prompt_lookup", "MODEL": DEFAULT_MODEL}),
        ("feature", {"DRAFTER": "feature", "MODEL": DEFAULT_MODEL, "CHECKPOINT": SHIPPED}),
        ("feature:/d", {"DRAFTER": "feature", "MODEL": DEFAULT_MODEL, "CHECKPOINT": "/d"}),
        ("medusa:/d", {"DRAFTER": "medusa", "MODEL": DEFAULT_MODEL, "CHECKPOINT": "/d"}),
        ("layers:0,29", {"MODEL": DEFAULT_MODEL, "LAYERS": "0,29"}),
        ("other", {"MODEL": "other"}),
        ("prompt-lookup+other", {"DRAFTER": "prompt_lookup,causal_lm", "MODEL": "other"}),
        ("prompt-lookup+layers:0,29", {"DRAFTER": "prompt_lookup,causal_lm", "MODEL": DEFAULT_MODEL, "LAYERS": "0,29"}),
        ("prompt-lookup+feature", {"DRAFTER": "prompt_lookup,feature", "MODEL": DEFAULT_MODEL, "CHECKPOINT": SHIPPED}),
        ("auto", {"DRAFTER": "prompt_lookup,feature", "MODEL": DEFAULT_MODEL, "CHECKPOINT": SHIPPED}),
    ],
)
def test_a_draft_becomes_the_workers_variables(draft: str, expected: dict[str, str]) -> None:
    assert variables(draft) == expected


def test_what_is_best_for_a_target_that_no_draft_ships_for_is_lookup() -> None:
    assert variables("auto", "other") == {"DRAFTER": "prompt_lookup", "MODEL": "other"}
    assert LocalSettings(DEFAULT_MODEL, "auto", "float16").chosen == "prompt-lookup"


def test_what_is_expected_is_drafted_before_anything_else() -> None:
    for draft, drafters in (("prompt-lookup", "prompt_lookup"), ("other", "causal_lm")):
        settings = LocalSettings(DEFAULT_MODEL, draft, follows_predictions=True)
        [worker] = [spec for spec in settings.specs() if spec.name == "draft-1"]
        assert worker.settings["OUTRIDER_DRAFT_DRAFTER"] == f"prediction,{drafters}"


def test_a_file_with_what_is_expected_is_sent_and_one_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "before.py"
    file.write_text("x = 1\n", encoding="utf-8")
    request = Ask(expect=file, drafter="prediction").request("Rename x to y.")
    assert (request.prediction, request.drafter) == (TextPrediction("x = 1\n"), "prediction")
    assert Ask().request("Hello.").prediction is None
    for unreadable in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InvalidRequest, match="expect"):
            Ask(expect=unreadable).request("Hello.")


def test_a_folder_is_found_from_wherever_the_worker_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert variables("feature:mine")["CHECKPOINT"] == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("draft", "target", "why"),
    [
        ("feature", "other", "none ships for other"),
        ("medusa", DEFAULT_MODEL, "none ships for"),
        ("prompt-lookup+", DEFAULT_MODEL, "a draft with a model"),
        ("prompt-lookup+off", DEFAULT_MODEL, "a draft with a model"),
        ("layers:3,1", DEFAULT_MODEL, "rising"),
    ],
)
def test_a_draft_that_cannot_be_is_refused_before_anything_starts(draft: str, target: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        variables(draft, target)


def test_metrics_have_ports_of_their_own_on_the_orchestrators_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def metrics(listen: str) -> list[dict[str, str]]:
        ports = free_ports(3)
        assert len(set(ports)) == 3
        settings = LocalSettings("toy", "toy", listen=listen, metrics_ports=ports)
        found = [{k: v for k, v in spec.settings.items() if "METRICS" in k} for spec in settings.specs()]
        assert [int(value) for each in found for name, value in each.items() if name.endswith("PORT")] in (
            list(ports),
            list(ports[1:]),
        )
        return found

    for listen, host in (
        ("0.0.0.0:7400", "0.0.0.0"),
        ("[::1]:7400", "::1"),
        ("", "127.0.0.1"),
        ("unix:/s", "127.0.0.1"),
    ):
        assert [each[f"{prefix}_METRICS_HOST"] for each, prefix in zip(metrics(listen), IN_ORDER, strict=True)] == [
            host
        ] * 3
    monkeypatch.setenv("OUTRIDER_VERIFY_METRICS_PORT", "9400")
    assert [bool(each) for each in metrics("")] == [False, True, True], "what the environment says stays"
    assert not any("METRICS" in name for spec in LocalSettings("toy", "off").specs() for name in spec.settings)
    assert len(LocalSettings("toy", "off", metrics_ports=free_ports(3)).specs()) == 2


def test_clusters_of_one_store_have_names_of_their_own() -> None:
    shared = [LocalSettings("toy", "toy", store_url="redis://127.0.0.1:6379").specs() for _ in range(2)]
    assert len({spec.name for specs in shared for spec in specs}) == 6
    alone = [spec.name for spec in LocalSettings("toy", "toy").specs()]
    assert alone == ["verify-1", "orchestrator-1", "draft-1"], "a restart on its data folder is the same cluster"
