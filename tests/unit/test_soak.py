"""A soak finds what it looks for: each check fails on what it is there for, and on nothing else."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.soak.findings import Evidence, findings
from benchmarks.soak.hearing import Heard, difference
from benchmarks.soak.ledger import Ledger, histogram
from benchmarks.soak.script import REAL_SIZES, make_conversations
from benchmarks.soak.watching import thirds
from outrider.generation import Finished
from outrider.ids import FinishReason

TRIED = ("came back", "second turns", "accepted", "recovered", "texts compared, whole", "texts without a twin")
WORKED = {"preempted": 3.0, "kv_reused_tokens": 64.0, "filled_tokens": 64.0, "decode_passes": 9.0}
REST = {"verify-1 outrider_asyncio_tasks": 5.0, "verify-1 threads": 9.0}


def evidence() -> Evidence:
    """A run with nothing wrong."""
    ledger = Ledger(Counter(dict.fromkeys(TRIED, 1)), gaps_s=[0.02, 2.0])
    return Evidence(ledger, {"verify-1": (100.0, 101.0, 102.0)}, REST, REST, 0, 0, WORKED, [], 60.0)


def text(ids: list[int], said: str, reason: FinishReason | None = FinishReason.LENGTH, calls: int = 1) -> Heard:
    finished = None if reason is None else Finished(reason)
    return Heard(token_ids=ids, text=said, logprobs=[-0.5] * len(ids), finished=finished, calls=calls)


TWIN = text([1, 2, 3], "abc")


def test_a_run_with_nothing_wrong_has_no_findings() -> None:
    assert findings(evidence()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"thirds": {"verify-1": (100.0, 101.0, 106.0)}}, "verify-1 grew"),
        ({"rest_after": {**REST, "verify-1 outrider_asyncio_tasks": 6.0}}, "is 6 at rest, and was 5"),
        ({"rest_after": {**REST, "verify-1 threads": 18.0}}, "threads is 18"),
        ({"orphans": 1}, "1 sessions are left in the store"),
        ({"keys_left": 3}, "3 keys"),
        ({"max_gap_s": 1.0}, "2.0 s between two chunks"),
        ({"verifier": {**WORKED, "kv_unbalanced": 1.0}}, "1 kv_unbalanced"),
        ({"verifier": {**WORKED, "preempted": 0.0}}, "preempted is 0"),
        ({"ledger": Ledger(Counter(dict.fromkeys(TRIED, 1)), wrong=["a text differs"])}, "a text differs"),
        ({"ledger": Ledger(Counter(dict.fromkeys(TRIED[1:], 1)))}, "came back is 0"),
        ({"complaints": ["verify-1: ERROR"]}, "ERROR"),
    ],
)
def test_each_check_finds_what_it_is_there_for(change: dict[str, object], words: str) -> None:
    (found,) = findings(replace(evidence(), **change))  # type: ignore[arg-type]
    assert words in found


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        (text([1, 2, 3], "abc"), ""),
        (text([1, 2], "ab", None), ""),
        (text([1, 4], "ad", None), "token 1 of 2"),
        (text([1, 2, 3, 4], "abcd"), "token 3 of 4"),
        (text([1, 2], "ab"), "2 tokens"),
        (text([1, 2, 3], "abc", FinishReason.STOP), "STOP"),
        (text([1, 2, 3], "abd"), "text 'abd'"),
        (text([1, 2], "x", None), "does not begin"),
        (replace(TWIN, logprobs=[-0.5, -0.5, -0.4]), "log-probabilities"),
        (replace(TWIN, logprobs=[-0.5], calls=2), ""),
    ],
)
def test_a_text_differs_from_its_twin_or_does_not(heard: Heard, words: str) -> None:
    parting = difference(heard, TWIN)
    assert words in parting
    assert bool(parting) is bool(words)


def test_memory_is_compared_by_the_medians_of_thirds_after_the_warm_up() -> None:
    samples = [(float(at), size) for at, size in enumerate([50, 50, 100, 100, 900, 200, 200, 300, 300])]
    assert thirds(samples, 0.2) == (100, 550, 300)
    with pytest.raises(ValueError, match="thirds"):
        thirds(samples[:2], 0.5)


def test_every_gap_is_in_one_bin() -> None:
    bins = dict(histogram([0.005, 0.01, 0.02, 29.0, 31.0]))
    assert (bins["≤ 0.01 s"], bins["≤ 0.03 s"], bins["≤ 30 s"], bins["> 30 s"]) == (2, 1, 1, 1)
    assert sum(bins.values()) == 5


def test_conversations_depend_on_the_seed_alone_and_are_of_every_kind() -> None:
    conversations = make_conversations(28, REAL_SIZES, 5)
    assert conversations == make_conversations(28, REAL_SIZES, 5) != make_conversations(28, REAL_SIZES, 6)
    assert sum(len(each.turns) == 2 for each in conversations) > 7
    assert {each.has_twins for each in conversations} == {True, False}
    turns = [turn for each in conversations for turn in each.turns]
    assert {bool(turn.stop) for turn in turns} == {turn.ignore_eos for turn in turns} == {True, False}
