"""How a call ends whose handler raised something."""

import logging

import grpc
from grpc_status import rpc_status

from outrider.errors import Code, Internal, OutriderError, ProtocolError, code_of
from outrider.sparing import Sparing
from outrider.status import status_of

logger = logging.getLogger(__name__)


class Conclusion:
    """Makes statuses of what handlers raise, and logs what is no ordinary answer."""

    def __init__(self) -> None:
        """Have logged nothing yet."""
        self._sparing = Sparing()

    def status(self, method: str, error: Exception) -> grpc.Status:
        """Return the status that tells of an error. `CancelledError` is no `Exception` and never comes here.

        The error has no traceback afterwards.
        """
        status = rpc_status.to_status(status_of(self._told(method, error)))
        _forget_frames(error)
        return status  # type: ignore[no-any-return]

    def _told(self, method: str, error: Exception) -> OutriderError:
        """Return what the caller is told, and log what is a defect or a broken protocol."""
        known = _known(error)
        if known is None:
            logger.error("%s failed", method, exc_info=error)
            return Internal("an unexpected error; the server's log has its cause")
        if isinstance(known, ProtocolError):
            if self._sparing.allows(method):
                logger.warning("%s ends, for its caller breaks the protocol: %s", method, known)
        elif code_of(known) is Code.INTERNAL:
            logger.error("%s failed: %s", method, known)
        return known


def _forget_frames(error: BaseException) -> None:
    """Take the frames out of an error that is done with, and out of those that it came of.

    A frame that raises what one of its variables holds is a cycle, and keeps all its other variables with it.
    """
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        rest += [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]


def _known(error: Exception) -> OutriderError | None:
    """Return the error of ours that explains a failure; a group does only if it holds nothing else."""
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, ExceptionGroup):
        leaves = [_known(leaf) for leaf in error.exceptions]
        return leaves[0] if all(leaf is not None for leaf in leaves) else None
    return None
