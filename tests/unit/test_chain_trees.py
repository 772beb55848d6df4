"""A chain that ends in a tree: what is taken, what is tested on which rows, and what is kept of it."""

from dataclasses import replace

import pytest

from outrider.ids import Mode, TokenKind
from outrider.messages import COUNT_TOTAL, DecodeProgress, Proposal, ProposalHeader, SparseRow, Speculation
from tests.unit.chain_steps import (
    GEN,
    SESSION,
    arrive,
    counts,
    epoch,
    header,
    judge,
    only,
    opened,
    proposal,
    row,
    scheduled,
)
from verify_service.chain import Chain
from verify_service.events import Command, Count, Judged, Keep, Report, Rewind, Scheduled, Test
from verify_service.intake import MAX_TREE_NODES

DEEP = Speculation(3, 3, 6)
BUSH = (-1, -1, 0, 0, 2)
TOKENS = (5, 6, 7, 8, 9)


def tree(base: int = 4, ids: tuple[int, ...] = TOKENS, parents: tuple[int, ...] = BUSH, seen: int = 4) -> Proposal:
    return Proposal(SESSION, epoch(), base, seen, 10, ids, (), parents)


def follow(chain: Chain, path: tuple[int, ...], drawn: int, tested: int) -> list[Command]:
    return chain.step(Judged(len(path), tested, drawn, path))


def test_a_tree_is_fed_whole_behind_the_last_token_and_its_path_is_kept() -> None:
    chain = opened(speculation=DEEP)
    arrive(chain, tree())
    assert chain.wants_rows == 6
    assert chain.wants_all_rows
    test = scheduled(chain)
    assert (test.feed, test.feed_parents) == ((4, *TOKENS), (-1, 0, 0, 1, 1, 3))
    assert test.token_ids == TOKENS
    out = follow(chain, (0, 3), 2, 3)
    assert only(out, Keep).path == (0, 1, 4)
    report = only(out, Report)
    assert (report.start, report.token_ids) == (4, (5, 8, 2))
    assert report.kinds == (TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.RECOVERED)
    assert (report.num_accepted, report.num_tested, report.next_epoch) == (2, 3, epoch(1))
    assert chain.kv_len == chain.committed_len - 1 == 6


def test_the_token_behind_a_leaf_is_a_bonus_and_branches_that_were_not_reached_are_wasted() -> None:
    chain = opened(speculation=DEEP)
    arrive(chain, tree())
    scheduled(chain)
    out = follow(chain, (1,), 3, 1)
    assert only(out, Report).kinds[-1] is TokenKind.BONUS
    assert Count("wasted", 3) in out
    assert only(out, Keep).path == (0, 2)


def test_nothing_is_taken_behind_a_tree() -> None:
    chain = opened(speculation=DEEP)
    arrive(chain, tree())
    assert counts(arrive(chain, tree())) == ["duplicate"]
    assert "garbage" in counts(arrive(chain, proposal(7, (1,), limit=10)))
    assert chain.epoch == epoch(1)


def test_a_tree_behind_a_run_is_tested_on_the_row_that_the_run_leaves() -> None:
    chain = opened(speculation=DEEP)
    arrive(chain, proposal(4, (1,), limit=10))
    arrive(chain, tree(base=5))
    assert not chain.wants_all_rows
    scheduled(chain)
    judge(chain, 1)
    assert chain.held
    test = scheduled(chain)
    assert (test.from_held, test.feed, test.feed_parents) == (True, TOKENS, BUSH)
    out = follow(chain, (0, 2, 4), 3, 3)
    assert only(out, Keep).path == (0, 2, 4)
    assert chain.kv_len == 4 + 1 + 3


def test_a_tree_with_one_branch_is_fed_as_a_run() -> None:
    chain = opened(speculation=DEEP)
    arrive(chain, tree(ids=(5, 6), parents=(-1, 0)))
    test = scheduled(chain)
    assert test.feed_parents == ()
    out = follow(chain, (0,), 3, 2)
    assert only(out, Rewind).length == 5


def test_a_pass_without_branches_tests_the_first_children() -> None:
    chain = opened(speculation=DEEP)
    chain._trees = False
    arrive(chain, tree())
    test = scheduled(chain)
    assert (test.feed, test.feed_parents, test.token_ids) == ((4, 5, 7, 9), (), (5, 7, 9))
    assert test.tree is not None
    assert test.tree.drawn_as == (0, 2, 4), "what tells whether a token was drawn from its row"
    assert only(follow(chain, (0, 1, 2), 3, 3), Report).kinds[-1] is TokenKind.BONUS


