"""`outrider simulate`: what it reads, what it answers, and what it refuses."""

import json
import re
import shlex
from pathlib import Path

import pytest

from outrider.errors import InvalidRequest
from simulator import command, questions
from simulator.command import Given, doubling, steps
from simulator.measured import DEFAULTS, Measured, by_rows, read
from simulator.memory import GIB, needs, sessions_that_fit, shape_of
from simulator.memory_command import Sizes, memory
from simulator.setting import Fleet, Prices, Setting, ZoneLoss

QUICK = {"seconds": 3.0, "warm_up_s": 1.0, "prompt": 10, "tokens": 32}


def given(**options: object) -> Given:
    return Given(**{**QUICK, **options})  # type: ignore[arg-type]


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


# --- answers --------------------------------------------------------------------------------------------------------


def test_a_cluster_is_told_with_what_a_million_tokens_cost(capsys: pytest.CaptureFixture[str]) -> None:
    command.cluster(given=given(price=("verifier=3.6", "draft=0.4"), json=True))
    found = json.loads(shown(capsys))
    assert found["cost_per_million"] == pytest.approx(4.0 / (found["tokens_per_s"] * 3600) * 1e6)
    command.cluster(given=given(price=("verifier=3.6", "draft=0.4")))
    table = shown(capsys)
    assert f"{found['cost_per_million']:.2f}" in table
    assert re.search(r"how it was found +with the real machines: \d+ events in ", table)


def test_more_draft_workers_than_are_needed_are_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    # One draft worker gives four sessions all that they can use; none leaves them with plain decoding.
    options = {"sessions": 4, "alpha": "0.9", "draft_ms": "1", "verify_ms": "30", "seconds": 20.0}
    options["price"] = ("verifier=4", "draft=1")
    command.ratio(most=2, given=given(**options, json=True))
    found = json.loads(shown(capsys))
    assert (found["enough"], found["cheapest"]) == (1, 1)
    assert [row["drafts"] for row in found["rows"]] == [0, 1, 2]
    assert found["rows"][0]["undrafted"] == 1.0
    command.ratio(most=1, given=given(**options))
    assert "enough: 1 draft workers for 1 verifiers" in shown(capsys)


@pytest.mark.parametrize("sessions", [2, 4])
def test_where_rows_cost_nothing_the_policy_keeps_up_with_the_best_fixed_plan(
    sessions: int,
) -> None:
    """A proposal that takes just a pass to draw misses the next one, which neighbours begin."""
    large = {"sessions": sessions, "alpha": ".75", "draft_ms": "1:4,32:6", "verify_ms": "1:40,32:44", "tokens": 128}
    timing = {"seconds": 20.0, "warm_up_s": 10.0}
    automatic = questions.run(given(**large, **timing).setting())
    fixed = questions.run(given(**large, **timing, gamma=4, window=8).setting())
    assert automatic.tokens_per_s >= 0.9 * fixed.tokens_per_s


def test_drafting_yields_where_rows_cost_what_they_bring(capsys: pytest.CaptureFixture[str]) -> None:
    # A pass of n rows takes n times as long: whatever is not accepted is lost as soon as anybody else could use it.
    slow = {"sessions": 4, "alpha": "0.3", "draft_ms": "3", "verify_ms": "1:10,32:320", "prompt_ms": 10.0}
    command.load(given=given(**slow, json=True))
    found = json.loads(shown(capsys))
    assert found["yields_at"] == 1
    free = {"sessions": 2, "alpha": "0.9", "draft_ms": "1", "verify_ms": "30"}
    command.load(given=given(**free))
    assert "drafting always wins up to here" in shown(capsys)


def test_the_loss_of_a_zone_is_told_in_figures(capsys: pytest.CaptureFixture[str]) -> None:
    # Passes that cost what they hold: half of the verifiers are half of the tokens.
    options = {
        "sessions": 8, "verifiers": 2, "drafts": 2, "zones": 2, "orchestrators": 2, "seconds": 6.0,
        "verify_ms": "1:10,32:320",
    }  # fmt: skip
    command.zone(lose=1, at=4.0, detect_s=0.5, given=given(**options, json=True))
    found = json.loads(shown(capsys))
    assert found["moved"] > 0
    assert found["failed"] == 0
    assert found["pause_s"] > 0.5
    assert found["after"] > 0
    assert found["before"] > 1.2 * found["after"]
    command.zone(lose=1, at=3.0, given=given(**options))
    assert "sessions moved" in shown(capsys)


