"""The standing fault run: `python -m tests.chaos`, or `make chaos`; exit status 1 if anything is wrong."""

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.campaign import Campaign, Run
from tests.chaos.clocks import find_library
from tests.chaos.fleet import Fleet
from tests.chaos.report import write
from tests.chaos.schedule import Kind, plan
from tests.chaos.twins import scripts

LOGS = Path(__file__).resolve().parents[2] / "build" / "chaos"
"""Where the logs of a run that found something are kept."""


def main() -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=300, help="how many (300)")
    parser.add_argument("--first", type=int, default=1, help="number of the fault to begin with (1)")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run's sequence; a fresh one if unset")
    parser.add_argument("--short-only", action="store_true", help="no fault outlives the keepalive of connections")
    parser.add_argument("--forked", action="store_true", help="fork services instead of loading each: faster starts")
    parser.add_argument("--name", default="chaos", help="of the files in benchmarks/results; empty writes none")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    return asyncio.run(_run(options, seed))


async def _run(options: argparse.Namespace, seed: int) -> int:
    library = find_library()
    kinds = [kind for kind in Kind if library is not None or kind is not Kind.CLOCK]
    faults = plan(seed, options.faults, kinds=kinds, long_ones=not options.short_only)
    faults = faults[max(0, options.first - 1) :]
    _say(f"seed {seed}, {len(faults)} faults" + ("" if library else "; clocks cannot be made to jump here"))
    folder = Path(tempfile.mkdtemp(prefix="outrider-chaos-"))
    try:
        async with Fleet(folder, library, forked=options.forked) as fleet:
            run = await Campaign(fleet, scripts(), on_news=_say).play(faults)
    except BaseException:
        _say(f"the run broke off; seed {seed}, logs in {folder}")
        raise
    print(write(options.name, seed, run))
    status = conclude(run, seed, folder, LOGS)
    shutil.rmtree(folder)
    return status


def conclude(run: Run, seed: int, folder: Path, logs: Path) -> int:
    """Return the exit status of a run; keep the logs of one that found something, and say where."""
    if not run.book.violations:
        return 0
    kept = logs / f"seed-{seed}"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept)
    _say(f"FAILED: seed {seed}, {len(run.book.violations)} violations; logs in {kept}")
    return 1


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
