"""From logits to a decision: what a pass's rows say about a run, and the log-probabilities of what is committed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.errors import InvalidRequest
from outrider.history import History
from outrider.ids import Mode
from outrider.messages import TokenLogprobs
from outrider.noise import Purpose, derive_key, word64
from outrider.sampling import UNSOUND, draw_from_counts, processed_logits, target_rows
from outrider.verification import KeyedDraws
from outrider.verification.tree import num_tree_mismatches
from verify_service.branches import judge_branches
from verify_service.events import Judged, Test
from verify_service.scoring import token_logprobs
from verify_service.sessions import Session


def rows_of(session: Session, test: Test, fed: Tensor | None) -> Tensor:
    """Return the rows to test on: the held row first, if the test wants it, then those of the fed tokens.

    Args:
        session: whose held row may be needed.
        test: says which rows belong to it.
        fed: [len(test.feed), vocab_size] logits of the pass, or [len(test.feed)] likeliest ids; None without a pass.

    Returns:
        [num_rows, vocab_size] or [num_rows]; row i is the target's for the i-th token of the run.

    Raises:
        ValueError: a held row is wanted and none is there, or there is no row at all.
    """
    if not test.from_held:
        if fed is None:
            raise ValueError("a test without rows")
        return fed
    if session.held_row is None:
        raise ValueError("the chain holds a row that the engine does not have")
    held = session.held_row.unsqueeze(0)
    return held if fed is None else torch.cat([held, fed])


def judge(session: Session, test: Test, rows: Tensor) -> Judged:
    """Decide a test, keep the row behind a run that was accepted whole, and note log-probabilities and history.

    Args:
        session: whose chain handed out the test.
        test: the test.
        rows: from `rows_of`.
    """
    tree = test.tree
    if test.is_ahead:
        judged = Judged(0, 0, None)
    elif tree is not None:
        judged = judge_branches(session, test, tree, rows)
    else:
        judged = _compare(test, rows.tolist()) if session.best_below else _decide(session, test, rows)
    if judged.drawn is None and test.feed:
        # A copy, because a view would keep the whole pass's logits alive.
        session.held_row = rows[-1].clone()
    committed = [*test.accepted(judged), *([] if judged.drawn is None else [judged.drawn])]
    if session.opened.num_logprobs >= 0:
        own = rows[: len(committed)] if tree is None else rows[[0, *(node + 1 for node in judged.path)]]
        session.logprobs += _logprobs(session, own, committed)
    if session.history is not None:
        _advance(session, session.history, committed)
    return judged


def _logprobs(session: Session, rows: Tensor, committed: list[int]) -> list[TokenLogprobs]:
    """Return log-probabilities of tokens that are about to be committed, under the law that was asked for."""
    opened, rows = session.opened, rows[:, : session.vocab_len]
    if opened.processed_logprobs:
        rows = processed_logits(rows, opened.sampling, session.vocab_len, session.history, committed)
    return token_logprobs(rows, committed, opened.num_logprobs)


def _advance(session: Session, history: History, committed: list[int]) -> None:
    """Note what is committed.

    Raises:
        InvalidRequest: the request leaves no token at some position: the grammar wants one that is banned, or has
            become too complex to go on.
    """
    history.advance(committed)
    if history.grammar is not None and history.grammar.is_broken:
        where = (
            f"no token that the grammar allows can follow {history.num_output - len(committed)} tokens or a few more"
        )
        allowed = "bans that leave every text of the grammar a way to its end, and a grammar that is not too complex"
        raise InvalidRequest("sampling.grammar", where, allowed)


def _decide(session: Session, test: Test, rows: Tensor) -> Judged:
    tokens, draws = test.token_ids, KeyedDraws(session.opened.key, test.epoch)
    if not tokens:
        return Judged(0, 0, session.rule.draw(_prepared(session, rows[:1], session.history)[0], draws, test.base_len))
    if session.opened.mode is Mode.BLOCK:
        prepared = _prepared(session, rows[: len(tokens)], session.history, tokens)
        judgement = session.rule.judge(prepared, tokens, test.rows, test.base_len, draws)
        return Judged(judgement.num_accepted, judgement.num_tested, judgement.replacement)
    # Preparing a row of a large vocabulary costs up to a millisecond: those behind a rejection are spared it.
    later = session.history.after(()) if session.history is not None else None
    for index, token in enumerate(tokens):
        row, draft_row = _prepared(session, rows[index : index + 1], later), test.rows[index : index + 1]
        judgement = session.rule.judge(row, (token,), draft_row, test.base_len + index, draws)
        if judgement.replacement is not None:
            return Judged(index, index + 1, judgement.replacement)
        if later is not None:
            later.advance((token,))
    return Judged(len(tokens), len(tokens), None)


def _prepared(session: Session, rows: Tensor, history: History | None, run: Sequence[int] = ()) -> Tensor:
    opened = session.opened
    return target_rows(rows, opened.mode, opened.sampling, session.vocab_len, history, run)


def _compare(test: Test, likeliest: list[int]) -> Judged:
    """Decide as `GreedyRule` does, by the likeliest ids alone.

    Raises:
        ValueError: a row that matters is no output of a sound model.
    """
    tokens = test.token_ids
    for index, own in enumerate(likeliest[: max(1, len(tokens))]):
        if own == UNSOUND:
            raise ValueError("the target's row has a largest logit that is not finite")
        if index == len(tokens) or own != tokens[index]:
            return Judged(index, min(index + 1, len(tokens)), own)
    return Judged(len(tokens), len(tokens), None)


def num_row_mismatches(session: Session, test: Test) -> int:
    """Return how many tokens were not drawn from the row sent with them, by the session's own draft stream.

    Only a defect or a lie makes any. What is judged does not change: a count tells that the law does not hold.
    """
    if not test.rows:
        return 0
    key, tree = derive_key(session.opened.key, Purpose.DRAFT), test.tree
    if tree is not None:
        return num_tree_mismatches(tree, key, test.base_len, test.epoch)
    drawn = (
        draw_from_counts(row, word64(key, position, test.epoch))
        for position, row in enumerate(test.rows, test.base_len)
    )
    return sum(token != own for token, own in zip(test.token_ids, drawn, strict=True))