@pytest.mark.parametrize("option", [{"part": 2}, {"price": ("verifier=1",)}], ids=["part", "price"])
def test_an_option_that_a_question_has_no_use_for_is_refused(option: dict[str, object]) -> None:
    for ask in (command.load, command.zone) if "price" in option else (command.load,):
        with pytest.raises(InvalidRequest, match="it changes nothing here"):
            ask(given=given(**option))


def described(line: str) -> Setting:
    """What a command line would simulate, without simulating it."""
    _, bound, *_ = command.app.parse_args(shlex.split(line)[2:], exit_on_error=False, print_error=False)
    said = bound.arguments.get("given", command.GIVEN)
    if "zone" not in line.split():
        return said.setting()  # type: ignore[no-any-return]
    at_s = bound.arguments.get("at", said.warm_up_s + said.seconds / 2)
    return said.setting(ZoneLoss(bound.arguments["lose"], at_s))  # type: ignore[no-any-return]


def test_every_command_of_the_page_on_sizing_can_be_run_as_it_stands() -> None:
    page = (Path(__file__).parents[2] / "docs/sizing.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:\| .* \| `)?(outrider simulate [^`\n]*-[^`\n]*)", page, re.MULTILINE)
    settings = {line: described(line) for line in lines}
    assert len(settings) >= 10
    assert {setting.load.sessions for setting in settings.values()} > {8, 16, 32, 64}


def test_a_part_stands_for_the_whole() -> None:
    whole = given(sessions=8, verifiers=2, drafts=2, tokens=64).setting()
    one, all_of_it = questions.run(whole, 2), questions.run(whole)
    assert one.mode == "machines, 1 of 2"
    assert (one.sessions, one.verifiers, one.drafts) == (8, 2, 2)
    assert one.tokens_per_s == pytest.approx(all_of_it.tokens_per_s, rel=0.1)


def test_numbers_that_are_tried_grow_with_their_size() -> None:
    assert steps(1) == [0, 1]
    assert steps(8) == [0, 1, 2, 3, 4, 6, 8]
    assert steps(10) == [0, 1, 2, 3, 4, 6, 8, 10]
    assert doubling(6) == [1, 2, 4, 6]


# --- what is known --------------------------------------------------------------------------------------------------


def test_times_are_read_with_and_without_rows() -> None:
    assert by_rows("verify_ms", "30") == {1: 30.0}
    assert by_rows("verify_ms", "1:30, 32:34.5") == {1: 30.0, 32: 34.5}


def test_a_calibration_is_read_by_itself_or_from_a_benchmarks_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    known = {"verify_ms": {"1": 20, "32": 25}, "draft_ms": 3, "round_trip_ms": 2, "alpha": [0.5, 0.9]}
    wanted = Measured({1: 20.0, 32: 25.0}, {1: 3.0}, 2.0, alpha=(0.5, 0.9))
    for text in (known, {"rows": [], "calibration": known}):
        path.write_text(json.dumps(text))
        assert read(path) == wanted
    setting = Given(measured=path, draft_ms="4").setting()
    assert setting.costs.draft.seconds(1) == 0.004
    assert setting.costs.verify.seconds(32) == 0.025
    assert (setting.costs.hop_s, setting.load.alphas) == (0.001, (0.5, 0.9))
    assert setting.costs.store_s == DEFAULTS.store_ms / 1000  # type: ignore[operator]


def test_an_arm_of_the_benchmark_of_one_session_is_a_calibration() -> None:
    path = Path(__file__).parents[2] / "benchmarks/results/one_session.json"
    found = read(path, "toy, 0.8, 2 ms")
    assert found.verify_ms is not None
    assert found.verify_ms[1] == pytest.approx(30, rel=0.2)
    with pytest.raises(InvalidRequest, match="arm") as caught:
        read(path, "no such")
    assert "toy, 0.8, 2 ms" in caught.value.message


@pytest.mark.parametrize(
    ("text", "field"),
    [("no JSON", "measured"), ("[1]", "measured"), ('{"speed": 1}', "speed"), ('{"verify_ms": "x"}', "verify_ms"),
     ('{"calibration": 3}', "no object"), ('{"arms": 3}', "arms"), ('{"arms": [3]}', "arms"),
     ('{"arms": [{"arm": "sequential", "draft_ms": 2}]}', "an arm without pass_ms"),
     ('{"arms": [{"arm": "sequential", "pass_ms": "x", "draft_ms": 2, "trip_ms": 1, "alpha": 1}]}', "verify_ms")],
    ids=["no-json", "no-object", "unknown", "no-number", "no-calibration", "no-arms", "no-arm", "half-an-arm",
         "no-number-in-an-arm"],
)  # fmt: skip
def test_a_calibration_that_cannot_be_used_is_refused(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=field):
        read(path)


