"""The output law of the whole protocol equals the target's, by exact enumeration of the real machines and rules.

Nothing is sampled: every outcome of every draw is played (`enumeration`), so there is no seed and no false alarm. Along
each path every use of a keyed draw is recorded, and none may repeat (`protocol_play.CountedSource`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import orchestrator.rounds as rounds_module
from draft_service import events as draft
from draft_service.window import Window
from outrider.ids import Epoch, Mode, TokenKind
from outrider.messages import DraftCommit, Proposal, ProposeMessage, SamplingParams, SparseRow, Speculation
from outrider.noise import Purpose
from outrider.sampling import one_hot_row, sparse_row
from outrider.verification.rejection import draft_prob
from tests.exactness.enumeration import EnumeratingSource, enumerate_law, sequential_law, total_variation
from tests.exactness.protocol_play import PROMPT_LEN, CountedSource, Play, Tables
from tests.exactness.toy import VOCAB, Toy
from tests.protocol.parts import PROMPT
from verify_service import events as verify
from verify_service.chain import Chain

EXACT = 1e-12
CAUGHT = 1e-3
BOTH = pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK], ids=["token rule", "block rule"])


@cache
def target_row(prefix: tuple[int, ...]) -> Tensor:
    return torch.tensor(Toy(1).next_probs(prefix, SamplingParams()), dtype=torch.float64)


@cache
def draft_row(prefix: tuple[int, ...]) -> SparseRow:
    return sparse_row(torch.tensor(Toy(2).next_probs(prefix, SamplingParams()), dtype=torch.float64))


def guessed_row(prefix: tuple[int, ...]) -> SparseRow:
    """A token that is proposed without drawing it."""
    return one_hot_row((sum(prefix) + len(prefix)) % VOCAB)


DRAWN, GUESSED = Tables(target_row, draft_row), Tables(target_row, guessed_row)
SEQUENTIAL, PIPELINED, PIPELINED_2 = Speculation(2, 2, 2), Speculation(1, 1, 2), Speculation(2, 1, 4)


def distance(play: Play) -> float:
    """Return the total variation between what is generated and what the target says."""
    law = sequential_law(lambda prefix: play.tables.target(PROMPT + prefix).tolist(), play.length)
    return total_variation(enumerate_law(play), law)


SCHEDULES = {
    "sequential with bonus": ("|dppvc", SEQUENTIAL, {"bonus", "recovered", "accepted"}),
    "proposals in flight": ("|ddppvdppvc", PIPELINED, {"held", "stale"}),
    "two proposals in one pass": ("|ddppppvc", PIPELINED, {"wasted"}),
    "longer proposals in flight": ("|dppdvcpp", PIPELINED_2, {"wasted", "stale"}),
    "held row before the pass": ("|dppvdppdppvc", Speculation(1, 1, 4), {"held"}),
    "plain step in between": ("ddppvtvc|ddppvcvc", PIPELINED, {"patience", "plain"}),
    "patience before anything arrives": ("dvtv|ppcddppvc", PIPELINED, {"patience", "stale"}),
    "drafter swapped in mid-flight": ("ddppvs|vccdppvc", PIPELINED, {"attached", "stale"}),
    "verifier lost in mid-flight": ("dppvcdppvr|ddppvc", PIPELINED, {"verifier lost"}),
    "verifier lost in mid-pass": ("dppvdppdppw|ddppvc", Speculation(1, 1, 4), {"verifier lost", "held"}),
    "pass": ("dppvcnpv|cdppvc", PIPELINED, {"plain"}),
    "reset by a broken stream": ("ddppvdx|vccdppvc", PIPELINED, {"reset"}),
    "reset on a gap": ("ddggpp|vccdppvc", PIPELINED, {"gap", "reset"}),
    "hints in sequential rounds": ("|dppvhdppvhccv", SEQUENTIAL, {"taken_hint", "recovered", "bonus"}),
    "hints before commits": ("|dppvhdcdppvc", PIPELINED_2, {"taken_hint", "recovered", "held"}),
    "hints while drafting in flight": ("|ddppvhdppvc", PIPELINED, {"taken_hint", "held", "stale"}),
    "hints behind commits": ("|ddppvcchdppv", PIPELINED, {"late_hint", "recovered"}),
    "a hint behind two lost ones": ("tvtvHHhcc|ddppvhc", PIPELINED, {"patience", "taken_hint", "held"}),
    "a hint that skips one": ("tvtvtvHhccc|ddppvhc", PIPELINED, {"odd_hint", "patience", "recovered"}),
    "hint of a reset": ("ddggpphdpp|vccdhppvc", PIPELINED, {"gap", "reset", "taken_hint"}),
    "a pass ahead of every proposal": ("|addppac", PIPELINED, {"ahead", "held", "recovered"}),
    "a pass ahead in sequential rounds": ("|advppacc", SEQUENTIAL, {"ahead", "held", "accepted", "recovered"}),
    "a pass ahead inside a chain": ("|adpavdppvc", PIPELINED, {"ahead", "held"}),
    "runs cut to a plan that runs ahead": ("|addppavc", Speculation(2, 2, 4, ahead=True), {"ahead", "held"}),
    "one row a pass, ahead": ("|addppac", Speculation(1, 1, 2, ahead=True), {"ahead", "held", "accepted", "recovered"}),
    "patience behind a pass ahead": ("atv|vccddppac", PIPELINED_2, {"ahead", "patience", "held"}),
    "verifier lost behind a pass ahead": ("adppar|dppac", PIPELINED, {"ahead", "verifier lost"}),
    "hints, and a verifier lost": ("dppvhdppr|dppvhc", PIPELINED, {"taken_hint", "verifier lost"}),
}
"""Moves, window, and what must be seen to happen on some path."""


@BOTH
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_law_is_the_targets(name: str, mode: Mode) -> None:
    schedule, speculation, witnesses = SCHEDULES[name]
    play = Play(DRAWN, schedule, mode, speculation)
    assert distance(play) < EXACT
    assert witnesses <= play.witnesses


@BOTH
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_law_is_the_targets_when_tokens_are_guessed_and_not_drawn(name: str, mode: Mode) -> None:
    schedule, speculation, _ = SCHEDULES[name]
    assert distance(Play(GUESSED, schedule, mode, speculation, length=4)) < EXACT


TREES = {
    "one after the other": ("|dppvc", SEQUENTIAL, {"bonus", "recovered", "accepted", "tree"}),
    "patience before anything arrives": ("dvtv|ppcdppvc", SEQUENTIAL, {"patience", "stale", "tree"}),
    "drafter swapped in mid-flight": ("dppvs|vccdppvc", SEQUENTIAL, {"attached", "tree"}),
    "verifier lost in mid-pass": ("dppvcdppw|dppvc", SEQUENTIAL, {"verifier lost", "tree"}),
    "hints in sequential rounds": ("|dppvhdppvhccv", SEQUENTIAL, {"taken_hint", "odd_hint", "tree"}),
}
"""Schedules for trees."""
BUSH = (-1, -1, 0)


@cache
def short_row(prefix: tuple[int, ...]) -> SparseRow:
    """Two of the three tokens: what is enumerated grows with all orders in which siblings can be drawn."""
    kept = draft_row(prefix).token_ids[:2] if sum(prefix) % 2 else draft_row(prefix).token_ids[1:]
    return SparseRow(kept, (40_000, 25_536))


SHORT = Tables(target_row, short_row)


@pytest.mark.parametrize("tables", [SHORT, GUESSED], ids=["drawn", "named"])
@pytest.mark.parametrize("name", TREES)
def test_the_law_of_trees_is_the_targets(name: str, tables: Tables) -> None:
    schedule, speculation, witnesses = TREES[name]
    # Two tokens leave room for one level only; what they are for does not depend on more.
    length = 2 if name == "verifier lost in mid-pass" else 3
    play = Play(tables, schedule, Mode.REJECTION, speculation, length, tree=BUSH)
    assert distance(play) < EXACT
    assert witnesses <= play.witnesses or tables is GUESSED


def test_a_target_that_runs_no_trees_has_its_own_law() -> None:
    class Straight(Chain):
        """Runs chains alone."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args, trees=False)

    play = Play(SHORT, "|dppvc", Mode.REJECTION, SEQUENTIAL, tree=BUSH, chain=Straight)
    assert distance(play) < EXACT
    assert "path" in play.witnesses


