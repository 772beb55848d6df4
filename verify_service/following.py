"""A process that takes part in a verifier's model without serving: every rank but the first.

It has no server, no registry and no sessions; it does what the first one does, until that one dismisses it.
"""

import logging
import os
import signal
import sys

import torch

from outrider.errors import InvalidRequest, OutriderError
from outrider.model.runner import RunnerBroken
from outrider.redaction import redacted
from outrider.telemetry import configure_logging
from verify_service.config import VerifySettings
from verify_service.loading import meet, spec_of

log = logging.getLogger(__name__)


def is_follower() -> bool:
    """Whether `torchrun` started this process beside another one that serves."""
    return os.environ.get("RANK", "0") != "0"


def follow_leader() -> int:
    """Take part until dismissed; return the exit status, as in `outrider.process`; 1 too where the leader is lost."""
    try:
        settings = VerifySettings.load()
    except InvalidRequest as error:
        print(redacted(str(error)), file=sys.stderr)
        return 2
    configure_logging(settings.log_level, settings.log_format)
    # The leader ends its sessions first, and needs this process for that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(settings.threads)
    from outrider.model.opening import follow  # noqa: PLC0415 - as in `load_target`

    try:
        ranks = meet(settings)
        if ranks is not None:
            log.info("rank %d of %d follows", ranks.rank, ranks.size)
            follow(spec_of(settings), ranks, settings.context_len)
    except (OutriderError, RunnerBroken) as error:
        log.critical("the rank ends: %s", error)
        return 2 if isinstance(error, InvalidRequest) else 1
    return 0
