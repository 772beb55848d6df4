"""`python -m draft_service.shadow`: what a drafter makes of sessions that are over. `outrider shadow` starts it.

The drafter is that of the settings, as for a draft worker. Sessions come as lines on standard input
(`outrider.shadowing`); answers go to standard output as lines of JSON with one entry each:

    drafter     once, first: its kind, its model, and whether it was given hidden states of the target
    shadowed    one for each session, in order
    passes      last: what passes of the target take, zeros where it was not run

An error is one line on standard error, and status 1.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO

import torch

from draft_service.config import DraftSettings
from draft_service.drafters.protocol import Drafter, TakesFeatures
from draft_service.loading import load_drafter
from draft_service.replay import Tell, replay
from draft_service.teacher import Teacher, message
from outrider.errors import FailedPrecondition, OutriderError
from outrider.model.names import ModelSpec
from outrider.model.toy import TOY, toy_blocks, toy_from_name
from outrider.redaction import redacted
from outrider.shadowing import Logged, Passes, Shadowed, from_line


@dataclass(frozen=True, slots=True)
class Limits:
    """What is replayed of a session, and how."""

    gamma: int
    max_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and return the exit status."""
    parser = argparse.ArgumentParser(prog="draft_service.shadow", description=__doc__)
    parser.add_argument("--gamma", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--target", default="", help="target to run; empty: none is run")
    asked = parser.parse_args(argv)
    # Whatever a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        _shadow(Limits(asked.gamma, asked.max_tokens), asked.target, answers)
    except OutriderError as error:
        print(redacted(error.message), file=sys.stderr)
        return 1
    return 0


def _shadow(limits: Limits, target: str, answers: IO[str]) -> None:
    settings = DraftSettings.load()
    check(settings)
    drafter = load_drafter(settings, lambda *_: None).drafter
    wants = bool(drafter.info.feature_layers)
    if wants and not target:
        raise FailedPrecondition(
            f"a drafter of kind {drafter.info.kind!r} guesses from the target's hidden states: without the target, "
            f"to be run over the sessions' texts, it cannot be shadowed"
        )
    teacher = open_teacher(target, settings) if target else None
    _say(answers, "drafter", {"kind": drafter.info.kind, "model": drafter.info.model, "features": wants})
    passes = Passes()
    for number, line in enumerate(sys.stdin, 1):
        session = from_line(line, f"session {number}")
        _say(answers, "shadowed", asdict(shadowed(drafter, teacher, session, limits)))
        if teacher is not None and not passes.one_s and len(session.token_ids) >= limits.gamma + 2:
            passes = teacher.passes(session.token_ids, limits.gamma)
    _say(answers, "passes", asdict(passes))


def check(settings: DraftSettings) -> None:
    """Refuse what a replay does not tell the figures of: it goes by places of a run, and a tree has other ones.

    Raises:
        FailedPrecondition: the settings ask for trees.
    """
    if settings.tree_nodes:
        raise FailedPrecondition(
            f"{settings.variable('tree_nodes')} is {settings.tree_nodes}, and must be 0 here: a replay goes by runs"
        )


def open_teacher(target: str, settings: DraftSettings) -> Teacher:
    """Load the target with the draft's own type, device and threads.

    Raises:
        NotFound: no such model.
        FailedPrecondition: it is not supported.
    """
    if target == TOY:
        return Teacher(toy_from_name(target, toy_blocks(settings.pool)))
    # Here, because a toy needs none of it: the model libraries take seconds to import.
    from outrider.model.opening import open_model  # noqa: PLC0415

    opened = open_model(ModelSpec(target, settings.dtype, device=settings.device), num_blocks=settings.pool)
    return Teacher(opened.runner)


def shadowed(drafter: Drafter, teacher: Teacher | None, session: Logged, limits: Limits) -> Shadowed:
    """Replay a session, or say why it is left out.

    Args:
        drafter: the drafter.
        teacher: the target; needed where the drafter wants features.
        session: the session.
        limits: gamma, and most tokens of it.
    """
    info = drafter.info
    end = min(len(session.token_ids), session.prompt_len + limits.max_tokens)
    longest = min(info.context_len, teacher.context_len if teacher is not None else info.context_len)
    if max(session.token_ids[:end]) >= info.vocab_len:
        return Shadowed(session.session_id, skipped=f"it has ids past the drafter's vocabulary of {info.vocab_len}")
    if end > longest:
        return Shadowed(session.session_id, skipped=f"{end} tokens, longer than the context of {longest}")
    with torch.inference_mode():
        tell = _teller(drafter, teacher, session, end)
        return replay(drafter, session, limits.gamma, limits.max_tokens, tell)


def _teller(drafter: Drafter, teacher: Teacher | None, session: Logged, end: int) -> Tell:
    """Return what gives the drafter the features that a verifier would have sent by then: all but the last token's."""
    if teacher is None or not drafter.info.feature_layers or not isinstance(drafter, TakesFeatures):
        return lambda _: None
    features = teacher.features(session.token_ids[:end])
    given = 0

    def tell(length: int) -> None:
        nonlocal given
        if given < length - 1:
            drafter.take_features(message(session.session_id, features, given, length - 1))
            given = length - 1

    return tell


def _say(answers: IO[str], name: str, value: object) -> None:
    answers.write(json.dumps({name: value}) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
