"""Writes results: JSON for machines and a page of Markdown for people, both with the machine they were measured on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def write(name: str, data: Mapping[str, Any], page: str) -> Path:
    """Write `results/NAME.json` and `results/NAME.md`; return the page's path."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
    path = FOLDER / f"{name}.md"
    path.write_text(page, encoding="utf-8")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def facts_list(facts: Mapping[str, str]) -> str:
    """Return the machine's facts as a Markdown list."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())
