"""What a chain has of its drafter: runs of tokens as they came in, at most one tree behind them, and what is to come.

Also what the drafter says beside: where it stands still, and what it had seen. All of it ends with the epoch.
"""

from collections import deque

from outrider.messages import Proposal, ProposalHeader, SparseRow
from outrider.verification.tree import Tree

_Run = tuple[tuple[int, ...], tuple[SparseRow, ...]]


class Waiting:
    """Runs of tokens with the rows they were drawn from (none in modes that need none), oldest first; then the tree.

    Only the block rule minds where a run ends.
    """

    def __init__(self) -> None:
        """Have nothing."""
        self._runs: deque[_Run] = deque()
        self.tree: Tree | None = None
        """It ends the chain: nothing comes behind it."""
        self.header: ProposalHeader | None = None
        """Of a proposal whose tokens have not come yet."""
        self.seen_len = 0
        """Committed length that the drafter knew when it sent its last proposal."""
        self.limit = -1
        """Where it stands still until it knows more; -1: it has not said."""

    def __len__(self) -> int:
        """Count the positions that are taken: of a tree its depth."""
        return self.run_len + (self.tree.depth if self.tree is not None else 0)

    def __bool__(self) -> bool:
        """Whether there is anything to test."""
        return bool(self._runs) or self.tree is not None

    @property
    def run_len(self) -> int:
        """Tokens of all runs."""
        return sum(len(token_ids) for token_ids, _ in self._runs)

    @property
    def first_len(self) -> int:
        """Tokens left of the oldest run; 0 if there is none."""
        return len(self._runs[0][0]) if self._runs else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs, and of all branches of the tree."""
        return self.run_len + (len(self.tree) if self.tree is not None else 0)

    @property
    def is_owed(self) -> bool:
        """Whether tokens were announced that have not been tested."""
        return self.header is not None or bool(self)

    def add(self, proposal: Proposal, *, trees: bool = True) -> None:
        """Append a proposal, of which there is no more to be announced.

        Args:
            proposal: of at least one token.
            trees: whether trees can be tested; where they cannot, of one its path of first children is.
        """
        self.header, self.seen_len, self.limit = None, proposal.seen_len, proposal.limit
        if proposal.parents:
            tree = Tree(proposal.token_ids, proposal.parents, proposal.rows)
            self.tree = tree if trees else tree.first_path
        else:
            self._runs.append((proposal.token_ids, proposal.rows))

    def take(self, count: int) -> _Run:
        """Remove the oldest `count` tokens of runs, at most all of them, and return them with their rows."""
        token_ids: tuple[int, ...] = ()
        rows: tuple[SparseRow, ...] = ()
        while (missing := count - len(token_ids)) > 0:
            run_ids, run_rows = self._runs.popleft()
            token_ids, rows = token_ids + run_ids[:missing], rows + run_rows[:missing]
            if len(run_ids) > missing:
                self._runs.appendleft((run_ids[missing:], run_rows[missing:]))
        return token_ids, rows

    def take_tree(self) -> None:
        """Remove the tree."""
        self.tree = None

    def clear(self) -> None:
        """Forget everything: the epoch ended."""
        self._runs.clear()
        self.tree, self.header, self.limit = None, None, -1
