"""Which of the waiting tokens are tested next, and on which rows: decided by counts, never by what the tokens are."""

from dataclasses import dataclass

from outrider.ids import Epoch, Mode, TokenKind
from outrider.verification.tree import Tree
from verify_service.events import Test
from verify_service.waiting import Waiting


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chain stands."""

    epoch: Epoch
    committed_len: int
    last_token: int
    """The last committed one, which has not been fed unless a row is held."""
    held: bool
    room: int
    """Tokens that may be committed at most."""
    mode: Mode
    most_rows: int = 0
    """Rows of runs that may be fed in one pass, even if more has arrived; 0: no such limit."""

    @property
    def unfed(self) -> tuple[int, ...]:
        """What must be fed before the first token is tested."""
        return () if self.held else (self.last_token,)


def rows_wanted(place: Place, waiting: Waiting, draw: TokenKind | None) -> int:
    """Return how many rows the model would have to compute for the next test; 0: there is none, or a held row does.

    Args:
        place: where the chain stands.
        waiting: what waits to be tested: all that may be tested in one pass is.
        draw: kind of the token to draw where nothing waits; None: it is not drawn yet.
    """
    if place.room < 1:
        return 0
    if not waiting:
        return len(place.unfed) if draw is not None else 0
    if waiting.run_len:
        # At least what is unfed: its row is the one that the first token is tested on.
        return _run_len(place, waiting) + len(place.unfed)
    return len(_tree(place, waiting)) + len(place.unfed)


def next_test(place: Place, waiting: Waiting, draw: TokenKind | None, max_rows: int) -> Test | None:
    """Return the next test, with what is tested taken off what waits; None where there is none, or rows are too few.

    Args:
        place: where the chain stands.
        waiting: what waits to be tested.
        draw: kind of the token to draw where nothing waits; None: it is not drawn yet.
        max_rows: that may be computed.
    """
    if place.room < 1:
        return None
    if waiting:
        return _take(place, waiting, max_rows)
    if draw is None or len(place.unfed) > max_rows:
        return None
    return _draw_test(place, draw)


def ahead_test(place: Place) -> Test:
    """Return the test that feeds what is unfed, and holds its row."""
    return Test(place.epoch, place.committed_len, place.unfed, False, (), (), None)


def _take(place: Place, waiting: Waiting, max_rows: int) -> Test | None:
    """Take what is tested next off what waits; None where the rows are too few for any of it."""
    if waiting.run_len and place.held and place.mode is not Mode.BLOCK:
        return _run_test(place, waiting, 1, feed=False)
    if waiting.run_len:
        return _take_run(place, waiting, max_rows)
    return _take_tree(place, waiting, max_rows)


def _draw_test(place: Place, kind: TokenKind) -> Test:
    """Return the test that draws a token with nothing to test."""
    return Test(place.epoch, place.committed_len, place.unfed, place.held, (), (), kind)


def _run_len(place: Place, waiting: Waiting) -> int:
    """Tokens that may be fed in one pass: a whole block, or all that has arrived, below the limits."""
    if place.mode is Mode.BLOCK:
        return min(place.room, waiting.first_len)
    fitting = place.most_rows - len(place.unfed) if place.most_rows else place.room
    return min(place.room, fitting, waiting.run_len)


def _take_run(place: Place, waiting: Waiting, max_rows: int) -> Test | None:
    count, before = _run_len(place, waiting), len(place.unfed)
    if count < 1 <= min(before, max_rows):
        return ahead_test(place)
    if place.mode is not Mode.BLOCK:
        count = min(count, max_rows - before)
    if count < 1 or count + before > max_rows:
        return None
    return _run_test(place, waiting, count, feed=True)


def _run_test(place: Place, waiting: Waiting, count: int, *, feed: bool) -> Test:
    token_ids, rows = waiting.take(count)
    fed = place.unfed + token_ids if feed else ()
    return Test(place.epoch, place.committed_len, fed, place.held, token_ids, rows, None)


def _tree(place: Place, waiting: Waiting) -> Tree:
    """Return the tree without what would leave no room for the token behind its longest path."""
    return waiting.tree.down_to(place.room - 1) if waiting.tree is not None else Tree((), ())


def _take_tree(place: Place, waiting: Waiting, max_rows: int) -> Test | None:
    """Take the whole tree, which is never cut by rows."""
    tree = _tree(place, waiting)
    if len(tree) + len(place.unfed) > max_rows:
        return None
    waiting.take_tree()
    if not len(tree):
        return _draw_test(place, TokenKind.BONUS)
    feed = place.unfed + tree.token_ids
    return Test(
        place.epoch, place.committed_len, feed, place.held, tree.token_ids, tree.rows, None, tree.parents,
        tree.drawn_as,
    )  # fmt: skip
