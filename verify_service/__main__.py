"""`python -m verify_service`: run a verifier until SIGTERM. Exit status as in `outrider.process`."""

import sys

from outrider.process import run_service
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings


def main() -> int:
    """Run, and return the exit status."""
    return run_service("verify_service", VerifySettings, VerifyApp)


if __name__ == "__main__":
    sys.exit(main())
