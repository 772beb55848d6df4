"""Mistakes on purpose: what the tests of the law have to reject, or they prove nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from outrider.ids import Mode
from outrider.messages import SparseRow
from outrider.noise import Purpose
from outrider.verification import Draws, Judgement, Rule, rule_for


class ReplacesFromTarget:
    """A rule that draws replacements from the target's row instead of the residual."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def judge(
        self, rows: Tensor, tokens: Sequence[int], draft_rows: Sequence[SparseRow], base_len: int, draws: Draws
    ) -> Judgement:
        """Judge rightly, then replace wrongly."""
        judgement = self._rule.judge(rows, tokens, draft_rows, base_len, draws)
        if judgement.replacement is None:
            return judgement
        num = judgement.num_accepted
        wrong = draws.pick(rows[num].double(), Purpose.REPLACEMENT, base_len + num)
        return Judgement(num, judgement.num_tested, wrong)

    def draw(self, row: Tensor, draws: Draws, position: int) -> int:
        """Draw as the rule does."""
        return self._rule.draw(row, draws, position)


def _faulty(mode: Mode, key: bytes, sample_index: int = 0) -> Rule:
    return ReplacesFromTarget(rule_for(mode, key, sample_index))


@contextmanager
def replacing_from_target() -> Iterator[None]:
    """Give every session that opens inside the faulty rule."""
    with patch("verify_service.sessions.rule_for", _faulty):
        yield