def test_a_commit_limit_cuts_a_tree_by_depth_and_leaves_room_for_the_token_behind_it() -> None:
    chain = opened(speculation=DEEP, limit=6)
    arrive(chain, tree())
    assert chain.wants_rows == 3
    assert scheduled(chain).token_ids == (5, 6)
    chain = opened(speculation=DEEP, limit=5)
    arrive(chain, tree())
    test = scheduled(chain)
    assert (test.token_ids, test.draw) == ((), TokenKind.BONUS)
    judge(chain, 0, 5)
    assert chain.committed_len == 5
    assert chain.epoch == epoch(1)


def test_a_tree_waits_for_a_pass_with_all_its_rows() -> None:
    chain = opened(speculation=DEEP)
    arrive(chain, tree())
    assert not [command for command in chain.step(Scheduled(5)) if isinstance(command, Test)]
    assert scheduled(chain, 6).num_rows == 6


WRONG = {
    "twins": tree(ids=(5, 5, 7, 8, 9)),
    "own parent": tree(parents=(-1, -1, 2, 0, 2)),
    "too few parents": tree(parents=BUSH[:4]),
    "too deep": tree(ids=(1, 2, 3, 5), parents=(-1, 0, 1, 2)),
    "too many": tree(ids=tuple(range(11)) * 6, parents=(-1,) * 66),
    "past its limit": replace(tree(), limit=6),
    "unknown id": tree(ids=(5, 6, 7, 8, 99)),
    "rows where none are": replace(tree(), rows=(row(5), row(7), row(9))),
}


@pytest.mark.parametrize("message", WRONG.values(), ids=WRONG)
def test_what_no_honest_drafter_sends_is_garbage(message: Proposal) -> None:
    assert MAX_TREE_NODES < 66
    assert "garbage" in counts(arrive(opened(speculation=DEEP), message))


# --- with rows --------------------------------------------------------------------------------------------------------

ROWS = (SparseRow((5, 6), (COUNT_TOTAL - 9, 9)), row(7), row(9))
HEADER = ProposalHeader(SESSION, epoch(), 4, 5, 3)


def with_rows(*rows: SparseRow) -> Proposal:
    return replace(tree(), rows=rows)


def test_a_tree_with_a_row_for_each_family_follows_its_header() -> None:
    chain = opened(Mode.REJECTION, DEEP)
    assert not counts(arrive(chain, HEADER))
    assert not counts(arrive(chain, with_rows(*ROWS)))
    assert scheduled(chain).rows == ROWS


@pytest.mark.parametrize(
    "announced", [header(4, 3), replace(HEADER, depth=2), replace(HEADER, count=6)], ids=["run", "depth", "count"]
)
def test_a_tree_other_than_announced_is_a_gap(announced: ProposalHeader) -> None:
    chain = opened(Mode.REJECTION, DEEP)
    assert not counts(arrive(chain, announced))
    assert "gap" in counts(arrive(chain, with_rows(*ROWS)))


def test_a_run_behind_the_header_of_a_tree_is_a_gap() -> None:
    chain = opened(Mode.REJECTION, DEEP)
    arrive(chain, ProposalHeader(SESSION, epoch(), 4, 3, 3))
    run = proposal(4, (5, 6, 7), limit=10)
    assert "gap" in counts(arrive(chain, replace(run, rows=tuple(row(token) for token in run.token_ids))))


@pytest.mark.parametrize(
    "rows", [ROWS[:2], (row(6), *ROWS[1:]), (SparseRow((5, 7), (9, COUNT_TOTAL - 9)), *ROWS[1:])],
    ids=["a row too few", "not of the first child", "not of the second child"],
)  # fmt: skip
def test_rows_that_siblings_cannot_come_from_are_garbage(rows: tuple[SparseRow, ...]) -> None:
    chain = opened(Mode.REJECTION, DEEP)
    arrive(chain, HEADER)
    assert "garbage" in counts(arrive(chain, with_rows(*rows)))


@pytest.mark.parametrize("wrong", [replace(HEADER, depth=4), replace(HEADER, count=65)], ids=["depth", "count"])
def test_headers_of_trees_that_are_too_large_are_garbage(wrong: ProposalHeader) -> None:
    assert "garbage" in counts(arrive(opened(Mode.REJECTION, DEEP), wrong))


def test_the_block_rule_has_no_trees() -> None:
    chain = opened(Mode.BLOCK, DEEP)
    arrive(chain, HEADER)
    assert "garbage" in counts(arrive(chain, with_rows(*ROWS)))


def test_a_narrower_window_does_not_make_garbage_of_a_tree_under_way() -> None:
    chain = opened(speculation=DEEP)
    chain.step(DecodeProgress(GEN, 4, 100, Speculation(1, 1, 1), 1.0))
    assert not counts(arrive(chain, tree()))
