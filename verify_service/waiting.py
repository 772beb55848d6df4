"""What of a chain waits to be tested: runs of tokens, as they came in, and at most one tree behind them all."""

from collections import deque

from outrider.messages import SparseRow
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

    def __len__(self) -> int:
        """Count the positions that are taken: of a tree its depth."""
        return self.run_len + (self.tree.depth if self.tree is not None else 0)

    def __bool__(self) -> bool:
        """Whether there is anything."""
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

    def add(self, token_ids: tuple[int, ...], rows: tuple[SparseRow, ...]) -> None:
        """Append a run of at least one token."""
        self._runs.append((token_ids, rows))

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

    def clear(self) -> None:
        """Forget everything."""
        self._runs.clear()
        self.tree = None
