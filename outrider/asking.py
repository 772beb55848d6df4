"""Requests from keyword arguments, and whole answers from events: what the clients add for people.

    request_of("Once upon a time", max_tokens=20, temperature=0)
    request_of([{"role": "user", "content": "Hello"}], tools=[...], seed=7)

Nothing here knows about the wire; types are checked where requests are encoded, ranges by the server.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

from outrider.errors import InvalidRequest, ProtocolError
from outrider.generation import (
    ChatMessage,
    ChatPrompt,
    Chunk,
    Figures,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Notice,
    PromptLogprobs,
    SpeculationChoice,
    Started,
    TextPrediction,
    TextPrompt,
    TokenPrediction,
    TokenPrompt,
    ToolCall,
    Usage,
)
from outrider.ids import FinishReason, Mode, SessionId, TokenKind
from outrider.messages import Grammar, GrammarKind, SamplingParams, TokenLogprobs

MAX_SAMPLES = 128
"""Most samples of one request."""

Message = ChatMessage | Mapping[str, Any]
"""A message of a conversation; a mapping has the shape of OpenAI's API, with text as its content."""
Prompt = str | Sequence[int] | Sequence[Message] | TextPrompt | TokenPrompt | ChatPrompt | GenerationRequest
"""What to continue or answer: text, token ids, the messages of a conversation, or a request as it is."""
ModeName = Literal["auto", "greedy", "coupled", "rejection", "block"]
Json = Mapping[str, Any] | str
"""A JSON object, as one or as text."""


class Parameters(TypedDict, total=False):
    """Everything that can be asked for beside the prompt; what is left out is the server's choice.

    Names and ranges are those of `GenerationRequest`, `SamplingParams` and `ChatPrompt`, except as said.
    """

    model: str
    session_id: str
    """The prompt is the session's next turn."""
    max_tokens: int | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    mode: Mode | ModeName | None
    """Also by its name in small letters; None, like "auto", follows from temperature and seed."""
    speculation: SpeculationChoice | Literal["off"]
    drafter: str
    logprobs: int | None
    """`num_logprobs` of the request."""
    prompt_logprobs: int | None
    """`num_prompt_logprobs` of the request."""
    processed_logprobs: bool
    return_token_origin: bool
    sample_index: int
    request_id: str
    prediction: str | Sequence[int] | None
    """What the answer is expected to be, as text or ids."""
    priority: int
    max_wait_s: float | None
    skip_special_tokens: bool

    logit_bias: Mapping[int, float]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    allowed_token_ids: Sequence[int]
    min_tokens: int

    json_schema: Json
    """A grammar: a JSON schema that the output matches. At most one of four."""
    regex: str
    """A grammar: a regular expression."""
    lark: str
    """A grammar: rules in Lark's EBNF."""
    choices: Sequence[str]
    """A grammar: one of these texts is the output."""

    tools: Sequence[Mapping[str, Any]] | str
    """Only with a conversation, like all that follows."""
    template_arguments: Json
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template: str
    parse_special_tokens: bool


GRAMMARS = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "lark": GrammarKind.LARK,
    "choices": GrammarKind.CHOICES,
}
MODES = {mode.name.lower(): mode for mode in Mode}
IDS = "token ids"
PROMPTS = "text, token ids, or messages that are objects"
RENAMED = {"logprobs": "num_logprobs", "prompt_logprobs": "num_prompt_logprobs"}
SAMPLING = frozenset(entry.name for entry in dataclasses.fields(SamplingParams)) & Parameters.__annotations__.keys()
CHAT = frozenset(entry.name for entry in dataclasses.fields(ChatPrompt)) & Parameters.__annotations__.keys()


