"""Where a generation ends when it may not end before so many tokens: at every offset, however its tokens arrive."""

import random
from itertools import pairwise

import pytest

from orchestrator.commit import Commit, Ends
from orchestrator.text import Decoder, Detokenizer
from outrider.ids import FinishReason, TokenKind
from outrider.model.toy import ToyTokenizer

TOY = ToyTokenizer()
LETTERS = [TOY.encode(letter)[0] for letter in "ab"]
PROMPT_LEN = 3


def committed(
    tokens: list[int], cuts: list[int], stops: tuple[str, ...], min_tokens: int, max_tokens: int
) -> tuple[int, str, FinishReason | None, str]:
    """Return how many tokens count, the text, and the end, of tokens that arrive in runs cut at these places."""
    ends = Ends(PROMPT_LEN + max_tokens, stop_strings=stops, min_len=PROMPT_LEN + min_tokens)
    commit = Commit(ends, Detokenizer(Decoder(TOY), [0] * PROMPT_LEN))
    text, count = "", 0
    for first, last in pairwise([0, *cuts, len(tokens)]):
        run = tokens[first:last]
        outcome = commit.take(PROMPT_LEN + first, run, [TokenKind.ACCEPTED] * len(run), ())
        text, count = text + outcome.chunk.text, count + len(outcome.chunk.token_ids)
        if outcome.finish is not None:
            return count, text, outcome.finish, outcome.matched
    return count, text, None, ""


def expected(
    tokens: list[int], stops: tuple[str, ...], min_tokens: int, max_tokens: int
) -> tuple[int, str, FinishReason | None, str]:
    """The same from the definition: the first token, not before the least one, that completes a stop string."""
    settled = len(TOY.decode(tokens[: max(0, min_tokens - 1)]))
    for count in range(max(1, min_tokens), len(tokens) + 1):
        text = TOY.decode(tokens[:count])
        found = [
            (start, -len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > settled
        ]
        if found:
            start, _, stop = min(found)
            return count, text[:start], FinishReason.STOP, stop
        if count == max_tokens:
            return count, text, FinishReason.LENGTH, ""
    return len(tokens), TOY.decode(tokens), None, ""


@pytest.mark.parametrize("seed", range(8))
def test_stops_least_and_greatest_length_end_at_the_token_that_their_definition_says(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        tokens = [draw.choice(LETTERS) for _ in range(10)]
        stops = tuple({"".join(draw.choice("ab") for _ in range(draw.randrange(1, 4))) for _ in range(2)})
        cuts = sorted(draw.sample(range(1, 10), draw.randrange(6)))
        min_tokens = draw.randrange(11)
        max_tokens = draw.randrange(max(1, min_tokens), 12)
        asked = tokens, stops, min_tokens, max_tokens
        count, text, finish, matched = committed(tokens, cuts, stops, min_tokens, max_tokens)
        wanted = expected(*asked)
        assert (count, finish, matched) == (wanted[0], *wanted[2:]), asked
        # What could begin a stop string is held back as long as nothing has ended.
        assert text == wanted[1] if finish is not None else wanted[1].startswith(text), asked


@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.parametrize("min_tokens", range(9))
def test_a_stop_string_is_text_up_to_the_token_before_the_least_one(offset: int, min_tokens: int) -> None:
    """The stop string is complete with token `offset + 1`."""
    tokens = [LETTERS[0]] * (offset - 1) + [LETTERS[1]] * 2 + [LETTERS[0]] * (9 - offset)
    count, text, finish, matched = committed(tokens, [2, 5], ("bb",), min_tokens, 10)
    if offset + 1 >= min_tokens:
        assert (count, finish, matched) == (offset + 1, FinishReason.STOP, "bb")
        assert text == "a" * (offset - 1)
    else:
        assert (count, finish, matched) == (10, FinishReason.LENGTH, "")
        assert text == TOY.decode(tokens)
