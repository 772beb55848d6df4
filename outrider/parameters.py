"""Which sampling parameters have a distribution; the rest are refused by name, with the range that is allowed."""

import math
from collections.abc import Sequence

from outrider.errors import InvalidRequest
from outrider.messages import SamplingParams

BAN_BIAS = -100.0
"""A bias this low or lower removes the token altogether."""


def validate(params: SamplingParams, vocab_len: int) -> None:
    """Refuse parameters that have no distribution, or that no float could carry.

    Args:
        params: as received from a client.
        vocab_len: length of the tokenizer's id range.

    Raises:
        InvalidRequest: names the first field that is wrong, its value and the allowed range.
    """
    _check("repetition_penalty", params.repetition_penalty, 0.01, 100.0)
    _check("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _check("temperature", params.temperature, 0.0, 100.0)
    if params.top_k < 0:
        raise InvalidRequest("sampling.top_k", params.top_k, "an integer >= 0; 0 keeps all")
    if not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest("sampling.top_p", params.top_p, "a number in (0, 1]")
    _check("min_p", params.min_p, 0.0, 1.0)
    _check_bias(params.logit_bias, vocab_len)
    _check_bans(params, vocab_len)


def _check(field: str, value: float, low: float, high: float) -> None:
    """Refuse a value outside [low, high]; NaN is outside of everything."""
    if not low <= value <= high:
        raise InvalidRequest(f"sampling.{field}", value, f"a number in [{low:g}, {high:g}]")


def _check_bias(logit_bias: Sequence[tuple[int, float]], vocab_len: int) -> None:
    """Refuse ids that do not exist or come twice, biases that are not finite, and a ban of the whole vocabulary."""
    for token, bias in logit_bias:
        if not 0 <= token < vocab_len:
            raise InvalidRequest("sampling.logit_bias", token, f"a token id in 0 .. {vocab_len - 1}")
        if not (math.isfinite(bias) and bias <= -BAN_BIAS):
            raise InvalidRequest("sampling.logit_bias", bias, f"a finite bias, at most {-BAN_BIAS:g}")
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
        raise InvalidRequest("sampling.min_tokens", params.min_tokens, "an integer >= 0")
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
        raise InvalidRequest("sampling.grammar", params.grammar.kind, allowed)
