"""What the command line says of two answers to one request."""

import io

from rich.console import Console

from outrider.cli.show import Answer, comparison
from outrider.generation import Chunk, Figures, Finished
from outrider.ids import FinishReason


def answer(token_ids: tuple[int, ...], tokens_per_second: float) -> Answer:
    made = Answer(Console(file=io.StringIO()), quiet=True)
    made.take(Chunk(0, token_ids, "".join(map(chr, token_ids))))
    made.take(Finished(FinishReason.LENGTH, figures=Figures(tokens_per_second=tokens_per_second)))
    return made


def said(*answers: Answer, repeatable: bool) -> str:
    return "\n".join(line.plain for line in comparison(*answers, repeatable=repeatable))


def test_equal_texts_and_the_ratio_of_their_speeds_are_stated() -> None:
    lines = said(answer((65, 66), 30.0), answer((65, 66), 20.0), repeatable=True)
    assert "speed: 1.50 times the twin's" in lines
    assert "the texts are equal" in lines


def test_different_texts_of_a_repeatable_request_are_an_alarm() -> None:
    lines = said(answer((65, 66), 30.0), answer((65, 67), 20.0), repeatable=True)
    assert "the texts differ" in lines


def test_unseeded_texts_are_not_compared_and_one_token_has_no_speed() -> None:
    lines = said(answer((65,), 0.0), answer((66,), 0.0), repeatable=False)
    assert "too short to compare" in lines
    assert "need not be equal" in lines
    assert "differ" not in lines
