"""The tokens of a chain that wait to be tested, in the runs they came in: only the block rule minds the borders."""

from collections import deque

from outrider.messages import SparseRow

_Run = tuple[tuple[int, ...], tuple[SparseRow, ...]]


class Waiting:
    """Runs of tokens with the rows they were drawn from (none in modes that need none), oldest first."""

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque()

    def __len__(self) -> int:
        """Count the tokens of all runs."""
        return sum(len(token_ids) for token_ids, _ in self._runs)

    @property
    def first_len(self) -> int:
        """Tokens left of the oldest run; 0 if there is none."""
        return len(self._runs[0][0]) if self._runs else 0

    def add(self, token_ids: tuple[int, ...], rows: tuple[SparseRow, ...]) -> None:
        """Append a run of at least one token."""
        self._runs.append((token_ids, rows))

    def take(self, count: int) -> _Run:
        """Remove the oldest `count` tokens, at most all of them, and return them with their rows."""
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
