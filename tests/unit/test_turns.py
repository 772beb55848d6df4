"""Turns of a user that a target is asked to answer, for training."""

import re
from collections import Counter
from pathlib import Path

import pytest

from outrider.cli.drafters.prompts import prompts
from outrider.errors import InvalidRequest
from outrider.prompts import read_prompts
from outrider.training.turns import _lists, turns

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "prompts"
MEASURED_WITH = ("held_out_chat", "chat", "code", "prose", "edit", "translate", "answer", "summarise")
"""Files whose prompts have words."""
RUN = 8
"""Words in a row that no two prompts have by chance."""


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _runs(words: list[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


def test_turns_follow_from_the_seed_and_more_of_them_begin_with_the_same() -> None:
    assert turns(300, 1)[:100] == turns(100, 1)
    assert turns(100, 1) != turns(100, 2)


def test_no_turn_comes_twice_and_no_place_stays_empty() -> None:
    found = turns(20_000, 1)
    assert len(set(found)) == 20_000
    assert not [turn for turn in found if re.search(r"[{}]|\s\s|^\s|\s$", turn)]


def test_every_list_has_a_place_and_no_line_twice() -> None:
    lists = _lists()
    lines = [line for section in ("templates", "endings") for entries in lists[section].values() for line in entries]
    places = {place for line in lines for place in re.findall(r"{(\w+)}", line)}
    assert places - {"number"} == lists["words"].keys()
    assert not [line for line, times in Counter(lines).items() if times > 1]


def test_kinds_of_request_come_equally_often_and_one_in_five_asks_for_a_form() -> None:
    kinds, found = _lists()["templates"], turns(3_200, 1)
    begun = {name: tuple({line.split("{")[0] for line in lines} - {""}) for name, lines in kinds.items()}
    shares = [
        sum(turn.startswith(begun[name]) for turn in found) / len(found) for name in ("compare", "recipe", "rewrite")
    ]
    assert all(0.8 / len(kinds) < share < 1.25 / len(kinds) for share in shares)
    endings = tuple(line for line in _lists()["endings"]["all"] if "{" not in line)
    formed = sum(turn.endswith(endings) for turn in found) / len(found)
    assert 0.12 < formed < 0.25


@pytest.mark.parametrize("name", MEASURED_WITH)
def test_no_turn_has_a_prompt_that_drafts_are_measured_with_nor_eight_words_of_one(name: str) -> None:
    measured = [_words(prompt.text) for prompt in read_prompts(BENCHMARKS / f"{name}.jsonl")]
    runs = {run for words in measured if len(words) > 3 for run in _runs(words, min(RUN, len(words)))}
    lengths = {len(run) for run in runs}
    assert lengths
    assert not [turn for turn in turns(20_000, 1) if any(_runs(_words(turn), length) & runs for length in lengths)]


def test_the_command_writes_a_file_that_a_training_reads(tmp_path: Path) -> None:
    prompts(tmp_path / "asked.jsonl", count=50, seed=3)
    assert [prompt.text for prompt in read_prompts(tmp_path / "asked.jsonl")] == turns(50, 3)


@pytest.mark.parametrize(("name", "count"), [("asked.txt", 5), ("missing/asked.jsonl", 5), ("asked.jsonl", 0)])
def test_a_file_that_cannot_be_and_a_count_out_of_range_are_refused(tmp_path: Path, name: str, count: int) -> None:
    with pytest.raises(InvalidRequest, match=r"file|count"):
        prompts(tmp_path / name, count=count)
