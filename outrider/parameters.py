"""Which sampling parameters have a distribution; the rest are refused by name, with the range that is allowed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequest
from outrider.messages import SamplingParams

BAN_BIAS = -100.0
"""A bias this low or lower removes the token altogether."""
MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """What one parameter may be, and the one sentence in which every door and service says so."""

    low: float
    high: float
    what: str = "a number"
    excludes_low: bool = False
    note: str = ""
    """Behind the sentence."""

    @property
    def allowed(self) -> str:
        """The sentence."""
        span = f"({self.low:g}, {self.high:g}]" if self.excludes_low else f"{self.low:g} .. {self.high:.10g}"
        return f"{self.what} in {span}{self.note}"

    def holds(self, value: float) -> bool:
        """Whether a value is in it; NaN is in none."""
        return self.low <= value <= self.high and not (self.excludes_low and value == self.low)


RANGES: Mapping[str, Range] = {
    "repetition_penalty": Range(0.01, 100),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "temperature": Range(0, 100),
    "top_k": Range(0, MAX_INT, "an integer", note="; 0 keeps all"),
    "top_p": Range(0, 1, excludes_low=True),
    "min_p": Range(0, 1),
}
"""By field of `SamplingParams`."""
BIAS = "a finite bias, at most 100"
MAX_TOKENS = f"an integer in 1 .. {MAX_INT}, or 0 beside prompt_logprobs; the context bounds it"
"""What `logit_bias` and `max_tokens` may hold."""


def allowed_bias(bias: float) -> bool:
    """Whether a token's logit may be moved so far."""
    return math.isfinite(bias) and bias <= -BAN_BIAS


def validate(params: SamplingParams, vocab_len: int) -> None:
    """Refuse parameters that have no distribution, or that no float could carry.

    Args:
        params: as received from a client.
        vocab_len: length of the tokenizer's id range.

    Raises:
        InvalidRequest: names the first field that is wrong, its value and the allowed range.
    """
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if not allowed.holds(value):
            raise InvalidRequest(f"sampling.{name}", value, allowed.allowed)
    _check_bias(params.logit_bias, vocab_len)
    _check_bans(params, vocab_len)


def _check_bias(logit_bias: Sequence[tuple[int, float]], vocab_len: int) -> None:
    """Refuse ids that do not exist or come twice, biases that are not finite, and a ban of the whole vocabulary."""
    for token, bias in logit_bias:
        if not 0 <= token < vocab_len:
            raise InvalidRequest("sampling.logit_bias", token, f"a token id in 0 .. {vocab_len - 1}")
        if not allowed_bias(bias):
            raise InvalidRequest("sampling.logit_bias", bias, BIAS)
    ids = [token for token, _ in logit_bias]
    if len(set(ids)) != len(ids):
        raise InvalidRequest("sampling.logit_bias", ids, "distinct token ids")
    if sum(bias <= BAN_BIAS for _, bias in logit_bias) >= vocab_len:
        raise InvalidRequest("sampling.logit_bias", f"{len(ids)} banned ids", "at least one token that is not banned")


def _check_bans(params: SamplingParams, vocab_len: int) -> None:
    """Refuse bans that leave nothing, and a grammar whose output could never end."""
    banned = {token for token, bias in params.logit_bias if bias <= BAN_BIAS}
    for name in ("allowed_token_ids", "end_token_ids", "grammar_end_ids"):
        for token in getattr(params, name):
            if not 0 <= token < vocab_len:
                raise InvalidRequest(f"sampling.{name}", token, f"a token id in 0 .. {vocab_len - 1}")
    left = set(params.allowed_token_ids or range(vocab_len if banned or params.min_tokens else 0)) - banned
    if params.allowed_token_ids and not left:
        allowed = "at least one token that logit_bias does not ban"
        raise InvalidRequest("sampling.allowed_token_ids", params.allowed_token_ids, allowed)
    if params.min_tokens < 0:
        raise InvalidRequest("sampling.min_tokens", params.min_tokens, f"an integer in 0 .. {MAX_INT}")
    if params.min_tokens and left <= set(params.end_token_ids):
        allowed = "0 where all tokens that are not banned end the output"
        raise InvalidRequest("sampling.min_tokens", params.min_tokens, allowed)
    if params.grammar is None:
        return
    if params.min_tokens:
        raise InvalidRequest("sampling.min_tokens", params.min_tokens, "0 beside a grammar")
    ends = set(params.grammar_end_ids) - banned
    if not (ends & left if params.allowed_token_ids else ends):
        allowed = "an end-of-sequence token that is neither banned nor left out of allowed_token_ids"
        raise InvalidRequest("sampling.grammar", params.grammar.kind.value, allowed)
