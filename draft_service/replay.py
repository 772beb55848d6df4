"""Replays a session that is over with a drafter, in sequential rounds, as a live session would have had them.

The drafter is asked for a proposal at the end of the text so far, which is compared with what the text says next: up
to the first token that differs it would have been accepted, and the differing one is what the verifier drew itself.
Then the round after that. So the drafter sees exactly the texts that it would have seen live: it is driven through the
same protocol, and nothing is sampled from places at which no round begins.

What that says depends on the session. Greedy texts, and texts of a known seed, are the same whatever was drafted, and
so are the tests: the figures are those of the live session. An unseeded text is one draw of the target's. Its next
token agrees with a draft's draw with probability sum(draft x target), which is at most the sum(min(draft, target)) of
rejection sampling, and with a copied token with just the probability that rejection sampling accepts it with.
"""

import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from draft_service.drafters.protocol import Drafter, DraftSession, Failed, Work
from outrider.errors import Internal
from outrider.ids import Epoch, Generation, SessionId
from outrider.shadowing import Logged, Shadowed

MAX_CATCHING_UP = 10_000
"""Steps after which a drafter that still catches up is given up."""

Tell = Callable[[int], None]
"""Told the length of the text before each round: what of it the target has computed is one token less."""


def replay(drafter: Drafter, session: Logged, gamma: int, max_tokens: int, tell: Tell = lambda _: None) -> Shadowed:
    """Draft for a session from its prompt on.

    Args:
        drafter: with no session of that name open.
        session: the session; its ids are of the drafter's vocabulary.
        gamma: tokens per proposal, >= 1.
        max_tokens: most tokens of its text that are replayed, >= 1.
        tell: told the length of the text before each round.

    Raises:
        Internal: the drafter failed.
    """
    replaying = _Replaying(drafter, session, gamma, tell)
    try:
        replaying.run(min(len(session.token_ids), session.prompt_len + max_tokens))
    finally:
        drafter.close(SessionId(session.session_id), keep=False)
    return replaying.result()


class _Replaying:
    """One replay."""

    def __init__(self, drafter: Drafter, session: Logged, gamma: int, tell: Tell) -> None:
        self._drafter, self._session, self._gamma, self._tell = drafter, session, gamma, tell
        self._name = SessionId(session.session_id)
        self._epoch = Epoch(Generation(1, 1))
        self._tested = [0] * gamma
        self._accepted = [0] * gamma
        self._rounds = self._undrafted = self._drafted = 0
        self._tokens = 0
        self._draft_s = 0.0

    def run(self, end: int) -> None:
        """Go through the text up to `end`."""
        session = self._session
        described = DraftSession(
            self._name, session.drafted_as, session.sampling, session.draft_key, session.prompt_len,
            session.sample_index,
        )  # fmt: skip
        length = session.prompt_len
        self._drafter.open(described, session.token_ids[:length])
        while length < end:
            self._tell(length)
            length += self._round(session.token_ids[:length], session.token_ids[length:end])
            self._epoch = self._epoch.next_round()
        self._tokens = end - session.prompt_len

    def result(self) -> Shadowed:
        """Return the counts; positions that were never tested are left out."""
        known = len(list(takewhile(bool, self._tested)))
        return Shadowed(
            self._name, self._session.exact, tuple(self._tested[:known]), tuple(self._accepted[:known]), self._tokens,
            self._rounds, self._undrafted, self._drafted, self._draft_s,
        )  # fmt: skip

    def _round(self, text: Sequence[int], said: Sequence[int]) -> int:
        """Draft at the end of the text; return how many of the tokens it went on with the round would have yielded."""
        num, until = self._plan(text)
        if not num:
            alone = min(len(said), max(1, until - len(text)))
            self._undrafted += alone
            self._rounds += alone
            return alone
        chain = self._draw(text, num)
        agreed = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chain, said, strict=False))))
        self._count(agreed, min(len(chain), len(said)))
        self._drafter.rewind(self._name, len(text) + agreed)
        return min(len(said), agreed + 1)

    def _count(self, agreed: int, comparable: int) -> None:
        """Count a round in which so many tokens of those that the text says anything of were right."""
        self._rounds += 1
        for place in range(min(agreed + 1, comparable)):
            self._tested[place] += 1
            self._accepted[place] += place < agreed

    def _plan(self, text: Sequence[int]) -> tuple[int, int]:
        """Return how many tokens are offered and, if none, before which position; reading the text costs no time."""
        for _ in range(MAX_CATCHING_UP):
            started_s = time.perf_counter()
            plan = self._drafter.plan(self._name, text, self._gamma)
            if plan is not None:
                self._draft_s += time.perf_counter() - started_s
                return plan.count, plan.until_len
            self._step(text, 0)
        raise Internal(f"the drafter did not catch up with {len(text)} tokens in {MAX_CATCHING_UP} steps")

    def _draw(self, text: Sequence[int], num: int) -> list[int]:
        """Return a whole proposal."""
        chain: list[int] = []
        started_s = time.perf_counter()
        for _ in range(MAX_CATCHING_UP):
            chain += self._step([*text, *chain], num - len(chain))
            if len(chain) == num:
                self._drafted += num
                self._draft_s += time.perf_counter() - started_s
                return chain
        raise Internal(f"the drafter did not draw {num} tokens in {MAX_CATCHING_UP} steps")

    def _step(self, text: Sequence[int], count: int) -> tuple[int, ...]:
        [outcome] = self._drafter.draw([Work(self._name, self._epoch, text, count)])
        if isinstance(outcome, Failed):
            raise Internal(f"the drafter failed: {outcome.error!r}") from outcome.error
        return outcome.token_ids
