"""Which draft tokens are accepted, and what replaces the first that is not: one file per rule, pure.

Read `rule.py` first; the mathematics is in each rule's own file. A caller does:

    rule = rule_for(mode, key, sample_index)
    rows = target_rows(logits, mode, params, vocab_len, history, tokens)
    judgement = rule.judge(rows, tokens, draft_rows, base_len, KeyedDraws(key, epoch))

For a tree of proposals, `judge_tree` takes the place of the last line.
"""

from typing import assert_never

from outrider.ids import Mode
from outrider.noise import Purpose, derive_key
from outrider.verification.block import BlockRule
from outrider.verification.coupled import CoupledRule
from outrider.verification.greedy import GreedyRule
from outrider.verification.rejection import TokenRule
from outrider.verification.rule import Draws, Judgement, KeyedDraws, Rule
from outrider.verification.tree import Tree, TreeJudgement, judge_tree

__all__ = [
    "BlockRule",
    "CoupledRule",
    "Draws",
    "GreedyRule",
    "Judgement",
    "KeyedDraws",
    "Rule",
    "TokenRule",
    "Tree",
    "TreeJudgement",
    "judge_tree",
    "rule_for",
]


def rule_for(mode: Mode, session_key: bytes = b"", sample_index: int = 0) -> Rule:
    """Return the rule of a mode.

    Args:
        mode: verification mode.
        session_key: in coupled mode the seed's key (`noise.seed_key`), from which the field's key is derived; else
            unused.
        sample_index: in coupled mode, which of several samples of one prompt.

    Raises:
        ValueError: coupled mode without a key.
    """
    match mode:
        case Mode.GREEDY:
            return GreedyRule()
        case Mode.COUPLED:
            return CoupledRule(derive_key(session_key, Purpose.FIELD), sample_index)
        case Mode.REJECTION:
            return TokenRule()
        case Mode.BLOCK:
            return BlockRule()
        case _:
            assert_never(mode)
