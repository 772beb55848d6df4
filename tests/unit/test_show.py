"""What the command line says of two answers to one request."""

import asyncio
import io

import pytest
from rich.console import Console

from outrider.cli.local import stages
from outrider.cli.running import go
from outrider.cli.show import Answer, comparison, figures_table
from outrider.generation import Chunk, Figures, Finished, Notice, Usage
from outrider.ids import FinishReason


def answer(token_ids: tuple[int, ...], tokens_per_second: float) -> Answer:
    made = Answer(Console(file=io.StringIO()), Console(file=io.StringIO()), quiet=True)
    made.take(Chunk(0, token_ids, "".join(map(chr, token_ids))))
    made.take(Finished(FinishReason.LENGTH, figures=Figures(tokens_per_second=tokens_per_second)))
    return made


def said(*answers: Answer, repeatable: bool) -> str:
    return "\n".join(line.plain for line in comparison(*answers, repeatable=repeatable))


def test_the_answer_alone_goes_to_its_console_as_it_is_and_notices_to_the_other() -> None:
    text, notes = io.StringIO(), io.StringIO()
    made = Answer(Console(file=text, force_terminal=False), Console(file=notes, force_terminal=False))
    for event in (Chunk(0, (1,), "all:\n\ttrue"), Notice("drafter_lost", "it is gone"), Chunk(1, (2,), " [b]")):
        made.take(event)
    assert text.getvalue() == "all:\n\ttrue [b]"
    assert notes.getvalue() == "\n[drafter_lost] it is gone\n"


def test_progress_leaves_nothing_in_a_file() -> None:
    written = io.StringIO()
    with stages(Console(file=written, force_terminal=False)) as shown:
        shown.waiting("verify-1")
        shown.done()
    assert written.getvalue() == ""


def test_how_a_command_was_ended_is_no_part_of_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    for error, said, status in ((KeyboardInterrupt, "interrupted", 130), (asyncio.CancelledError, "terminated", 143)):

        async def ended(error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(SystemExit) as left:
            go(ended())
        assert left.value.code == status
        assert capsys.readouterr() == ("", f"\n{said}\n")


@pytest.mark.parametrize(("plain", "said"), [(150, None), (88, "88 of them, those after it was resumed")])
def test_figures_of_a_part_of_the_tokens_are_said_to_be(plain: int, said: str | None) -> None:
    table = figures_table(Finished(FinishReason.LENGTH, usage=Usage(5, 150), figures=Figures(num_plain=plain)))
    assert dict(zip(*(column.cells for column in table.columns), strict=True)).get("measured") == said


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