@BOTH
def test_the_law_of_four_tokens_is_the_targets(mode: Mode) -> None:
    assert distance(Play(DRAWN, "|dppdppvc", mode, PIPELINED, length=4)) < EXACT


@BOTH
def test_a_drafter_that_drafts_past_the_end_changes_nothing(mode: Mode) -> None:
    play = Play(DRAWN, "|dppvc", mode, SEQUENTIAL, length=2, drafts_to_the_end=False)
    assert distance(play) < EXACT


@BOTH
@pytest.mark.parametrize("speculation", [SEQUENTIAL, Speculation(2, 2, 4)], ids=["sequential", "pipelined"])
def test_a_commit_limit_that_cuts_proposals_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, speculation: Speculation
) -> None:
    monkeypatch.setattr(rounds_module, "MAX_AHEAD_OF_LOG", 1)
    monkeypatch.setattr(rounds_module, "PROGRESS_STRIDE", 1)
    assert distance(Play(DRAWN, "|dppvcl", mode, speculation)) < EXACT


class DraftsAgainOnAConfirmation(Window):
    """Draws its chain once more, with the same keys, when the commit that it was hinted arrives."""

    def _confirm(self, commit: DraftCommit, fresh: Sequence[int], out: list[draft.Command]) -> None:
        hinted = self._confirmed_epoch < self.epoch == commit.epoch
        super()._confirm(commit, fresh, out)
        if hinted:
            self._restart(self.epoch, self.seen_len, (), out)


