"""Trees in the drafter's window, and the shapes that they get."""

import pytest

from draft_service.drafters.growing import Growth, Shapes
from draft_service.events import Begin, Count, Draw, Drawn, Followed, Planned, Scheduled, Send
from draft_service.window import Window
from outrider.errors import ProtocolError
from outrider.ids import Epoch, Generation, Mode, SessionId, WorkerId
from outrider.messages import (
    COUNT_TOTAL,
    DraftCommit,
    DraftOpen,
    Proposal,
    ProposalHeader,
    RollbackHint,
    SamplingParams,
    SparseRow,
    Speculation,
)
from outrider.shape import chain

DEEP = Speculation(3, 3, 6)
BUSH = (-1, -1, 0, 0, 2)
TOKENS = (5, 6, 7, 8, 9)


def opened(mode: Mode = Mode.GREEDY, max_len: int = 0) -> Window:
    return Window(
        DraftOpen(
            SessionId("s"),
            Epoch(Generation(1, 1)),
            (1, 2, 3, 4),
            mode,
            SamplingParams(),
            b"",
            DEEP,
            WorkerId("v"),
            "",
            max_len=max_len,
        )
    )


def epoch(round_: int) -> Epoch:
    return Epoch(Generation(1, 1), round_)


def commit(start: int, ids: tuple[int, ...], round_: int = 1) -> DraftCommit:
    return DraftCommit(epoch(round_), start, ids, DEEP)


def planned(window: Window, parents: tuple[int, ...] = BUSH) -> list[object]:
    [begin] = window.step(Scheduled())
    assert isinstance(begin, Begin)
    return [*window.step(Planned(begin.ticket, len(parents), parents=parents))]


def grown(mode: Mode = Mode.GREEDY) -> Window:
    window = opened(mode)
    [draw] = planned(window)
    assert draw == Draw(1, 5, BUSH)
    window.step(Drawn(1, TOKENS))
    return window


def test_a_tree_is_sent_whole_and_is_no_part_of_the_text() -> None:
    window = opened()
    planned(window)
    [send] = window.step(Drawn(1, TOKENS))
    assert send == Send(Proposal(SessionId("s"), epoch(0), 4, 4, 10, TOKENS, (), BUSH))
    assert window.ids == [1, 2, 3, 4]
    assert not window.wants_time
    assert not window.step(Scheduled())


def test_a_tree_with_rows_is_announced_with_its_depth() -> None:
    window = opened(Mode.REJECTION)
    announced, _ = planned(window)
    assert announced == Send(ProposalHeader(SessionId("s"), epoch(0), 4, 5, 3))
    rows = tuple(SparseRow((token,), (COUNT_TOTAL,)) for token in (5, 7, 9))
    [send] = window.step(Drawn(1, TOKENS, rows))
    assert isinstance(send, Send)
    assert isinstance(send.message, Proposal)
    assert send.message.rows == rows


@pytest.mark.parametrize(
    ("ids", "families", "discarded"),
    [
        ((5, 7, 9, 1), ((2, 0), (2, 0), (1, 0)), 2),
        ((5, 8, 1), ((2, 0), (2, 1)), 3),
        ((6, 1), ((2, 1),), 4),
        ((5, 1), ((2, 0), (2, -1)), 4),
        ((1,), ((2, -1),), 5),
    ],
    ids=["to the end", "second branch", "second child", "half way", "nothing"],
)
def test_a_commit_says_how_far_a_tree_was_followed(
    ids: tuple[int, ...], families: tuple[tuple[int, int], ...], discarded: int
) -> None:
    window = grown()
    out = window.step(commit(4, ids))
    assert Followed(families) in out
    assert Count("discarded", discarded) in out
    assert window.ids == [1, 2, 3, 4, *ids]
    assert window.wants_time


def test_a_reset_says_nothing_of_the_tree() -> None:
    window = grown()
    out = window.step(commit(4, ()))
    assert not [command for command in out if isinstance(command, Followed)]
    assert window.wants_time


def test_a_hint_that_would_have_to_name_a_path_waits_for_the_commit() -> None:
    window = grown()
    assert window.step(RollbackHint(SessionId("s"), epoch(1), 6, 3)) == [Count("odd_hint")]
    assert window.epoch == epoch(0)
    assert window.step(commit(4, (5, 7, 3)))
    assert window.ids[4:] == [5, 7, 3]


def test_a_hint_at_the_trees_root_is_taken() -> None:
    window = grown()
    assert Count("taken_hint") in window.step(RollbackHint(SessionId("s"), epoch(1), 4, 3))
    assert window.wants_time
    window.step(commit(4, (3,)))
    assert window.ids == [1, 2, 3, 4, 3]


def test_a_tree_hangs_behind_the_chain_that_was_drawn_before_it() -> None:
    window = opened()
    window.step(Scheduled())
    window.step(Planned(1, 1))
    window.step(Drawn(1, (9,)))
    window.step(Scheduled())
    window.step(Planned(2, 5, parents=BUSH))
    [send] = window.step(Drawn(2, TOKENS))
    assert isinstance(send, Send)
    assert send.message.base_len == 5
    assert Followed(((2, 1),)) in window.step(commit(4, (9, 6, 2)))


@pytest.mark.parametrize("parents", [(-1, 0, 1, 2), ()], ids=["too deep", "too many"])
def test_a_plan_deeper_than_asked_for_is_a_broken_promise(parents: tuple[int, ...]) -> None:
    window = opened()
    window.step(Scheduled())
    with pytest.raises(ProtocolError, match="asked for"):
        window.step(Planned(1, 4, parents=parents))


def test_a_tree_that_is_not_whole_is_a_broken_promise() -> None:
    window = opened()
    planned(window)
    with pytest.raises(ProtocolError, match="was drawn"):
        window.step(Drawn(1, TOKENS[:4]))


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_shapes_follow_what_was_accepted() -> None:
    sure, unsure = Shapes(6), Shapes(6)
    for _ in range(200):
        sure.learn([(1, 0)] * 6)
        unsure.learn([(3, 0)])
        unsure.learn([(3, 1)])
        unsure.learn([(3, 2)])
    assert sure.shape(6) == chain(6)
    assert len(unsure.shape(6).levels[0]) == 3
    assert len(unsure.shape(6).levels) < 4


def test_a_shape_is_no_deeper_than_asked_and_no_larger_than_allowed() -> None:
    for depth in range(1, 9):
        shape = Shapes(7).shape(depth)
        assert len(shape.levels) <= depth
        assert len(shape.parents) == 7 or depth == 1


def test_shapes_stay_until_enough_more_is_known() -> None:
    shapes = Shapes(5)
    first = shapes.shape(3)
    for _ in range(10):
        shapes.learn([(2, 1)])
    assert shapes.shape(3) is first
    for _ in range(300):
        shapes.learn([(2, 1)])
    assert shapes.shape(3) != first


def test_a_drafter_that_is_never_right_goes_on_with_one_guess() -> None:
    shapes = Shapes(4)
    for _ in range(10_000):
        shapes.learn([(4, -1)])
    assert shapes.shape(3).parents


def test_a_tree_grows_by_levels() -> None:
    growth = Growth(epoch(0), 4, BUSH)
    assert list(growth.level) == [-1]
    growth.add((5, 6), None)
    assert list(growth.level) == [0, 1]
    assert growth.children(1) == ()
    growth.add((7, 8), None)
    assert list(growth.level) == [2, 3]
    assert growth.path(3) == (5, 8)
    assert not growth.is_whole
    growth.add((9,), None)
    assert growth.is_whole