def request_of(prompt: Prompt, parameters: Parameters) -> GenerationRequest:
    """Return the request that a prompt and parameters make; of a request given as the prompt, parameters change fields.

    Raises:
        InvalidRequest: a parameter is unknown, is given twice in different ways, or needs another prompt.
    """
    unknown = parameters.keys() - Parameters.__annotations__.keys()
    if unknown:
        allowed = f"one of {', '.join(sorted(Parameters.__annotations__))}"
        raise InvalidRequest("parameters", ", ".join(sorted(unknown)), allowed)
    given: dict[str, Any] = dict(parameters)
    request = prompt if isinstance(prompt, GenerationRequest) else GenerationRequest(_prompt(prompt))
    chat = {name: _json_text(name, given.pop(name)) for name in CHAT & given.keys()}
    if chat:
        if not isinstance(request.prompt, ChatPrompt):
            raise InvalidRequest(", ".join(sorted(chat)), "given", "nothing, unless the prompt is a conversation")
        request = replace(request, prompt=replace(request.prompt, **chat))
    return replace(request, sampling=_sampling(request.sampling, given), **{
        RENAMED.get(name, name): _field(name, value) for name, value in given.items()
    })  # fmt: skip


def _sampling(sampling: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    """Take what concerns sampling out of the parameters."""
    changes = {name: given.pop(name) for name in SAMPLING & given.keys()}
    if "logit_bias" in changes:
        changes["logit_bias"] = _biases(changes["logit_bias"])
    if "allowed_token_ids" in changes:
        changes["allowed_token_ids"] = _several("sampling.allowed_token_ids", changes["allowed_token_ids"], IDS)
    grammars = [(name, given.pop(name)) for name in GRAMMARS if name in given]
    if len(grammars) > 1:
        raise InvalidRequest(", ".join(name for name, _ in grammars), "given", "at most one of them")
    for name, text in grammars:
        changes["grammar"] = Grammar(GRAMMARS[name], _grammar(name, text))
    return replace(sampling, **changes)


def _field(name: str, value: Any) -> Any:
    """Return a parameter as the request has it."""
    match name, value:
        case "stop", str():
            return (value,)
        case "stop", _:
            return _several(name, value, "a text, or several")
        case "stop_token_ids", _:
            return _several(name, value, IDS)
        case "mode", str():
            return _mode(value)
        case "speculation", "off":
            return SpeculationChoice(off=True)
        case "prediction", str():
            return TextPrediction(value)
        case "prediction", None:
            return None
        case "prediction", _:
            return TokenPrediction(_several(name, value, f"text, or {IDS}"))
        case "session_id", _:
            return SessionId(value)
        case _:
            return value


def _several(field: str, value: Any, allowed: str) -> tuple[Any, ...]:
    """Return what can be gone through, and is no text, as a tuple."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        raise InvalidRequest(field, value, allowed)
    return tuple(value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(dict(value).items())
    except (TypeError, ValueError):
        raise InvalidRequest("sampling.logit_bias", value, "biases by token id") from None


def _mode(name: str) -> Mode | None:
    if name == "auto":
        return None
    if name not in MODES:
        raise InvalidRequest("mode", name, f"one of auto, {', '.join(MODES)}")
    return MODES[name]


def _prompt(prompt: Any) -> TextPrompt | TokenPrompt | ChatPrompt:
    if isinstance(prompt, TextPrompt | TokenPrompt | ChatPrompt):
        return prompt
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    parts = list(_several("prompt", prompt, PROMPTS))
    if parts and all(isinstance(part, ChatMessage | Mapping) for part in parts):
        return ChatPrompt(tuple(_message(index, part) for index, part in enumerate(parts)))
    if all(isinstance(part, int) for part in parts):
        return TokenPrompt(tuple(parts))
    raise InvalidRequest("prompt", prompt, PROMPTS)


def _message(index: int, message: Message) -> ChatMessage:
    """Return a message of OpenAI's shape as ours."""
    if isinstance(message, ChatMessage):
        return message
    names = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}
    unknown = message.keys() - names
    if unknown or "role" not in message:
        allowed = f"a role, and of the others {', '.join(sorted(names))}"
        raise InvalidRequest(f"messages[{index}]", ", ".join(sorted(unknown)) or "no role", allowed)
    calls = _several(f"messages[{index}].tool_calls", message.get("tool_calls") or (), "calls of tools")
    content = message.get("content")
    if content is None and calls and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        allowed = "text, which may be missing only beside tool_calls of an assistant"
        raise InvalidRequest(f"messages[{index}].content", content, allowed)
    return ChatMessage(
        role=message["role"],
        content=content,
        name=message.get("name") or "",
        tool_calls=tuple(_call(index, call) for call in calls),
        tool_call_id=message.get("tool_call_id") or "",
        reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
    )


