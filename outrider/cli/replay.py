"""The command `outrider replay`."""

import subprocess
import sys
from pathlib import Path

from outrider.errors import InvalidRequest

MODULE = "orchestrator.flight.replay"


def replay(*files: Path) -> None:
    """Run records of an orchestrator's flight recorder through its state machine, and say what differs first.

    Args:
        files: Records, as an orchestrator wrote them. Exit status 1 if one comes out another way, 2 if one cannot be
            run.

    Raises:
        InvalidRequest: there is no file.
    """
    if not files:
        raise InvalidRequest("files", "none", "one record, or several")
    # A process of its own: what commands share does not import services.
    sys.exit(subprocess.run([sys.executable, "-m", MODULE, *map(str, files)], check=False).returncode)
