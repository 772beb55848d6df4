"""`outrider drafters compare`: its arithmetic, its options, and what it shows; no cluster."""

import io
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from rich.console import Console

from outrider.cli.app import app
from outrider.cli.drafters.asking import Asking
from outrider.cli.drafters.compare import placed, split_drafters
from outrider.cli.drafters.comparison import Setting, report, tables
from outrider.cli.drafters.tally import Answer, Asked, Measured, costs, measured, predicted
from outrider.cli.local import LocalSettings
from outrider.errors import InvalidRequest
from outrider.gamma import Costs, pipelined_rate, sequential_rate
from outrider.generation import Figures
from outrider.messages import Speculation

PASS_S, DRAFT_S, TRIP_S, WIDE_S = 0.030, 0.002, 0.004, 0.033
GAMMA = 4


def plain_answer(num: int = 20, overhead_s: float = 0.0) -> Answer:
    figures = Figures(num_rounds=num, num_plain=num, verify_s=num * PASS_S)
    times = tuple((PASS_S + overhead_s) * step for step in range(num))
    return Answer(times, (1,) * num, (False,) * num, tuple(range(num)), figures)


def drafted_answer(runs: tuple[int, ...], num_plain: int = 0, **changes: object) -> Answer:
    """Sequential rounds of `GAMMA` tokens of which so many were accepted each; then tokens that nobody drafted."""
    counts = [run + 1 for run in runs] + [1] * num_plain
    round_s = [GAMMA * DRAFT_S + TRIP_S + WIDE_S] * len(runs) + [PASS_S] * num_plain
    reached = [sum(run >= place for run in runs) for place in range(GAMMA + 1)]
    figures = Figures(
        num_rounds=len(counts),
        num_drafted=GAMMA * len(runs),
        num_tested=sum(reached[:GAMMA]),
        num_accepted=sum(runs),
        tested_per_position=tuple(reached[:GAMMA]),
        accepted_per_position=tuple(reached[1:]),
        num_plain=num_plain,
        num_recovered=sum(run < GAMMA for run in runs),
        num_bonus=sum(run == GAMMA for run in runs),
        draft_s=GAMMA * DRAFT_S * len(runs),
        verify_s=WIDE_S * len(runs) + PASS_S * num_plain,
    )
    tested = (True,) * len(runs) + (False,) * num_plain
    answer = Answer(tuple(accumulate(round_s)), tuple(counts), tested, tuple(range(sum(counts))), figures)
    return replace(answer, **changes)  # type: ignore[arg-type]


TRIAL = drafted_answer((4, 2, 0, 4, 4, 1, 4, 3))


def one_result(*ways: tuple[str, Speculation | None, list[Answer]], trial: Answer = TRIAL) -> Measured:
    return measured("a drafter", Asked([plain_answer(30)], [trial], ways), GAMMA, 8)


def test_costs_are_found_in_the_rounds_that_have_them() -> None:
    times = costs([plain_answer()], [TRIAL], GAMMA)
    assert times.draft_s == pytest.approx(DRAFT_S)
    assert times.round_trip_s == pytest.approx(TRIP_S)
    assert [times.pass_s(rows) for rows in (1, 2, 5, 9)] == pytest.approx([PASS_S, WIDE_S, WIDE_S, WIDE_S])


def test_tokens_that_nobody_drafted_change_neither_costs_nor_acceptance() -> None:
    mixed = drafted_answer((4, 2, 0, 4, 4, 1, 4, 3), num_plain=22)
    assert costs([plain_answer()], [mixed], GAMMA) == costs([plain_answer()], [TRIAL], GAMMA)
    result = one_result(trial=mixed)
    assert result.alpha == one_result().alpha
    assert result.undrafted == pytest.approx(22 / 52)


def test_acceptance_is_counted_by_position_and_over_all() -> None:
    other = drafted_answer((0, 1))
    result = measured("d", Asked([plain_answer()] * 2, [TRIAL, other], []), GAMMA, 8)
    assert result.tested == (10, 8, 6, 5)
    assert result.accepted == (8, 6, 5, 4)
    assert result.rates_by_position == pytest.approx([0.8, 0.75, 5 / 6, 0.8])
    assert result.alpha == pytest.approx(23 / 29)


def test_a_speed_up_is_the_ratio_of_two_answers_to_one_prompt_and_short_answers_have_none() -> None:
    half = plain_answer(30, overhead_s=PASS_S)
    asked = Asked(
        [plain_answer(30), half, plain_answer(4)], [TRIAL] * 3, [("automatic", None, [half, half, plain_answer(4)])]
    )
    (way,) = measured("d", asked, GAMMA, 8).ways
    assert way.ratios == pytest.approx((0.5, 1.0))
    assert way.speed_up == pytest.approx(0.75)
    assert (way.num_equal, way.num_answers) == (3, 3)