def test_a_chain_drawn_again_when_its_hint_is_confirmed_is_caught() -> None:
    schedule, speculation, _ = SCHEDULES["hints before commits"]
    with pytest.raises(AssertionError, match="drawn twice"):
        distance(Play(DRAWN, schedule, Mode.REJECTION, speculation, window=DraftsAgainOnAConfirmation))


# --- planted mistakes -----------------------------------------------------------------------------------------------


class WaitsForNoBody(Chain):
    """Lets patience run out although a proposal has been announced."""

    def _draw_kind(self) -> TokenKind | None:
        return self._as_if_unannounced(super()._draw_kind)

    def _wait(self, out: list[verify.Command]) -> None:
        self._as_if_unannounced(lambda: super(WaitsForNoBody, self)._wait(out))

    def _as_if_unannounced(self, ask: Callable[[], TokenKind | None]) -> TokenKind | None:
        header, self._waiting.header = self._waiting.header, None
        kind = ask()
        self._waiting.header = header
        return kind


@pytest.mark.parametrize("machine", [Chain, WaitsForNoBody])
def test_lateness_that_depends_on_the_token_is_harmless_only_if_the_body_is_waited_for(machine: type[Chain]) -> None:
    row, drawn = torch.tensor([0.25, 0.75], dtype=torch.float64), SparseRow((0, 1), (1 << 14, 3 << 14))
    tables = Tables(lambda prefix: row, lambda prefix: drawn, vocab_len=2)

    def is_no_end(message: ProposeMessage) -> bool:
        return isinstance(message, Proposal) and message.token_ids[0] != 0

    play = Play(tables, "|dpptvpvc", length=1, chain=machine, late=is_no_end)
    probs = (1 / 4, 3 / 4) if machine is Chain else (7 / 16, 9 / 16)
    assert enumerate_law(play) == {(token,): pytest.approx(prob) for token, prob in enumerate(probs)}


class TestsAfterABonus(Chain):
    """Draws a bonus though more is coming, and then tests what was coming at the same position."""

    __test__ = False
    _bonus: int | None = None
    _bonus_len = -1

    def _nothing_follows(self) -> bool:
        self._bonus_len = self.committed_len + 1
        return True

    def _arrived(self, event: verify.Arrived, out: list[verify.Command]) -> None:
        message = event.message
        if isinstance(message, Proposal) and message.base_len + 1 == self.committed_len == self._bonus_len:
            self._bonus = self.tokens.pop()
            self._waiting.add(replace(message, token_ids=message.token_ids[:1], rows=message.rows[:1]))
        else:
            super()._arrived(event, out)

    def _judged(self, event: verify.Judged, out: list[verify.Command]) -> None:
        if self._bonus is not None and event.drawn is not None:
            event = replace(event, drawn=self._bonus)
        self._bonus = None
        super()._judged(event, out)


@BOTH
def test_a_token_tested_at_the_position_of_a_bonus_is_caught(mode: Mode) -> None:
    play = Play(DRAWN, "ddppvpvpv|cdppvc", mode, PIPELINED, reads_chain=True)
    assert distance(play) < EXACT
    assert distance(replace(play, chain=TestsAfterABonus)) > CAUGHT


def test_a_stop_decided_after_looking_is_caught() -> None:
    def before_the_first_unlikely(proposal: Proposal) -> int:
        likely = [draft_prob(row, token) >= 0.4 for row, token in zip(proposal.rows, proposal.token_ids, strict=True)]
        return likely.index(False) if False in likely else len(likely)

    play = Play(DRAWN, "|dppvtvc", Mode.REJECTION, SEQUENTIAL)
    assert distance(play) < EXACT
    assert distance(replace(play, cut=before_the_first_unlikely)) > CAUGHT


class ReportsAcceptedTokensLater(Chain):
    """Keeps a token that was accepted on a held row back until the next pass is over, but not a rejection."""

    def _judged(self, event: verify.Judged, out: list[verify.Command]) -> None:
        test = self._testing
        super()._judged(event, out)
        self._unreported.rides = test is not None and test.from_held and not test.feed


def test_a_loss_that_takes_accepted_tokens_and_leaves_rejected_ones_is_caught() -> None:
    schedule, speculation, _ = SCHEDULES["verifier lost in mid-pass"]
    play = Play(DRAWN, schedule, Mode.REJECTION, speculation)
    assert distance(replace(play, chain=ReportsAcceptedTokensLater)) > CAUGHT


def test_a_draw_that_repeats_its_key_is_caught() -> None:
    source = CountedSource(EnumeratingSource(), Epoch())
    source.accept(0.5, 1.0, PROMPT_LEN)
    source.accept(0.5, 1.0, PROMPT_LEN + 1)
    source.use(Purpose.DRAFT, PROMPT_LEN, Epoch())
    source.epoch = source.epoch.next_round()
    source.accept(0.5, 1.0, PROMPT_LEN)
    with pytest.raises(AssertionError, match="drawn twice"):
        source.accept(0.5, 1.0, PROMPT_LEN)
