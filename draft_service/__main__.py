"""`python -m draft_service`: run a draft worker until SIGTERM. Exit status as in `outrider.process`."""

import sys

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from outrider.process import run_service


def main() -> int:
    """Run, and return the exit status."""
    return run_service("draft_service", DraftSettings, DraftApp)


if __name__ == "__main__":
    sys.exit(main())
