"""The `outrider` command: `app.py` has the commands, `show.py` what they print."""

from outrider.cli.app import main

__all__ = ["main"]
