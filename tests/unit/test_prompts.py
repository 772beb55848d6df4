"""Files of prompts, and what is said of bad lines."""

from pathlib import Path

import pytest

from outrider.errors import InvalidRequest
from outrider.generation import ChatMessage, ChatPrompt, TextPrompt
from outrider.prompts import read_prompts

PACKAGED = sorted((Path(__file__).parents[2] / "benchmarks" / "prompts").glob("*.jsonl"))


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: path.stem)
def test_the_prompts_of_the_benchmarks_can_be_read(path: Path) -> None:
    prompts = read_prompts(path)
    assert [prompt.name for prompt in prompts] == [f"{path.stem}-{number}" for number in range(1, len(prompts) + 1)]
    assert all(prompt.text and prompt.kind == path.stem for prompt in prompts)


def test_json_lines_may_refer_to_documents_and_be_continued_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "letter.txt").write_text("Dear Sir\n", encoding="utf-8")
    lines = '{"text": "Correct this.", "document": "letter"}\n\n{"text": "Once", "raw": true, "demo": true}\n'
    first, second = read_prompts(_file(tmp_path, "a.jsonl", lines))
    assert first.asked == ChatPrompt((ChatMessage("user", "Correct this.\n\nDear Sir"),))
    assert second.asked == TextPrompt("Once")
    assert second.name == "a-3"
    assert (first.demo, second.demo) == (False, True)


def test_other_files_have_a_text_a_line(tmp_path: Path) -> None:
    prompts = read_prompts(_file(tmp_path, "a.txt", 'Hello\n\n  {"text": 1}  \nGrüße\n'))
    assert [prompt.text for prompt in prompts] == ["Hello", '{"text": 1}', "Grüße"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "JSON"),
        ("[]", 'an object with a "text"'),
        ("{}", 'an object with a "text"'),
        ('{"text": ""}', 'an object with a "text"'),
        ('{"text": 3}', "'text' to be a text"),
        ('{"text": "a", "raw": 1}', "'raw' to be a true or false"),
        ('{"text": "a", "txet": "b"}', "'txet'"),
        ('{"text": "a", "document": "none"}', "not 'none'"),
        ('{"text": "a", "document": "../a"}', "not '../a'"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_prompts(_file(tmp_path, "a.jsonl", f'{{"text": "good"}}\n{line}\n'))
    assert caught.value.field == "prompts"
    assert "a.jsonl, line 2" in caught.value.message
    assert words in caught.value.message


def test_files_without_prompts_and_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least one prompt"):
        read_prompts(_file(tmp_path, "a.txt", "\n \n"))
    with pytest.raises(InvalidRequest, match="can be read"):
        read_prompts(tmp_path / "missing.txt")
    (tmp_path / "b.txt").write_bytes(b"a\xff")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_prompts(tmp_path / "b.txt")