def test_a_prediction_is_the_latency_models() -> None:
    times = Costs(DRAFT_S, PASS_S, TRIP_S)
    ahead, waiting = Speculation(4, 2, 8), Speculation(4, 4, 4)
    assert predicted(0.7, 0.0, ahead, times) == pytest.approx(pipelined_rate(0.7, 2, 4, times) * PASS_S)
    assert predicted(0.7, 0.0, waiting, times) == pytest.approx(sequential_rate(0.7, 4, times) * PASS_S)
    assert predicted(0.7, 0.0, Speculation(), times) == 1.0
    assert predicted(0.7, 1.0, ahead, times) == pytest.approx(1.0)
    assert 1.0 < predicted(0.7, 0.5, ahead, times) < predicted(0.7, 0.0, ahead, times)


def test_a_drafter_that_never_had_anything_is_off() -> None:
    result = one_result(("automatic", None, [plain_answer(30)]), trial=plain_answer(30))
    assert result.alpha is None
    assert not result.best.enabled
    assert (result.ways[0].predicted, result.undrafted, result.tested) == (1.0, 1.0, ())


def _setting() -> Setting:
    return Setting("chat.jsonl", 1, "toy", "bfloat16", 1, Asking(64, 0.0, 11, GAMMA, (None,)))


def test_tables_and_report_show_what_was_measured() -> None:
    layers = replace(one_result(("automatic", None, [TRIAL])), drafter="layers:0,1,2,8,9,10,11,13,15,29")
    nothing = one_result(("automatic", None, [plain_answer(30)]), trial=plain_answer(30))
    out = io.StringIO()
    for table in tables([layers, nothing]):
        Console(file=out, width=80).print(table)
    html = report([layers, nothing], _setting(), {"date": "today"})
    ratio = layers.ways[0].ratios[0]
    for part in ("0.85", "2.00", "30.0, 33.0", "0.067", "off", f"{ratio:.2f} ({ratio:.2f} … {ratio:.2f})", "–"):
        assert part in out.getvalue()
        assert part in html
    assert html.count("data:image/svg+xml") == 3
    assert "<td>7 / 8</td>" in html


def test_a_list_of_drafters_keeps_the_layers_of_each_together() -> None:
    assert split_drafters("layers:0,1,29, prompt-lookup,layers:2,model") == [
        "layers:0,1,29", "prompt-lookup", "layers:2", "model",
    ]  # fmt: skip
    for wrong in ("", "a,,b", "a,a", "off", "a,off"):
        with pytest.raises(InvalidRequest, match="drafters"):
            split_drafters(wrong)


def test_verifier_and_draft_worker_get_cores_of_their_own_where_there_are_enough() -> None:
    specs = LocalSettings("toy", "toy:0.5").specs()
    cores = {spec.role: spec.cores for spec in placed(specs, 1)}
    assert cores["verify"] != cores["draft"] == cores["orchestrate"] or set(cores.values()) == {""}
    assert placed(specs, 10_000) == specs


@pytest.mark.parametrize("draft", ["toy:1.5", "toy:x", "toy:-1", "toy:nan"])
def test_a_toy_that_agrees_impossibly_often_is_refused(draft: str) -> None:
    with pytest.raises(InvalidRequest, match=r"toy:0\.8"):
        LocalSettings("toy", draft).specs()


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("tokens", "1", "2 to"),
        ("trial-gamma", "0", "1 to 64"),
        ("max-gamma", "65", "1 to 64"),
        ("temperature", "-1", "0 to 100"),
        ("temperature", "nan", "0 to 100"),
        ("gamma", "auto,0", "1 to 64"),
        ("gamma", "fast", "auto, or"),
        ("seed", "-1", "0 to"),
        ("num-prompts", "-1", "0 to"),
        ("report", "/nowhere/at/all.html", "can be written"),
    ],
)
def test_an_option_out_of_range_is_named_before_anything_starts(
    tmp_path: Path, option: str, value: str, allowed: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    arguments = ["drafters", "compare", "--prompts", str(prompts), "--target", "toy", "--drafters", "toy"]
    if option != "report":
        arguments += ["--report", str(tmp_path / "report.html")]
    with pytest.raises(InvalidRequest) as caught:
        app([*arguments, f"--{option}", value], result_action="return_value")
    assert caught.value.field == option.replace("-", "_")
    assert allowed in caught.value.message