@pytest.mark.parametrize(
    ("options", "field", "allowed"),
    [
        ({"verify_ms": "a"}, "verify_ms", "milliseconds, or rows:milliseconds"),
        ({"draft_ms": "0"}, "draft_ms", "more than 0"),
        ({"alpha": "0.5,x"}, "alpha", "rates from 0 to 1"),
        ({"alpha": "2"}, "alpha", "0 to 1"),
        ({"round_trip_ms": -1.0}, "round_trip_ms", "0 to 60000 ms"),
        ({"gamma": 0}, "gamma", "1 to 256"),
        ({"window": 4}, "window", "unset without --gamma"),
        ({"gamma": 4, "window": 3}, "window", "4 to 1024"),
        ({"max_rows": 1}, "max_rows", "2 to 4096"),
        ({"sessions": 0}, "sessions", "1 to 1000000"),
        ({"measured": Path("/no/such")}, "measured", "a JSON file that can be read"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_an_option_out_of_its_range_is_named(options: dict[str, object], field: str, allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        given(**options).setting()
    assert allowed in caught.value.message


@pytest.mark.parametrize(
    ("prices", "allowed"),
    [(("verifier",), "role=PRICE"), (("cook=1",), "verifier, draft, orchestrator"), (("draft=-1",), "0 to")],
    ids=["no-price", "no-role", "negative"],
)
def test_a_price_that_is_none_is_refused(prices: tuple[str, ...], allowed: str) -> None:
    with pytest.raises(InvalidRequest, match="price") as caught:
        given(price=prices).prices()
    assert allowed in caught.value.message


def test_a_part_must_divide_the_whole() -> None:
    with pytest.raises(InvalidRequest, match="part") as caught:
        questions.run(given(sessions=8, verifiers=3).setting(), 2)
    assert "divides verifiers (3)" in caught.value.message


def test_without_prices_or_tokens_nothing_has_a_cost() -> None:
    assert Prices({}).per_million(Fleet(), 100.0) is None
    assert Prices({"verifier": 3.6}).per_million(Fleet(), 0.0) is None
    assert Prices({"verifier": 3.6}).per_million(Fleet(verifiers=2), 1000.0) == pytest.approx(2.0)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_weights_and_whole_blocks() -> None:
    shape = shape_of("target", "8.03,32,8,128", "bfloat16")
    assert shape.token_bytes == 128 * 1024
    assert shape.weight_bytes == pytest.approx(16.06e9)
    # 65 tokens take two blocks; one more block takes what is padding.
    assert shape.kv_bytes(3, 65) == (3 * 2 + 1) * 64 * 128 * 1024
    assert needs(shape, 3, 65, 4).total_bytes == pytest.approx(needs(shape, 3, 65).total_bytes / 4)


def test_as_many_sessions_fit_as_do_not_need_more_than_there_is() -> None:
    shape = shape_of("target", "70.6,80,8,128", "bfloat16")
    assert sessions_that_fit(shape, 4096, 80 * GIB) == 0
    fit = sessions_that_fit(shape, 4096, 80 * GIB, 4)
    assert needs(shape, fit, 4096, 4).total_bytes <= 80 * GIB < needs(shape, fit + 1, 4096, 4).total_bytes


def test_a_table_of_memory_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    memory(sizes=Sizes(target="70.6,80,8,128", ranks=4))
    text = shown(capsys)
    assert "verifier, each of 4 ranks" in text
    assert "32.9" in text  # GiB of weights for each


@pytest.mark.parametrize(
    ("options", "field", "allowed"),
    [
        ({"target": "8"}, "target", "billions of parameters"),
        ({"draft": "1,0,8,64"}, "draft", "all of them positive"),
        ({"dtype": "int4"}, "dtype", "bfloat16"),
        ({"ranks": 3}, "ranks", "divides the 8 key-value heads"),
        ({"context": 0}, "context", "1 to"),
    ],
    ids=["target", "draft", "dtype", "ranks", "context"],
)
def test_a_model_that_is_none_is_refused(options: dict[str, object], field: str, allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        memory(sizes=Sizes(**options))  # type: ignore[arg-type]
    assert allowed in caught.value.message
