"""How much of a text that is copied may be offered: what the request bans would be rejected for certain.

Non-anticipation holds, because what is copied follows from the ids before it: so does where it is cut.
"""

from collections.abc import Sequence

from draft_service.drafters.protocol import DraftSession
from draft_service.drafters.sampling import Penalised
from outrider.parameters import BAN_BIAS


class Legal:
    """What one session's request allows."""

    def __init__(self, session: DraftSession) -> None:
        """Keep what the request bans.

        Args:
            session: whose it is.
        """
        sampling = session.sampling
        self._allowed = frozenset(sampling.allowed_token_ids)
        self._banned = frozenset(token for token, bias in sampling.logit_bias if bias <= BAN_BIAS)
        self._min_tokens, self._ends = sampling.min_tokens, frozenset(sampling.end_token_ids)
        self._penalised = Penalised(session.prompt_len, session.grammar)
        self._is_free = not (self._allowed or self._banned or self._min_tokens or session.grammar)

    def rewind(self, length: int) -> None:
        """The text at and past `length` is not what it was."""
        self._penalised.rewind(length)

    def num_allowed(self, ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """Return how many of the tokens may follow one another behind a text, up to the first that may not.

        Args:
            ids: the text.
            token_ids: what would be offered.
        """
        if self._is_free:
            return len(token_ids)
        later = self._penalised.at(ids).after(())
        for index, token in enumerate(token_ids):
            if token in self._banned or (self._allowed and token not in self._allowed):
                return index
            if later.num_output < self._min_tokens and token in self._ends:
                return index
            later.advance((token,))
            if later.grammar is not None and later.grammar.is_broken:
                return index
        return len(token_ids)
