"""Figures: every counter equals a recount, made here in another way, of the round log."""

import random
from dataclasses import replace

import pytest

from orchestrator.figures import Meter, Round, in_words, round_of
from outrider.generation import Figures
from outrider.ids import Epoch, Generation, SessionId, TokenKind
from outrider.messages import DraftStatus, Verdict, VerdictCause

ONE = Generation(1, 1)


def verdict(
    kinds: str,
    *,
    tested: int = 0,
    epoch: int = 0,
    ends: bool = False,
    start: int = 10,
    cause: str = VerdictCause.TESTED,
) -> Verdict:
    """Make a verdict from letters: a(ccepted), r(ecovered), b(onus), p(lain)."""
    letters = {"a": TokenKind.ACCEPTED, "r": TokenKind.RECOVERED, "b": TokenKind.BONUS, "p": TokenKind.PLAIN}
    return Verdict(
        SessionId("s"),
        Epoch(ONE, epoch),
        start,
        tuple(range(len(kinds))),
        tuple(letters[letter] for letter in kinds),
        kinds.count("a"),
        tested,
        Epoch(ONE, epoch + ends),
        cause,
        verify_s=0.01,
        queue_s=0.001,
    )


def random_verdicts(source: random.Random, count: int) -> list[Verdict]:
    verdicts, epoch = [], 0
    for _ in range(count):
        accepted = source.randrange(5)
        tail, tested, ends = source.choice([("", accepted, False), ("r", accepted + 1, True), ("b", accepted, True)])
        if source.random() < 0.2:
            verdicts.append(verdict("p", epoch=epoch, ends=True, cause=VerdictCause.PLAIN))
            epoch += 1
            continue
        if source.random() < 0.1:
            verdicts.append(verdict("", epoch=epoch, ends=True, cause=VerdictCause.RESET))
            epoch += 1
            continue
        verdicts.append(verdict("a" * accepted + tail, tested=tested, epoch=epoch, ends=ends))
        epoch += ends
    return verdicts


def test_the_log_has_the_figures_in_words_and_no_more_digits_than_mean_something() -> None:
    figures = Figures(num_rounds=3, tested_per_position=(3, 2), tokens_per_second=31.123456789, drafter="toy")
    assert in_words(figures) == "num_rounds 3, tested_per_position 3 2, tokens_per_second 31.123, drafter toy"


@pytest.mark.parametrize("seed", range(20))
def test_every_counter_equals_a_recount_of_the_round_log(seed: int) -> None:
    """Case 28."""
    verdicts = random_verdicts(random.Random(seed), 60)
    meter = Meter(0.0)
    for index, each in enumerate(verdicts):
        meter.add_round(round_of(each, 0, len(each.token_ids)), 1.0 + index)
    figures = meter.figures(100.0)

    letters = [kind for each in verdicts for kind in each.kinds]
    chains: dict[int, list[bool]] = {}
    for each in verdicts:
        outcomes = [True] * each.num_accepted + [False] * (each.num_tested - each.num_accepted)
        chains.setdefault(each.epoch.round, []).extend(outcomes)
    deepest = max((len(chain) for chain in chains.values()), default=0)
    tested = [sum(len(chain) > place for chain in chains.values()) for place in range(deepest)]
    accepted = [sum(chain[place : place + 1] == [True] for chain in chains.values()) for place in range(deepest)]
    assert figures.num_rounds == sum(bool(each.kinds) for each in verdicts)
    assert figures.num_tested == sum(each.num_tested for each in verdicts) == sum(tested)
    assert figures.num_accepted == letters.count(TokenKind.ACCEPTED) == sum(accepted)
    assert figures.num_plain == letters.count(TokenKind.PLAIN)
    assert figures.num_recovered == letters.count(TokenKind.RECOVERED)
    assert figures.num_bonus == letters.count(TokenKind.BONUS)
    assert list(figures.tested_per_position) == tested
    assert list(figures.accepted_per_position) == accepted
    resets = sum(each.cause == VerdictCause.RESET for each in verdicts)
    assert figures.num_rollbacks == letters.count(TokenKind.RECOVERED) + resets
    assert meter.num_tokens == len(letters)
    assert figures.tokens_per_round == pytest.approx(len(letters) / figures.num_rounds)
    assert all(0 <= a <= t for a, t in zip(figures.accepted_per_position, figures.tested_per_position, strict=True))
    assert figures.verify_s == pytest.approx(0.01 * len(verdicts))


