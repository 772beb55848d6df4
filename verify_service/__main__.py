"""`python -m verify_service`: run a verifier until SIGTERM. Exit status as in `outrider.process`."""

import sys

from outrider.process import run_service
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings
from verify_service.following import follow_leader, is_follower


def main() -> int:
    """Run, and return the exit status; of several ranks of one model only the first serves."""
    if is_follower():
        return follow_leader()
    return run_service("verify_service", VerifySettings, VerifyApp)


if __name__ == "__main__":
    sys.exit(main())
