"""From the rows of a pass to the path of a tree: what `judging` does for runs, for several continuations at once."""

from torch import Tensor

from outrider.sampling import UNSOUND, target_rows
from outrider.verification import GreedyRule, KeyedDraws, Tree, judge_tree
from outrider.verification.rule import Draws, Rule
from verify_service.events import Judged, Test
from verify_service.sessions import Session


def judge_branches(session: Session, test: Test, tree: Tree, rows: Tensor) -> Judged:
    """Follow a tree along the tokens that pass, and draw the one behind them.

    Args:
        session: whose chain handed out the test.
        test: of the tree.
        tree: what is tested.
        rows: [nodes + 1, vocab_size] logits, or [nodes + 1] likeliest ids; the first is the root's, then node by node.
    """
    draws = KeyedDraws(session.opened.key, test.epoch)
    rule: Rule = _Likeliest() if session.best_below else session.rule
    found = judge_tree(tree, rule, lambda node: _row(session, tree, rows, node), test.base_len, draws)
    return Judged(len(found.path), found.num_tested, found.drawn, found.path)


def _row(session: Session, tree: Tree, rows: Tensor, node: int) -> Tensor:
    """Return the row behind a node as the session's rule needs it; only those of the path are worth preparing."""
    row, opened = rows[node + 1], session.opened
    if session.best_below:
        return row
    history = session.history.after(tree.tokens(tree.path_to(node))) if session.history is not None else None
    return target_rows(row.unsqueeze(0), opened.mode, opened.sampling, session.vocab_len, history)[0]


class _Likeliest(GreedyRule):
    """Greedy mode where the pass has told the likeliest ids alone."""

    def draw(self, row: Tensor, draws: Draws, position: int) -> int:
        """Return the id.

        Raises:
            ValueError: the row is no output of a sound model.
        """
        own = int(row)
        if own == UNSOUND:
            raise ValueError("the target's row has a largest logit that is not finite")
        return own
