"""What is told of a generation that is in the log already. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.commit import Commit
from orchestrator.events import Outcome
from outrider.errors import InvalidRequest
from outrider.generation import Chunk
from outrider.ids import TokenKind
from outrider.messages import TokenLogprobs, WorkerDescription
from outrider.store.records import LogSlice, SessionState


def check_position(position: int, state: SessionState) -> None:
    """Require a position of the generation that a session holds.

    Raises:
        InvalidRequest: it is before the generation, or past where it must have ended.
    """
    final_len = state.prompt_len + state.max_tokens
    if not state.prompt_len <= position <= final_len:
        raise InvalidRequest("next_position", position, f"an integer in {state.prompt_len} .. {final_len}")


def replay(commit: Commit, state: SessionState, logged: LogSlice, logprobs: Sequence[TokenLogprobs]) -> Outcome:
    """Give the committer what the log holds of the generation, with log-probabilities where there is one for each.

    Takes a while for a long one: its text is made token by token.
    """
    token_ids = logged.token_ids[state.prompt_len :]
    raw = logged.kinds[state.prompt_len :]
    kinds = tuple(map(TokenKind, raw)) if raw and all(raw) else ()
    found = tuple(logprobs[: len(token_ids)])
    return commit.take(state.prompt_len, token_ids, kinds, found if len(found) == len(token_ids) else ())


def told(chunk: Chunk, state: SessionState) -> Chunk:
    """Return a chunk as the client wants it: with the origins of its tokens or without."""
    return chunk if state.return_origin else replace(chunk, kinds=())


def can_redraw(state: SessionState, verifier: WorkerDescription) -> bool:
    """Whether the verifier draws lost tokens again as they were."""
    return not state.mode.needs_rows and verifier.exactness == "bitwise"