def test_a_run_cut_short_by_the_end_counts_up_to_its_last_token() -> None:
    whole = verdict("aaar", tested=4, ends=True)
    assert round_of(whole, 0, 2).num_tested == round_of(whole, 0, 2).num_accepted == 2
    assert not round_of(whole, 0, 2).rolled_back
    assert round_of(whole, 0, 4).num_tested == 4
    assert round_of(whole, 0, 4).rolled_back


def test_tokens_that_were_known_already_are_not_counted_again() -> None:
    again = round_of(verdict("aar", tested=3, ends=True), 1, 2)
    assert (again.num_accepted, again.num_tested, len(again.kinds)) == (1, 2, 2)


def test_a_proposal_that_was_never_tested_is_drafted_and_not_rejected() -> None:
    meter = Meter(0.0)
    meter.add_round(round_of(verdict("a", tested=1), 0, 1), 1.0)
    assert meter.add_status(ONE, DraftStatus(num_drafted=9, draft_s_per_token=0.5)) == 9
    assert meter.add_status(ONE, DraftStatus(num_drafted=12, draft_s_per_token=0.5)) == 3
    figures = meter.figures(2.0)
    assert (figures.num_drafted, figures.num_tested, figures.num_accepted) == (12, 1, 1)
    assert figures.draft_s == pytest.approx(6.0)


def test_what_verdicts_say_of_their_stream_is_summed_over_all_streams() -> None:
    """Each verdict tells totals of its own stream; the next stream begins at 0."""
    meter, new = Meter(0.0), []
    for opened, num_stale, num_void in ((1, 0, 1), (1, 2, 1), (1, 2, 3), (2, 0, 0), (2, 1, 2), (2, 1, 2)):
        told = replace(verdict("a"), num_stale=num_stale, guarantee_void=num_void)
        new.append(meter.add_totals(Generation(1, opened), told))
    assert new == [1, 0, 2, 0, 2, 0]
    figures = meter.figures(1.0)
    assert (figures.num_stale, figures.guarantee_void) == (3, 5)


def test_kv_that_was_found_is_that_of_the_first_verdict_with_tokens() -> None:
    meter = Meter(0.0)
    for opened, text, num_cached in ((1, "", 0), (1, "a", 64), (1, "a", 64), (2, "a", 128)):
        meter.add_totals(Generation(1, opened), replace(verdict(text), num_cached=num_cached))
    assert meter.num_cached == 64


def test_what_was_tested_since_the_last_report_took_as_long_per_token() -> None:
    meter = Meter(0.0)
    meter.add_status(ONE, DraftStatus(num_drafted=4, draft_s_per_token=0.5))
    meter.add_round(round_of(verdict("aaaaar", tested=6), 0, 6), 1.0)
    figures = meter.figures(2.0)
    assert figures.num_drafted == 6
    assert figures.draft_s == pytest.approx(3.0)


def test_the_block_rules_tests_beyond_the_accepted_ones_are_counted() -> None:
    committed = round_of(verdict("ar", tested=4, ends=True), 0, 2)
    assert (committed.num_tested, committed.num_accepted) == (4, 1)


def test_rounds_of_three_tokens_in_thirty_milliseconds_are_a_hundred_tokens_a_second() -> None:
    """Case 29: time per committed token, not per round."""
    meter = Meter(0.0)
    for index in range(101):
        meter.add_round(round_of(verdict("aar", tested=3, ends=True, epoch=index), 0, 3), 1.0 + 0.03 * index)
    figures = meter.figures(5.0)
    assert figures.tokens_per_second == pytest.approx(100, rel=0.01)
    assert figures.time_to_first_token_s == pytest.approx(1.0)


def test_a_generation_without_tokens_has_figures_of_zero() -> None:
    figures = Meter(3.0).figures(4.0)
    assert (figures.tokens_per_second, figures.tokens_per_round, figures.time_to_first_token_s) == (0, 0, 0)
    assert figures.total_s == 1.0


def test_every_engine_that_verified_is_named() -> None:
    meter = Meter(0.0)
    for fingerprint in ("a", "a", "", "b"):
        meter.add_engine(fingerprint)
    assert meter.figures(1.0).engine_fingerprint == "a -> b"


def test_a_long_chain_is_counted_up_to_the_last_position() -> None:
    meter = Meter(0.0)
    epoch = Epoch(ONE)
    long = Round(epoch, epoch, VerdictCause.TESTED, (TokenKind.ACCEPTED,) * 5000, 5000, 5000, 0.0, 0.0)
    meter.add_round(long, 1.0)
    figures = meter.figures(1.0)
    assert len(figures.tested_per_position) == 4096
    assert sum(figures.tested_per_position) == 5000
