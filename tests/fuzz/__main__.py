"""The standing fuzz run: `python -m tests.fuzz`, or `make fuzz`; exit status 1 if anything is wrong."""

import argparse
import asyncio
import secrets
import sys

from tests.e2e.toys import Toys
from tests.fuzz.campaign import Campaign
from tests.fuzz.report import write


def main() -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="messages to send (100000)")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run's calls; a fresh one if unset")
    parser.add_argument("--name", default="fuzz", help="of the files in benchmarks/results; empty writes none")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    return asyncio.run(_run(seed, options.inputs, options.name))


async def _run(seed: int, num_inputs: int, name: str) -> int:
    _say(f"seed {seed}, {num_inputs} inputs")
    async with Toys() as toys:
        run = await Campaign(toys, seed, on_news=_say).play(num_inputs)
    print(write(name, seed, run))
    for violation in run.book.violations:
        _say(f"FAILED, seed {seed}: {violation}")
    return 1 if run.book.violations else 0


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
