"""`python -m orchestrator`: run an orchestrator until SIGTERM. Exit status as in `outrider.process`."""

import sys

from orchestrator.app import OrchestratorApp
from orchestrator.config import OrchestratorSettings
from outrider.process import run_service


def main() -> int:
    """Run, and return the exit status."""
    return run_service("orchestrator", OrchestratorSettings, OrchestratorApp)


if __name__ == "__main__":
    sys.exit(main())
