"""Whether the wire can carry what a request holds: what an encoder refuses without a name is refused by name before it.

Types and signs are checked here, on the client's side, since no message can hold a wrong one; everything else is the
server's to check (`request_from_proto`), with what it knows of models and limits.
"""

import json
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

from outrider.codec.checks import CLIENT, MAX_INT, MAX_PRIORITY
from outrider.generation import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SpeculationChoice,
    TextPrediction,
    TextPrompt,
    TokenPrediction,
    TokenPrompt,
)
from outrider.ids import Mode
from outrider.messages import Grammar, GrammarKind, SamplingParams
from outrider.parameters import BIAS, MAX_TOKENS, RANGES

MAX_SEED = 2**64 - 1
MAX_WAIT_S = 10**9
"""Longest wait that is sent; what a server allows is less."""

TEXTS = ("model", "session_id", "drafter", "request_id")
FLAGS = ("ignore_eos", "processed_logprobs", "return_token_origin", "skip_special_tokens")
FIGURES = ("gamma", "restart_gamma", "window", "max_gamma")


def require_fitting(request: GenerationRequest) -> None:
    """Refuse the first field whose value has a type, or a sign, that its field of the message cannot hold.

    Raises:
        InvalidRequest: there is one; it names the field and what is allowed there.
    """
    for name in TEXTS:
        _text(name, getattr(request, name))
    for name in FLAGS:
        _flag(name, getattr(request, name))
    _whole_if_set("max_tokens", request.max_tokens, allowed=MAX_TOKENS)
    _whole_if_set("logprobs", request.num_logprobs)
    _whole_if_set("prompt_logprobs", request.num_prompt_logprobs)
    _whole_if_set("seed", request.seed, MAX_SEED)
    _whole("sample_index", request.sample_index)
    _whole("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _require_wait(request.max_wait_s)
    _each("stop", request.stop, _text)
    _each("stop_token_ids", request.stop_token_ids, _whole)
    names = ", ".join(mode.name.lower() for mode in Mode)
    CLIENT.require(request.mode is None or isinstance(request.mode, Mode), "mode", request.mode, f"one of {names}")
    _require_speculation(request.speculation)
    _require_sampling(request.sampling)
    _require_input(request)


def _require_wait(max_wait_s: Any) -> None:
    if max_wait_s is not None:
        _number("max_wait_s", max_wait_s)
        CLIENT.number("max_wait_s", max_wait_s, 0, MAX_WAIT_S)


def _require_speculation(choice: Any) -> None:
    allowed = 'a SpeculationChoice, or "off"'
    CLIENT.require(isinstance(choice, SpeculationChoice), "speculation", choice, allowed)
    _flag("speculation.off", choice.off)
    for name in FIGURES:
        _whole_if_set(f"speculation.{name}", getattr(choice, name))


def _require_sampling(sampling: SamplingParams) -> None:
    for name, allowed in RANGES.items():
        if name != "top_k":
            _number(f"sampling.{name}", getattr(sampling, name), allowed.allowed)
    _whole("sampling.top_k", sampling.top_k, allowed=RANGES["top_k"].allowed)
    _whole("sampling.min_tokens", sampling.min_tokens)
    _each("sampling.allowed_token_ids", sampling.allowed_token_ids, _whole)
    for token, bias in sampling.logit_bias:
        _whole("sampling.logit_bias", token)
        _number("sampling.logit_bias", bias, BIAS)
    if sampling.grammar is not None:
        _require_grammar(sampling.grammar)


def _require_grammar(grammar: Grammar) -> None:
    field = f"sampling.grammar.{grammar.kind}"
    _text(field, grammar.text)
    if grammar.kind is GrammarKind.CHOICES:
        try:
            texts = json.loads(grammar.text)
        except ValueError:
            texts = None
        CLIENT.require(isinstance(texts, list), field, grammar.text, "a list of texts")
        _each(field, texts, _text)


def _require_input(request: GenerationRequest) -> None:
    """Check the prompt, and what its answer is expected to be."""
    match request.prompt:
        case TextPrompt(text):
            _text("text", text)
        case TokenPrompt(token_ids):
            _each("token_ids", token_ids, _whole)
        case ChatPrompt() as chat:
            _require_chat(chat)
    match request.prediction:
        case None:
            pass
        case TextPrediction(text):
            _text("prediction.text", text)
        case TokenPrediction(token_ids):
            _each("prediction.token_ids", token_ids, _whole)


def _require_chat(chat: ChatPrompt) -> None:
    for name in ("tools", "template_arguments", "chat_template"):
        _text(f"chat.{name}", getattr(chat, name))
    for name in ("continue_final_message", "parse_special_tokens"):
        _flag(f"chat.{name}", getattr(chat, name))
    if chat.add_generation_prompt is not None:
        _flag("chat.add_generation_prompt", chat.add_generation_prompt)
    for index, message in enumerate(chat.messages):
        _require_message(f"chat.messages[{index}]", message)


def _require_message(at: str, message: ChatMessage) -> None:
    for name in ("role", "content", "name", "tool_call_id", "reasoning"):
        _text(f"{at}.{name}", getattr(message, name))
    for index, call in enumerate(message.tool_calls):
        for name in ("name", "arguments", "id"):
            _text(f"{at}.tool_calls[{index}].{name}", getattr(call, name))


# --- values ---------------------------------------------------------------------------------------------------------


def _text(field: str, value: Any) -> None:
    CLIENT.require(isinstance(value, str), field, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CLIENT.fault(field, ascii(value), "valid Unicode, without half surrogate pairs") from None


def _flag(field: str, value: Any) -> None:
    CLIENT.require(isinstance(value, bool), field, value, "true or false")


def _number(field: str, value: Any, allowed: str = "a number") -> None:
    CLIENT.require(isinstance(value, Real) and not isinstance(value, bool), field, value, allowed)


def _whole(field: str, value: Any, low: int = 0, high: int = MAX_INT, allowed: str = "") -> None:
    allowed = allowed or f"an integer in {low} .. {high}"
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    CLIENT.require(is_whole and low <= value <= high, field, value, allowed)


def _whole_if_set(field: str, value: Any, high: int = MAX_INT, allowed: str = "") -> None:
    if value is not None:
        _whole(field, value, 0, high, allowed)


def _each(field: str, values: Iterable[Any], check: Callable[[str, Any], None]) -> None:
    if isinstance(values, tuple) and set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_INT:
        return  # a prompt may have a million
    for index, value in enumerate(values):
        check(f"{field}[{index}]", value)
