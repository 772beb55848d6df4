"""What a request may ask of the served model: the checks that need its vocabulary and context, and the choice of mode.

`outrider.codec.generation` has checked everything else before.
"""

import secrets
from dataclasses import dataclass, replace

from outrider.errors import InvalidRequest
from outrider.generation import GenerationRequest
from outrider.ids import Mode
from outrider.messages import Vocabulary
from outrider.noise import KEY_BYTES, seed_key
from outrider.parameters import MAX_TOKENS, validate


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request that does not say gets."""

    max_tokens: int = 0
    """Most tokens to generate; 0: as many as the context holds."""
    unseeded_mode: Mode = Mode.REJECTION
    """`REJECTION` or `BLOCK`."""
    trust_drafters: bool = True
    """False: unseeded requests are coupled to a fresh random key, where a drafter that lies changes nothing."""


def with_ends(request: GenerationRequest, end_ids: frozenset[int]) -> GenerationRequest:
    """Return a request whose parameters know what ends its output.

    Args:
        request: as a client sent it.
        end_ids: the model's end-of-sequence ids.
    """
    sampling = request.sampling
    ending = {*request.stop_token_ids, *(() if request.ignore_eos else end_ids)}
    return replace(
        request,
        sampling=replace(
            sampling,
            end_token_ids=tuple(sorted(ending)) if sampling.min_tokens else (),
            grammar_end_ids=tuple(sorted(end_ids)) if sampling.grammar is not None else (),
        ),
    )


def check(request: GenerationRequest, vocabulary: Vocabulary) -> None:
    """Check a request against a vocabulary.

    Raises:
        InvalidRequest: an id is past the vocabulary, a sampling parameter has no distribution, or a seed contradicts
            the mode.
    """
    size = vocabulary.size
    prompt_ids = getattr(request.prompt, "token_ids", ())
    bias_ids = [token_id for token_id, _ in request.sampling.logit_bias]
    for field, ids in (
        ("token_ids", prompt_ids),
        ("stop_token_ids", request.stop_token_ids),
        ("prediction.token_ids", getattr(request.prediction, "token_ids", ())),
        ("sampling.logit_bias.token_id", bias_ids),
    ):
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < size:
                raise InvalidRequest(f"{field}[{index}]", token_id, f"a token id in 0 .. {size - 1}")
    validate(request.sampling, size)
    _check_together(request)
    if request.mode in (Mode.REJECTION, Mode.BLOCK) and request.seed is not None:
        allowed = f"no seed in mode {request.mode.name}, whose text depends on timing; use COUPLED"
        raise InvalidRequest("seed", request.seed, allowed)


def _check_together(request: GenerationRequest) -> None:
    """Refuse fields that contradict each other."""
    sampling, most = request.sampling, request.max_tokens
    if most is not None and sampling.min_tokens > most:
        raise InvalidRequest("sampling.min_tokens", sampling.min_tokens, f"an integer in 0 .. max_tokens ({most})")
    if most == 0 and request.num_prompt_logprobs is None:
        raise InvalidRequest("max_tokens", most, MAX_TOKENS)
    if request.processed_logprobs and request.num_logprobs is None:
        raise InvalidRequest("processed_logprobs", True, "false without logprobs")
    if request.ignore_eos and sampling.grammar is not None:
        raise InvalidRequest("ignore_eos", True, "false beside a grammar, whose output has an end")


def check_length(
    prompt_len: int, max_tokens: int | None, context_len: int, defaults: Defaults, min_tokens: int = 0
) -> int:
    """Return how many tokens to generate at most.

    Args:
        prompt_len: tokens of the prompt, earlier turns included.
        max_tokens: what was asked for.
        context_len: most tokens of a session.
        defaults: for a request that does not say.
        min_tokens: that are generated at least.

    Raises:
        InvalidRequest: the prompt leaves no room, or too little.
    """
    if prompt_len >= context_len:
        raise InvalidRequest("prompt", f"{prompt_len} tokens", f"1 .. {context_len - 1} tokens, earlier turns included")
    if max_tokens is not None and max_tokens < 0:
        raise InvalidRequest("max_tokens", max_tokens, MAX_TOKENS)
    room = context_len - prompt_len
    most = min(room, defaults.max_tokens or room if max_tokens is None else max_tokens)
    if min_tokens > most:
        raise InvalidRequest(
            "sampling.min_tokens", min_tokens, f"an integer in 0 .. {most}, the most that is generated"
        )
    return most


def choose_mode(request: GenerationRequest, defaults: Defaults) -> Mode:
    """Return the request's mode, or what AUTO picks for it."""
    if request.mode is not None:
        return request.mode
    if request.sampling.temperature == 0.0:
        return Mode.GREEDY
    if request.seed is not None or not defaults.trust_drafters:
        return Mode.COUPLED
    return defaults.unseeded_mode


def session_key(mode: Mode, seed: int | None) -> bytes:
    """Return the key of all the session's randomness: the seed's, or a fresh one; none in greedy mode."""
    if mode is Mode.GREEDY:
        return b""
    if mode is Mode.COUPLED and seed is not None:
        return seed_key(seed)
    return secrets.token_bytes(KEY_BYTES)