def _call(index: int, call: Any) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function") or {} if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"messages[{index}].tool_calls", call, "objects with a function that has a name")
    return ToolCall(
        function.get("name", ""),
        _json_text(f"messages[{index}].tool_calls", function.get("arguments") or ""),
        call.get("id") or "",
    )


def _grammar(name: str, value: Any) -> Any:
    """Return a grammar as text: a schema may be a value of JSON, choices have to be several texts."""
    match name, value:
        case "choices", _:
            return _dumped(name, _several(name, value, "several texts"))
        case "json_schema", str():
            return value
        case "json_schema", _:
            return _dumped(name, value)
        case _:
            return value


def _json_text(field: str, value: Any) -> Any:
    """Return JSON as text; texts and truth values stay."""
    return value if value is None or isinstance(value, str | bool) else _dumped(field, value)


def _dumped(field: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise InvalidRequest(field, value, "what JSON can say") from None


# --- answers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole generation."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    session_id: SessionId
    """For a next turn, or to look at."""
    prompt_len: int
    """Tokens of the prompt, earlier turns included."""
    matched: str = ""
    """The stop string, or the stop id as a number, that ended it; else empty."""
    kinds: tuple[TokenKind, ...] = ()
    """Where each token came from, if that was asked for."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One per token of the prompt, if they were asked for; None for the first."""
    notices: tuple[Notice, ...] = ()
    """What went on slower than it should."""
    usage: Usage = field(default_factory=Usage)
    figures: Figures = field(default_factory=Figures)
    mode: Mode | None = None
    exactness: str = "bitwise"
    """"bitwise" or "distribution"."""
    model: str = ""

    def __str__(self) -> str:
        """Return the text."""
        return self.text


def answer_of(events: Iterable[GenerationEvent]) -> Answer:
    """Put the events of a whole generation together.

    Raises:
        ProtocolError: there is no beginning, or no end.
    """
    parts: dict[type, list[Any]] = {kind: [] for kind in (Started, Chunk, Notice, PromptLogprobs, Finished)}
    for event in events:
        parts[type(event)].append(event)
    chunks: list[Chunk] = parts[Chunk]
    if not parts[Started] or not parts[Finished]:
        raise ProtocolError("a generation without a beginning or an end")
    started, finished = parts[Started][0], parts[Finished][-1]
    prompt = {part.start: part.logprobs for part in parts[PromptLogprobs]}  # told again by a resumed stream
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=finished.reason,
        session_id=started.session_id,
        prompt_len=started.prompt_len,
        matched=finished.matched,
        kinds=tuple(kind for chunk in chunks for kind in chunk.kinds),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        prompt_logprobs=tuple(entry for start in sorted(prompt) for entry in prompt[start]),
        notices=tuple(parts[Notice]),
        usage=finished.usage,
        figures=finished.figures,
        mode=started.mode,
        exactness=started.exactness,
        model=started.model,
    )


def samples_of(request: GenerationRequest, count: int) -> list[GenerationRequest]:
    """Return the requests of several samples of one.

    Raises:
        InvalidRequest: the count is out of range, or the request continues a session, which has one turn at a time.
    """
    if not 1 <= count <= MAX_SAMPLES:
        raise InvalidRequest("n", count, f"an integer in 1 .. {MAX_SAMPLES}")
    if request.session_id:
        raise InvalidRequest("session_id", request.session_id, "nothing: a session has one turn at a time")
    return [replace(request, sample_index=index) for index in range(count)]
