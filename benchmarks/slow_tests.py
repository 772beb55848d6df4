"""Runs the slow tests file by file, which `make test-all` does in one go, and writes how long each file takes.

`python -m benchmarks.slow_tests FILE…` runs these files alone and keeps the other rows of the page.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import machine, results

ROOT = Path(__file__).parents[1]
NAME = "test_all"
HEADER = ("file", "passed", "failed", "skipped", "s", "commit")
SETTINGS = {
    "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"
}  # fmt: skip
"""Those of `make test-all`."""

Row = dict[str, Any]


def main(files: Sequence[str]) -> int:
    """Run files with slow tests, all of them unless some are named; return 1 if a test failed."""
    facts = machine.facts()
    rows = _known()
    for file in files or _files():
        rows[file] = {**_run(file), "commit": facts["commit"]}
        print(f"{file}: {rows[file]}", flush=True)
        rows = dict(sorted(rows.items()))
        results.write(NAME, {"facts": facts, "rows": rows}, _page(facts, rows))
    return int(any(row["failed"] for row in rows.values()))


def _files() -> list[str]:
    """Return the files with slow tests."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "mark.slow" in path.read_text(encoding="utf-8")]


def _known() -> dict[str, Row]:
    """Return the rows of runs before."""
    path = results.FOLDER / f"{NAME}.json"
    rows: dict[str, Row] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    return rows


def _run(file: str) -> Row:
    """Run a file's slow tests; return their counts, and why some were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", f"--junit-xml={report}", file]
        began_s = time.monotonic()
        subprocess.run(command, cwd=ROOT, env={**os.environ, **SETTINGS}, check=False)
        took_s = time.monotonic() - began_s
        return {**_counted(ElementTree.parse(report).getroot()), "s": round(took_s, 1)}


def _counted(report: ElementTree.Element) -> Row:
    """Count what pytest has reported; what fails before or after a test counts as failed."""
    cases = report.findall(".//testcase")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    reasons = {each.attrib["message"] for case in skipped for each in case.findall("skipped")}
    told = {each.replace(sys.executable, "python") for each in reasons}
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "reasons": sorted(told),
    }


def _page(facts: Mapping[str, str], rows: Mapping[str, Row]) -> str:
    """Return the page."""
    shown = [
        (file, row["passed"], row["failed"], row["skipped"], row["s"], row["commit"]) for file, row in rows.items()
    ]
    total = [sum(row[name] for row in rows.values()) for name in ("passed", "failed", "skipped", "s")]
    skips = [f"- {file}: {reason}" for file, row in rows.items() for reason in row["reasons"]]
    others = [f"- {file}" for file in _files() if file not in rows]
    return f"""# The slow tests

What `make test-all` runs beyond `make test`, one file at a time (`python -m benchmarks.slow_tests`); seconds with the
start of pytest, on a machine that others used too.

{results.table(HEADER, [*shown, ("all", *total[:3], round(total[3], 1), "")])}

{_listed("Skipped", skips)}{_listed("Without a row, since they were not run this way yet", others)}## Machine

{results.facts_list(facts)}
"""


def _listed(title: str, lines: Sequence[str]) -> str:
    """Return a list with its title; nothing for an empty one."""
    return "\n".join((f"{title}:\n", *lines, "\n")) if lines else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
