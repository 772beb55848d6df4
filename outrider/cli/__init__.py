"""The `outrider` command: `app.py` has the commands, `show.py` what they print."""

import sys


def main() -> None:
    """Run the command line; `outrider health` without loading what the other commands need."""
    if sys.argv[1:2] == ["health"]:
        from outrider.cli.health import main as health  # noqa: PLC0415 - see there

        health(sys.argv[2:])
    else:
        from outrider.cli.app import main as command  # noqa: PLC0415 - takes most of a second

        command()


__all__ = ["main"]
