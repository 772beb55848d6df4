"""`outrider plan`: the figures of the latency model, as a user reads them."""

import re

import pytest

from outrider.cli.app import app
from outrider.errors import InvalidRequest


def ask(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return what the command prints."""
    app(["plan", *options], result_action="return_value")
    return capsys.readouterr().out


def rows(printed: str) -> dict[int, list[str]]:
    """Return the table's cells by gamma."""
    lines = [line.split() for line in printed.splitlines() if re.match(r"\s*\d+ ", line)]
    return {int(cells[0]): cells[1:] for cells in lines}


@pytest.mark.parametrize(
    ("alpha", "gamma", "words", "speed_up"),
    [(".8", 4, "3.36", "2.40"), (".8", 6, "3.95", "2.47"), (".6", 4, "2.31", "1.65"), (".6", 3, "2.18", "1.67"),
     (".4", 4, "1.65", "1.18")],
)  # fmt: skip
def test_the_table_has_the_known_figures_at_a_cost_of_a_tenth(
    capsys: pytest.CaptureFixture[str], alpha: str, gamma: int, words: str, speed_up: str
) -> None:
    printed = ask(capsys, "--alpha", alpha, "--cost", ".1", "--sequential")
    assert rows(printed)[gamma] == [words, speed_up]


@pytest.mark.parametrize(("alpha", "best"), [(".8", "6: 2.47"), (".6", "3: 1.67"), (".4", "2: 1.30")])
def test_the_best_gamma_and_both_break_evens_are_named(
    capsys: pytest.CaptureFixture[str], alpha: str, best: str
) -> None:
    printed = ask(capsys, "--alpha", alpha, "--cost", ".1", "--sequential")
    assert f"best gamma {best} times plain" in printed
    assert "break-even alpha 0.101 at cost 0.1: switch off below it" in printed
    assert f"break-even cost 0{alpha}00 at alpha 0{alpha}: switch off above it" in printed


def test_pipelined_rounds_are_shown_beside_or_alone(capsys: pytest.CaptureFixture[str]) -> None:
    both = rows(ask(capsys, "--alpha", ".8", "--cost", ".1"))
    alone = rows(ask(capsys, "--alpha", ".8", "--cost", ".1", "--pipelined"))
    assert all(cells == both[gamma][2:] for gamma, cells in alone.items())
    assert float(alone[6][1]) > float(both[6][1])


def test_a_round_trip_costs_speed_and_seconds_are_shown_where_they_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    near = ask(capsys, "--alpha", ".8", "--cost", ".1", "--verify-ms", "20", "--rtt", ".2", "--sequential")
    far = ask(capsys, "--alpha", ".8", "--cost", ".1", "--verify-ms", "20", "--rtt", "20", "--sequential")
    assert "122.7 tokens per second instead of 50.0" in near
    assert float(rows(far)[4][1]) < float(rows(near)[4][1])
    assert "tokens per second" not in ask(capsys, "--alpha", ".8", "--cost", ".1")


def test_a_drafter_that_never_pays_is_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    printed = ask(capsys, "--alpha", ".9", "--cost", "2", "--max-gamma", "3")
    assert printed.count("off: nothing up to gamma 3 is faster than plain decoding") == 2
    assert printed.count("no break-even alpha at cost 2: off even if every token is accepted") == 2
    hopeless = ask(capsys, "--alpha", "0", "--cost", "0", "--verify-ms", "30", "--rtt", "3")
    assert hopeless.count("no break-even cost at alpha 0: off even if drafts are free") == 2


@pytest.mark.parametrize(
    ("options", "field", "allowed"),
    [
        (("--alpha", "1.2", "--cost", ".1"), "alpha", "0 to 1"),
        (("--alpha", "nan", "--cost", ".1"), "alpha", "0 to 1"),
        (("--alpha", ".5", "--cost", "-1"), "cost", "0 or more"),
        (("--alpha", ".5", "--cost", "inf"), "cost", "finite"),
        (("--alpha", ".5", "--cost", ".1", "--rtt", "2"), "rtt", "--verify-ms"),
        (("--alpha", ".5", "--cost", ".1", "--rtt", "-2", "--verify-ms", "30"), "rtt", "0 ms or more"),
        (("--alpha", ".5", "--cost", ".1", "--verify-ms", "0"), "verify_ms", "more than 0 ms"),
        (("--alpha", ".5", "--cost", ".1", "--max-gamma", "0"), "max_gamma", "1 to 256"),
        (("--alpha", ".5", "--cost", ".1", "--max-gamma", "257"), "max_gamma", "1 to 256"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_range(options: tuple[str, ...], field: str, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        app(["plan", *options], result_action="return_value")
    assert caught.value.field == field
    assert allowed in caught.value.allowed
