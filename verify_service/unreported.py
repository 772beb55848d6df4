"""What of a chain is committed and has not been reported yet."""

from collections.abc import Sequence

from outrider.ids import Epoch, TokenKind
from verify_service.events import Report


class Unreported:
    """Kinds of the tokens at the chain's end that no verdict has named, and how many were tested for them."""

    def __init__(self, length: int) -> None:
        """Have nothing; `length` tokens are known to all."""
        self.reported_len = length
        """Committed length that drafter and orchestrator can have been told of."""
        self.rides = False
        """Whether it had better wait for the verdict of the next pass."""
        self._kinds: list[TokenKind] = []
        self._num_tested = 0

    def __bool__(self) -> bool:
        """Whether there is a token to be reported."""
        return bool(self._kinds)

    def tested(self, num_accepted: int, num_tested: int) -> None:
        """Tokens were tested, and some of them committed."""
        self._kinds.extend([TokenKind.ACCEPTED] * num_accepted)
        self._num_tested += num_tested

    def drawn(self, kind: TokenKind) -> None:
        """The verifier committed a token of its own."""
        self._kinds.append(kind)

    def report(self, tokens: Sequence[int], tested_epoch: Epoch, next_epoch: Epoch, cause: str) -> Report:
        """Return the report of all there is, which is nothing new for anybody from now on.

        Args:
            tokens: all committed ones.
            tested_epoch: in which they were tested.
            next_epoch: which goes on, or begins.
            cause: of `VerdictCause`.
        """
        kinds, start = tuple(self._kinds), len(tokens) - len(self._kinds)
        accepted, tested = kinds.count(TokenKind.ACCEPTED), self._num_tested
        self._kinds.clear()
        self._num_tested, self.rides, self.reported_len = 0, False, len(tokens)
        return Report(tested_epoch, start, tuple(tokens[start:]), kinds, accepted, tested, next_epoch, cause)
