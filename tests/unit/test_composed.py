"""Several drafters as one: who is asked, who draws, and that nobody is taken along by another one's failure."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from draft_service.drafters.composed import Composed
from draft_service.drafters.prediction import PredictionDrafter
from draft_service.drafters.prompt_lookup import PromptLookup
from draft_service.drafters.protocol import (
    Drafter,
    DrafterInfo,
    DraftSession,
    Failed,
    Guessed,
    Outcome,
    Plan,
    Work,
)
from draft_service.window import FOREVER
from outrider.errors import FailedPrecondition
from outrider.ids import Mode, SessionId
from outrider.messages import SparseRow, TargetFeatures, Tensor
from tests.unit.drafter_bench import EPOCH, VOCAB, continued, likeliest, planned, prompt, session, toy
from tests.unit.drafter_bench import TARGET as LANGUAGE

S = SessionId("s")
KINDS = ("prediction", "prompt_lookup", "causal_lm")
NO_MATCH = prompt(4)
COPIES = [1, 2, 3, 9, 1, 2]


def composed(*extra: Drafter) -> Composed:
    lookup = PromptLookup(VOCAB, context_len=1 << 20)
    return Composed([PredictionDrafter(VOCAB, context_len=1 << 20), lookup, toy()[0], *extra])


def opened(ids: Sequence[int], mode: Mode = Mode.GREEDY, **known: object) -> Composed:
    drafter = composed()
    drafter.open(replace(session(mode=mode, prompt_len=len(ids)), **known), ids)  # type: ignore[arg-type]
    return drafter


def guess(drafter: Drafter, ids: Sequence[int], count: int) -> tuple[str, list[int], list[SparseRow]]:
    """Draw a whole proposal, catching up as long as it takes; return who drew it, its tokens and rows."""
    plan = planned(drafter, "s", ids, count)
    text, rows = list(ids), list[SparseRow]()
    while len(text) < len(ids) + plan.count:
        [outcome] = drafter.draw([Work(S, EPOCH, text, len(ids) + plan.count - len(text))])
        assert isinstance(outcome, Guessed)
        text.extend(outcome.token_ids)
        rows.extend(outcome.rows)
    return plan.drafter, text[len(ids) :], rows


# --- the rule -----------------------------------------------------------------------------------------------------


def test_the_first_that_has_something_to_offer_makes_the_whole_proposal() -> None:
    assert guess(opened(COPIES, prediction=(7, 8)), COPIES, 4)[:2] == ("prediction", [7, 8])
    assert guess(opened(COPIES), COPIES, 4)[:2] == ("prompt_lookup", [3, 9, 1, 2])
    said = continued(LANGUAGE, NO_MATCH, 4, likeliest)
    assert guess(opened(NO_MATCH), NO_MATCH, 4)[:2] == ("causal_lm", said)


def test_a_proposal_stays_with_its_drafter_also_when_another_one_could_go_on() -> None:
    """The model is in the middle of a proposal when what it has drawn would be a match for lookup."""
    drafter = opened(NO_MATCH)
    assert drafter.plan(S, NO_MATCH, 3) is not None
    text = list(NO_MATCH)
    for left in (3, 2, 1):
        [outcome] = drafter.draw([Work(S, EPOCH, [*text, *NO_MATCH] if left < 3 else text, left)])
        assert isinstance(outcome, Guessed)
        assert len(outcome.token_ids) == 1, "lookup would copy all that is left at once"


def test_the_rows_of_each_proposal_are_those_of_its_drafter() -> None:
    _, tokens, rows = guess(opened(COPIES, Mode.REJECTION), COPIES, 3)
    assert [row.token_ids for row in rows] == [(token,) for token in tokens]
    _, tokens, rows = guess(opened(NO_MATCH, Mode.REJECTION), NO_MATCH, 3)
    assert all(len(row.token_ids) > 1 for row in rows)
    assert all(token in row.token_ids for token, row in zip(tokens, rows, strict=True))


def test_a_drafter_that_was_not_asked_for_long_catches_up_and_guesses_as_if_it_had_never_paused() -> None:
    ids = [1, 2, 3] * 40
    drafter = opened(ids)
    assert guess(drafter, ids, 8)[0] == "prompt_lookup"
    ids = [*ids, 20, 21, 22, 23, 20, 5]
    assert drafter.plan(S, ids, 4) is None, "more than a decode pass takes along"
    assert guess(drafter, ids, 4)[:2] == ("causal_lm", continued(LANGUAGE, ids, 4, likeliest))


def test_a_plan_depends_on_the_ids_alone_however_they_came_about() -> None:
    rng = random.Random(29)
    ids, expected = [1, 2, 3, 4], (5, 6, 7, 8, 9, 10)
    drafter = opened(ids, prediction=expected)
    for _ in range(60):
        length = rng.randint(4, len(ids))
        drafter.rewind(S, length)
        ids = ids[:length] + [rng.randrange(11) for _ in range(rng.randint(0, 4))]
        fresh = composed()
        fresh.open(replace(session(prompt_len=4), prediction=expected), ids[:4])
        assert guess(drafter, ids, 3) == guess(fresh, ids, 3)


def test_if_nobody_has_an_offer_the_verifier_is_let_go_until_one_may_have_one() -> None:
    drafter = Composed([PredictionDrafter(VOCAB, context_len=64), PromptLookup(VOCAB, context_len=64)])
    drafter.open(session(), NO_MATCH)
    assert drafter.plan(S, NO_MATCH, 4) == Plan(0, 5, "no_match")


# --- one for a session ------------------------------------------------------------------------------------------------


def test_a_session_that_names_one_gets_its_guesses_and_no_others() -> None:
    assert guess(opened(COPIES, drafter="causal_lm"), COPIES, 3)[0] == "causal_lm"
    assert opened(NO_MATCH, drafter="prompt_lookup").plan(S, NO_MATCH, 3) == Plan(0, 5, "no_match")
    assert guess(opened(COPIES, drafter=",".join(KINDS)), COPIES, 3)[0] == "prompt_lookup", "the whole by its name"


def test_a_session_that_names_none_of_them_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"medusa.*prediction, prompt_lookup, causal_lm"):
        opened(COPIES, drafter="medusa")


def test_sessions_of_a_batch_are_drawn_by_their_own_drafters() -> None:
    drafter, ids = composed(), {"a": COPIES, "b": NO_MATCH, "c": NO_MATCH}
    for name, text in ids.items():
        drafter.open(replace(session(name), prediction=(7, 8) if name == "c" else ()), text)
        assert drafter.plan(SessionId(name), text, 2) is not None
    outcomes = drafter.draw([Work(SessionId(name), EPOCH, text, 2) for name, text in ids.items()])
    assert outcomes == [
        Guessed((3, 9)), Guessed(tuple(continued(LANGUAGE, NO_MATCH, 1, likeliest))), Guessed((7, 8)),
    ]  # fmt: skip


# --- catching up, and failures ----------------------------------------------------------------------------------------


class Scripted:
    """Takes what it is given, says what it is told, and remembers it."""

    def __init__(self, kind: str, *, layers: tuple[int, ...] = (), error: Exception | None = None) -> None:
        self.info = DrafterInfo(kind, "", VOCAB, 64, feature_layers=layers)
        self.error, self.caught_up = error, True
        self.heard: list[object] = []

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        self.heard.append(("open", list(ids)))

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        return Plan(count) if self.caught_up else None

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        if self.error is not None:
            raise self.error
        self.heard.append(("draw", [work.count for work in batch]))
        return [Guessed((1,) * min(1, work.count), caught_up=self.caught_up) for work in batch]

    def rewind(self, session_id: SessionId, length: int) -> None:
        self.heard.append(("rewind", length))

    def close(self, session_id: SessionId, keep: bool) -> None:
        self.heard.append(("close", keep))


class Feeling(Scripted):
    """Takes hidden states, too."""

    def take_features(self, features: TargetFeatures) -> None:
        self.heard.append(("features", features.position))


def test_before_anything_is_planned_all_catch_up_and_the_session_is_ready_when_all_have() -> None:
    first, second = Scripted("a"), Scripted("b")
    drafter = Composed([first, second])
    drafter.open(session(), NO_MATCH)
    second.caught_up = False
    assert drafter.draw([Work(S, EPOCH, NO_MATCH, 0)]) == [Guessed(caught_up=False)]
    second.caught_up = True
    assert drafter.draw([Work(S, EPOCH, NO_MATCH, 0)]) == [Guessed()]
    assert first.heard.count(("draw", [0])) == second.heard.count(("draw", [0])) == 2


def test_who_is_behind_while_it_is_asked_catches_up_alone() -> None:
    first, second = Scripted("a"), Scripted("b")
    drafter = Composed([first, second])
    drafter.open(session(), NO_MATCH)
    first.caught_up = False
    assert drafter.plan(S, NO_MATCH, 2) is None
    drafter.draw([Work(S, EPOCH, NO_MATCH, 0)])
    assert ("draw", [0]) in first.heard
    assert ("draw", [0]) not in second.heard


def test_all_are_rewound_and_closed_together() -> None:
    parts = [Scripted("a"), Scripted("b")]
    drafter = Composed(parts)
    drafter.open(session(), NO_MATCH)
    drafter.rewind(S, 3)
    drafter.close(S, keep=True)
    drafter.close(S, keep=True)
    assert [part.heard for part in parts] == [[("open", NO_MATCH), ("rewind", 3), ("close", True)]] * 2


def test_one_that_fails_fails_its_own_sessions_only() -> None:
    broken = Scripted("broken", error=ValueError("no"))
    drafter = Composed([PromptLookup(VOCAB, context_len=64), broken])
    for name, text in (("a", COPIES), ("b", NO_MATCH)):
        drafter.open(session(name), text)
        assert drafter.plan(SessionId(name), text, 2) is not None
    works = [Work(SessionId("a"), EPOCH, COPIES, 2), Work(SessionId("b"), EPOCH, NO_MATCH, 2)]
    copied, failed = drafter.draw(works)
    assert copied == Guessed((3, 9))
    assert isinstance(failed, Failed)
    with pytest.raises(ValueError, match="no"):
        drafter.draw(works[1:])


def test_a_failure_at_catching_up_is_the_sessions() -> None:
    drafter = Composed([Scripted("good"), Scripted("broken", error=ValueError("no"))])
    drafter.open(session(), NO_MATCH)
    [outcome] = drafter.draw([Work(S, EPOCH, NO_MATCH, 0)])
    assert isinstance(outcome, Failed)


def test_hidden_states_go_to_the_one_that_wants_them_if_it_drafts_for_the_session() -> None:
    feeling = Feeling("feature", layers=(-1,))
    drafter = Composed([PromptLookup(VOCAB, context_len=64), feeling])
    features = TargetFeatures(S, EPOCH, 5, Tensor("float32", (1, 1, 1), bytes(4)))
    drafter.take_features(features)
    drafter.open(replace(session(), drafter="prompt_lookup"), NO_MATCH)
    drafter.take_features(features)
    assert feeling.heard == []
    drafter.close(S, keep=False)
    drafter.open(session(), NO_MATCH)
    drafter.take_features(features)
    assert feeling.heard == [("open", NO_MATCH), ("features", 5)]
    assert drafter.info.feature_layers == (-1,)


# --- what it says of itself -------------------------------------------------------------------------------------------


def test_it_is_described_by_its_parts() -> None:
    info = composed().info
    assert (info.kind, info.drafters) == (",".join(KINDS), KINDS)
    assert info.context_len == 1 << 20, "as far as the one that goes furthest"
    assert info.model == toy()[0].info.model


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "one or more"),
        ([Scripted("a"), Scripted("a")], "different kinds"),
        ([Scripted("a"), PromptLookup(VOCAB + 1, context_len=9)], "vocabularies"),
        ([Scripted("a", layers=(-1,)), Scripted("b", layers=(-1,))], "hidden states"),
    ],
    ids=["none", "twice", "vocabularies", "features"],
)
def test_parts_that_do_not_go_together_are_refused(parts: list[Drafter], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Composed(parts)


def test_past_a_drafters_context_another_one_goes_on() -> None:
    model = toy(context_len=64)[0]
    drafter = Composed([PromptLookup(VOCAB, context_len=1 << 20), model])
    ids = [1, 2, 3] * 30
    drafter.open(session(), ids)
    assert guess(drafter, ids, 4)[0] == "prompt_lookup"
    ids = [*ids, 20, 21]
    assert drafter.plan(S, ids, 4) == Plan(0, len(ids) + 2, "no_match")
    alone = Composed([model])
    alone.open(session("alone"), ids)
    assert alone.plan(SessionId("alone"), ids, 4) == Plan(0, FOREVER, "context_full")
