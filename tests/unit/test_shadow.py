"""`outrider shadow`: replaying sessions that are over, reading them, and what is said of them."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from draft_service.config import DraftSettings
from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.features import Features
from draft_service.drafters.prompt_lookup import PromptLookup
from draft_service.drafters.protocol import Drafter, DrafterInfo, DraftSession, Guessed, Outcome, Plan, Work
from draft_service.drafters.toy import noisy
from draft_service.replay import replay
from draft_service.shadow import Limits, check, shadowed
from draft_service.teacher import Teacher
from outrider.cli.app import app
from outrider.cli.shadow.summary import MEANINGS, Summary, lines, report, tables
from outrider.errors import FailedPrecondition, InvalidRequest
from outrider.gamma import Costs
from outrider.ids import Mode, SessionId
from outrider.messages import SamplingParams, TargetFeatures
from outrider.model.tiny import random_model
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.model.transformers_runner import TransformersRunner
from outrider.noise import Purpose, derive_key, seed_key
from outrider.sampling import coupled_token
from outrider.shadowing import Logged, Passes, Shadowed, from_line, read_sessions, to_line, total
from tests.unit.feature_bench import HIDDEN, feature_drafter, features_of, medusa

VOCAB = 24
TARGET = ToyLanguage(VOCAB, seed=5, order=2)
PROMPT = (1, 2, 3, 4)
KEY = seed_key(9)


def drafter(agreement: float) -> CausalLm:
    return CausalLm(ToyRunner(noisy(TARGET, agreement), context_len=256, num_blocks=64), vocab_len=VOCAB)


def text(num: int, mode: Mode = Mode.GREEDY) -> tuple[int, ...]:
    """What the target says by itself."""
    ids = list(PROMPT)
    field = derive_key(KEY, Purpose.FIELD)
    for _ in range(num):
        law = TARGET.probs(ids)
        ids.append(int(law.argmax()) if mode is Mode.GREEDY else coupled_token(law, field, 0, len(ids)))
    return tuple(ids)


def logged(num: int = 60, mode: Mode = Mode.GREEDY, key: bytes = KEY) -> Logged:
    sampling = SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 1.0)
    return Logged("s", text(num, mode), len(PROMPT), mode, sampling, b"" if mode is Mode.GREEDY else key)


# --- replaying ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED])
def test_a_drafter_that_is_the_target_is_always_right(mode: Mode) -> None:
    result = replay(drafter(1.0), logged(60, mode), 4, 100)
    assert result.exact
    assert result.tested == result.accepted == (12, 12, 12, 12)
    assert (result.num_tokens, result.num_rounds, result.num_drafted, result.num_undrafted) == (60, 12, 48, 0)


def test_a_drafter_that_is_always_wrong_has_one_test_a_token() -> None:
    result = replay(drafter(0.0), logged(), 4, 100)
    assert (result.tested, result.accepted, result.num_rounds) == ((60,), (0,), 60)


def test_with_another_key_a_seeded_text_agrees_less() -> None:
    known = replay(drafter(1.0), logged(60, Mode.COUPLED), 4, 100)
    other = replay(drafter(1.0), logged(60, Mode.COUPLED, seed_key(10)), 4, 100)
    unknown = replay(drafter(1.0), logged(60, Mode.COUPLED, b""), 4, 100)
    assert sum(known.accepted) == sum(known.tested)
    assert sum(other.accepted) / sum(other.tested) < 0.7
    assert sum(unknown.accepted) / sum(unknown.tested) < 0.7
    assert not unknown.exact


def test_agreement_with_an_unseeded_text_is_the_chance_that_two_draws_are_equal() -> None:
    """One token per proposal; the drafter's law is the target's, so the chance at each place is the sum of squares."""
    session = logged(200, Mode.COUPLED)
    places = range(len(PROMPT), len(session.token_ids))
    expected = sum(float((TARGET.probs(session.token_ids[:at]) ** 2).sum()) for at in places) / 200
    once = drafter(1.0)
    results = []
    for index in range(10):
        unseeded = replace(session, mode=Mode.REJECTION, key=seed_key(100 + index), session_id=f"s{index}")
        results.append(replay(once, unseeded, 1, 200))
    both = total(results)
    # 2000 tests: five standard deviations are less than .06, so that this fails by chance less than once in a million.
    assert sum(both.accepted) / sum(both.tested) == pytest.approx(expected, abs=0.06)
    assert not both.exact
    assert expected < 0.9


def test_a_place_where_lookup_has_nothing_counts_as_undrafted() -> None:
    prompt, said = (1, 2, 3, 4, 5, 6, 7, 1, 2), (3, 4, 5, 20, 21, 22, 23)
    session = Logged("s", prompt + said, len(prompt), Mode.GREEDY, SamplingParams(temperature=0.0))
    result = replay(PromptLookup(VOCAB, context_len=100), session, 3, 100)
    # Behind 1, 2 the copy 3, 4, 5 is right, and 20 is the verifier's own; nothing of what follows was said before.
    assert (result.tested, result.accepted) == ((1, 1, 1), (1, 1, 1))
    assert (result.num_undrafted, result.num_rounds, result.num_drafted) == (3, 4, 3)


def test_no_more_than_is_asked_for_is_replayed_and_nothing_past_the_end_is_tested() -> None:
    result = replay(drafter(1.0), logged(60), 4, 7)
    assert (result.num_tokens, result.num_rounds) == (7, 2)
    assert (result.tested, result.accepted) == ((2, 2, 1, 1), (2, 2, 1, 1))


class _Listener:
    """A drafter that guesses nothing and notes which features it has at each plan."""

    def __init__(self) -> None:
        self.info = DrafterInfo("listener", "", VOCAB, 256, feature_layers=(-1,))
        self.features = Features(1, torch.float32, 256)
        self.seen: list[tuple[int, int, list[float]]] = []

    def open(self, session: DraftSession, ids: Sequence[int]) -> None: ...

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan:
        rows = [self.features.get(at) for at in range(self.features.end)]
        self.seen.append((len(ids), self.features.end, [float(row[0]) for row in rows if row is not None]))
        return Plan(0, len(ids) + 3, "no_match")

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        return [Guessed() for _ in batch]

    def rewind(self, session_id: SessionId, length: int) -> None: ...

    def close(self, session_id: SessionId, keep: bool) -> None: ...

    def take_features(self, features: TargetFeatures) -> None:
        assert features.session_id == "s"
        self.features.take(features)


def test_a_drafter_gets_the_features_that_a_verifier_would_have_sent_by_then() -> None:
    listener = _Listener()
    teacher = Teacher(ToyRunner(TARGET, context_len=256, num_blocks=64))
    shadowed(listener, teacher, logged(90), Limits(4, 200))
    # A toy's hidden state at a position is the number of tokens up to it.
    for length, end, values in listener.seen:
        assert end == length - 1
        assert values == [float(at + 1) for at in range(end)]
    assert [length for length, _, _ in listener.seen][:3] == [4, 7, 10]


@pytest.mark.parametrize("make", [feature_drafter, medusa], ids=["feature", "medusa"])
def test_trained_drafts_are_shadowed_with_the_hidden_states_of_the_target(make: Callable[[], Drafter]) -> None:
    model = random_model(3, vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48)
    teacher = Teacher(TransformersRunner(model, name="tiny", num_blocks=16))
    ids = text(96)
    states = teacher.features(ids)
    assert states.dtype == torch.float32
    torch.testing.assert_close(states, features_of(ids), rtol=1e-4, atol=1e-4)
    result = shadowed(make(), teacher, replace(logged(), token_ids=ids), Limits(3, 96))
    assert result.num_tokens == 96
    assert result.tested[0] + result.num_undrafted == result.num_rounds
    assert result.num_drafted > 0


def test_passes_of_the_target_are_timed_by_rows() -> None:
    runner = ToyRunner(TARGET, context_len=256, num_blocks=64, delay_s=0.001)
    passes = Teacher(runner).passes(text(60), 4)
    assert 0.001 <= passes.one_s < 1.0
    assert 0.001 <= passes.many_s < 1.0
    assert runner.free_blocks == 64


def test_sessions_that_the_drafter_cannot_read_are_left_out_with_the_reason() -> None:
    foreign = replace(logged(), token_ids=(1, 2, 3, VOCAB, 5, 6))
    assert "vocabulary of 24" in shadowed(drafter(1.0), None, foreign, Limits(4, 100)).skipped
    long = replace(logged(), token_ids=(1,) * 300)
    assert "context of 256" in shadowed(drafter(1.0), None, long, Limits(4, 1000)).skipped
    assert not shadowed(drafter(1.0), None, long, Limits(4, 100)).skipped


def test_a_drafter_of_trees_is_refused_by_the_name_of_its_setting() -> None:
    with pytest.raises(FailedPrecondition, match="OUTRIDER_DRAFT_TREE_NODES is 7, and must be 0"):
        check(DraftSettings(drafter="toy", tree_nodes=7))
    check(DraftSettings(drafter="toy"))


# --- lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED, Mode.REJECTION, Mode.BLOCK], ids=lambda mode: mode.name)
def test_a_session_survives_its_line(mode: Mode) -> None:
    sampling = SamplingParams(((3, -1.5),), 1.1, 0.5, -0.5, 0.0 if mode is Mode.GREEDY else 0.7, 5, 0.9, 0.1)
    key = b"" if mode is Mode.GREEDY else KEY
    session = Logged("name", (1, 2, 3), 2, mode, sampling, key, 3, "a model")
    assert from_line(to_line(session), "here") == session


def test_a_line_needs_ids_and_a_prompt_and_the_rest_follows() -> None:
    greedy = from_line('{"token_ids": [1, 2], "prompt_len": 1}', "line 1")
    assert (greedy.mode, greedy.session_id, greedy.exact) == (Mode.GREEDY, "line 1", True)
    seeded = from_line('{"token_ids": [1, 2], "prompt_len": 1, "sampling": {}, "seed": 9}', "a")
    assert (seeded.mode, seeded.key, seeded.exact) == (Mode.COUPLED, KEY, True)
    unseeded = from_line('{"token_ids": [1, 2], "prompt_len": 1, "sampling": {"temperature": 0.7}}', "a")
    assert (unseeded.mode, unseeded.exact) == (Mode.REJECTION, False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "the line"),
        ('{"prompt_len": 1}', "token_ids"),
        ('{"token_ids": [1], "prompt_len": 1}', "token_ids"),
        ('{"token_ids": [1, -2], "prompt_len": 1}', "token_ids.1"),
        ('{"token_ids": [1, 2], "prompt_len": 2}', "prompt_len in 1 to 1"),
        ('{"token_ids": [1, 2], "prompt_len": 0}', "prompt_len"),
        ('{"token_ids": [1, 2], "prompt_len": 1, "temperature": 1}', "temperature"),
        ('{"token_ids": [1, 2], "prompt_len": 1, "sampling": {"top_p": 2}}', "sampling.top_p"),
        ('{"token_ids": [1, 2], "prompt_len": 1, "mode": "fast"}', "mode"),
        ('{"token_ids": [1, 2], "prompt_len": 1, "key": "12"}', "key"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_field(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(f'{{"token_ids": [1, 2], "prompt_len": 1}}\n\n{line}\n')
    with pytest.raises(InvalidRequest) as caught:
        read_sessions(path)
    assert caught.value.field == "file"
    assert "sessions.jsonl, line 3" in caught.value.message
    assert words in caught.value.message


def test_files_without_sessions_and_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(InvalidRequest, match="at least one session"):
        read_sessions(tmp_path / "a.jsonl")
    with pytest.raises(InvalidRequest, match="can be read"):
        read_sessions(tmp_path / "b.jsonl")


# --- what is said ---------------------------------------------------------------------------------------------------


def _summary(costs: Costs | None = None) -> Summary:
    greedy = Shadowed("a", True, (8, 4), (4, 2), 12, 8, 2, 16, 0.032)
    unseeded = Shadowed("b", False, (2,), (1,), 4, 3, 1, 4, 0.008)
    left_out = Shadowed("c", skipped="too long")
    sessions = (logged(), logged(60, Mode.REJECTION), logged())
    return Summary("toy", False, 2, 8, 0.002, costs, tuple(zip(sessions, (greedy, unseeded, left_out), strict=True)))


def test_each_kind_of_session_has_its_figures_and_what_they_mean() -> None:
    out = io.StringIO()
    for table in tables(_summary()):
        Console(file=out, width=80).print(table)
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["greedy", "1", "12", "0.500", "1.50", "0.17"] in rows
    assert ["unseeded", "1", "4", "0.500", "1.33", "0.25"] in rows
    assert ["all", "2", "16", "0.500", "1.45", "0.19"] in rows
    assert ["greedy", "0.50", "0.50"] in rows
    said = lines(_summary())
    assert MEANINGS["greedy"] in said
    assert MEANINGS["unseeded"] in said
    assert MEANINGS["seeded"] not in said
    assert "left out: c: too long" in said


def test_a_prediction_needs_the_time_of_a_pass_and_says_when_it_is_a_bound() -> None:
    assert "give --verify-ms" in lines(_summary())[-1]
    said = lines(_summary(Costs(0.002, 0.030, 0.001)))[-1]
    assert "cost 0.067: predicted 1." in said
    assert "at least" in said
    assert "leave it off" in lines(_summary(Costs(0.040, 0.030, 0.001)))[-1]
    html = report(_summary(Costs(0.002, 0.030, 0.001)))
    assert said in html.replace("&gt;", ">")
    assert "data:image/svg+xml" in html


@pytest.mark.parametrize(
    ("options", "field", "allowed"),
    [
        (("--gamma", "0"), "gamma", "1 to 64"),
        (("--max-gamma", "65"), "max_gamma", "1 to 64"),
        (("--max-tokens", "0"), "max_tokens", "1 to"),
        (("--verify-ms", "0"), "verify_ms", "more than 0"),
        (("--rtt", "-1"), "rtt", "0 ms or more"),
        (("--latest", "0", "--store", "redis://127.0.0.1:1"), "latest", "1 to"),
        (("--store", ""), "store", "--file"),
        (("--drafter", "off"), "drafter", "drafts"),
        (("--report", "/nowhere/at/all.html"), "report", "can be written"),
    ],
)
def test_an_option_out_of_range_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], field: str, allowed: str
) -> None:
    monkeypatch.delenv("OUTRIDER_ORCHESTRATOR_STORE_URL", raising=False)
    drafting = () if "--drafter" in options else ("--drafter", "toy")
    with pytest.raises(InvalidRequest) as caught:
        app(["shadow", *drafting, "--target", "toy", *options], result_action="return_value")
    assert caught.value.field == field
    assert allowed in caught.value.allowed


def test_what_the_drafting_process_says_is_read_back() -> None:
    from outrider.cli.shadow.child import Heard  # noqa: PLC0415

    heard = Heard()
    result = Shadowed("a", True, (2, 1), (1, 1), 3, 2, 0, 4, 0.5)
    said = {"shadowed": asdict(result)}
    for line in (
        {"drafter": {"kind": "toy", "model": "", "features": True}},
        said,
        {"passes": {"one_s": 1, "many_s": 2}},
    ):
        heard.take(json.dumps(line).encode())
    assert (heard.drafter, heard.features, heard.results, heard.passes) == ("toy", True, [result], Passes(1, 2))
    with pytest.raises(ValueError, match="nonsense"):
        heard.take(b'{"nonsense": 1}')
