"""From the body of a request to what is asked of the sessions.

Every request is encoded as gRPC's and decoded again: one set of checks, one set of ranges, for both doors.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from orchestrator.http.grammars import grammar_of, grammars
from orchestrator.http.invalid import missing, no_such_field, renamed
from orchestrator.http.schema import (
    IGNORED,
    MAX_ANSWERS,
    OF_ANSWERS,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    Content,
    Message,
    OutriderOptions,
    Part,
    Prediction,
    Sampled,
    Tool,
    ToolChoice,
)
from outrider.codec.generation import request_from_proto, request_to_proto
from outrider.errors import InvalidRequest, NotFound
from outrider.generation import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SpeculationChoice,
    TextPrediction,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from outrider.ids import Mode, SessionId
from outrider.messages import Grammar, GrammarKind, SamplingParams

COMPLETION_TOKENS = 16
"""Most tokens of a completion that does not say: OpenAI's default."""
TOOL_START, TOOL_END = "<tool_call>", "</tool_call>"
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How a call that must be made is written: as templates show it. In free white space a model could go on for ever."""

BodyT = TypeVar("BodyT", bound=Sampled)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as the sessions know it."""

    requests: tuple[GenerationRequest, ...]
    """One per answer: the samples of the first prompt, then those of the next."""
    num_samples: int
    """Answers per prompt."""
    streams: bool
    includes_usage: bool
    echoes: bool = False
    parses_calls: bool = False
    """Whether calls of tools are looked for in the text."""
    names: Mapping[str, str] = field(default_factory=dict)
    """By the sessions' names of fields: those the client used for what it sent."""


def chat_asked(body: ChatRequest, model: str, *, calls_known: bool) -> Asked:
    """Return what a chat completion asks for.

    Args:
        body: of the request.
        model: the served one.
        calls_known: whether it is known how the model writes calls of tools.

    Raises:
        InvalidRequest: a field is unknown, not supported, or has a value that is not allowed.
        NotFound: the model is not served here.
    """
    _check_model(body, model)
    _check_others(body)
    tools = body.tools if body.tool_choice != "none" else None
    stops = _stops(body)
    if body.parallel_tool_calls is False and tools and calls_known:
        stops = (*stops, TOOL_END)  # the first call is the last one
    request = replace(
        _common(body),
        prompt=_chat_prompt(body, tools),
        max_tokens=_max_tokens(body),
        stop=stops,
        num_logprobs=_chat_logprobs(body),
        prediction=_prediction(body.prediction),
    )
    forced = _forced_call(body, tools, calls_known=calls_known)
    if forced is not None:
        request = replace(request, sampling=replace(request.sampling, grammar=forced))
    return _asked(body, [request], parses_calls=bool(tools))


def completion_asked(body: CompletionRequest, model: str) -> Asked:
    """Return what a completion asks for.

    Raises:
        InvalidRequest: a field is unknown, not supported, or has a value that is not allowed.
        NotFound: the model is not served here.
    """
    _check_model(body, model)
    _check_others(body)
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    request = replace(
        _common(body),
        max_tokens=max_tokens,
        stop=_stops(body),
        num_logprobs=body.logprobs,
        prediction=_prediction(body.prediction),
    )
    if body.echo and request.num_prompt_logprobs is None and (body.logprobs is not None or not max_tokens):
        request = replace(request, num_prompt_logprobs=body.logprobs or 0)
    prompts = _prompts(body.prompt)
    return replace(_asked(body, [replace(request, prompt=prompt) for prompt in prompts]), echoes=bool(body.echo))


def _asked(body: Sampled, requests: list[GenerationRequest], **rest: Any) -> Asked:
    """Make one request per sample, and check them all."""
    num_samples = body.n or 1
    total = len(requests) * num_samples
    if total > MAX_ANSWERS:
        raise InvalidRequest("n", f"{total} answers", f"at most {MAX_ANSWERS}: prompts times n")
    if total > 1 and body.outrider.session_id:
        raise InvalidRequest("outrider.session_id", body.outrider.session_id, "nothing where several answers are asked")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "an object", "nothing where stream is not true")
    names = _names(body)
    checked = [_checked(request, names) for request in requests]
    samples = tuple(replace(each, sample_index=index) for each in checked for index in range(num_samples))
    includes_usage = body.stream_options is not None and body.stream_options.include_usage
    return Asked(samples, num_samples, bool(body.stream), includes_usage, names=names, **rest)


def _names(body: Sampled) -> dict[str, str]:
    """Return by which names a client has sent what goes to the sessions under another."""
    names = {"sampling.logit_bias": "logit_bias"}
    given = list(grammars(body))
    if given:
        names["sampling.grammar"] = given[0]
    if isinstance(body, ChatRequest):
        names |= {"logprobs": "top_logprobs", "prompt": "messages"}
        if body.tool_choice not in (None, "none", "auto"):
            names["sampling.grammar"] = "tools"  # of which the call that must be made is one
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    return names


def _checked(request: GenerationRequest, names: Mapping[str, str]) -> GenerationRequest:
    try:
        return request_from_proto(request_to_proto(request))
    except InvalidRequest as error:
        raise renamed(error, names) from error
    except (ValueError, TypeError) as error:  # protobuf's own: a value that its type cannot hold
        raise InvalidRequest("body", "a value", f"values that a request can hold ({error})") from error


# --- checks -------------------------------------------------------------------------------------------------------


def _check_model(body: Sampled, model: str) -> None:
    if body.model not in ("", model):
        raise NotFound(f"the model {body.model!r} is not served here; {model!r} is")


def _check_others(body: Sampled) -> None:
    """Refuse fields that are unknown or not supported."""
    for name, value in (body.model_extra or {}).items():
        if name in IGNORED:
            continue
        if name in REFUSED:
            harmless, why = REFUSED[name]
            if value not in harmless and not (name == "best_of" and value == (body.n or 1)):
                raise InvalidRequest(name, value, f"nothing: not supported ({why})")
            continue
        ours = (f"outrider.{each}" for each in OutriderOptions.model_fields)
        raise no_such_field(name, value, (*ours, *type(body).model_fields))


# --- parts of both ------------------------------------------------------------------------------------------------


def _common(body: Sampled) -> GenerationRequest:
    """Return all that does not depend on the kind of request; the prompt is to be replaced."""
    ours = body.outrider
    return GenerationRequest(
        prompt=TextPrompt(""),
        session_id=SessionId(ours.session_id),
        sampling=_sampling(body),
        seed=None if body.seed is None else body.seed % 2**64,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        mode=None if ours.mode == "auto" else Mode[ours.mode.upper()],
        speculation=SpeculationChoice(ours.off, ours.gamma, ours.restart_gamma, ours.window, ours.max_gamma),
        drafter=ours.drafter,
        num_prompt_logprobs=None if body.prompt_logprobs in (None, -1) else body.prompt_logprobs,
        processed_logprobs=ours.processed_logprobs,
        return_token_origin=ours.return_token_origin,
        request_id=ours.request_id,
        priority=_priority(body),
        max_wait_s=ours.max_wait_s,
        skip_special_tokens=body.skip_special_tokens,
    )


def _priority(body: Sampled) -> int:
    """Return who goes first, higher first; it may be said in one place only."""
    if body.priority is None:
        return body.outrider.priority
    if body.outrider.priority:
        raise InvalidRequest("priority", body.priority, "nothing beside outrider.priority")
    return -body.priority


def _sampling(body: Sampled) -> SamplingParams:
    def given(name: str, default: float) -> float:
        value: float | None = getattr(body, name)
        return default if value is None else value

    return SamplingParams(
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        min_tokens=body.min_tokens or 0,
        grammar=grammar_of(body),
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=given("presence_penalty", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        temperature=given("temperature", 1.0),
        top_k=0 if body.top_k in (None, -1) else body.top_k or 0,
        top_p=given("top_p", 1.0),
        min_p=given("min_p", 0.0),
    )


def _stops(body: Sampled) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _prediction(prediction: Prediction | None) -> TextPrediction | None:
    return None if prediction is None else TextPrediction(_said("prediction.content", prediction.content))


def _said(field: str, content: Content | None) -> str:
    """Return the text of a message, whose parts follow each other directly."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(f"{field}[{index}]", part) for index, part in enumerate(content))


def _part(field: str, part: Part) -> str:
    if part.type not in ("text", "refusal") or part.text is None:
        raise InvalidRequest(f"{field}.type", part.type, "text, with a text: no other kind of input is supported")
    return part.text


# --- completions --------------------------------------------------------------------------------------------------


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[TextPrompt | TokenPrompt]:
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if prompt and isinstance(prompt[0], int):
        return [TokenPrompt(tuple(token for token in prompt if isinstance(token, int)))]
    made: list[TextPrompt | TokenPrompt] = []
    for each in prompt:
        if isinstance(each, str):
            made.append(TextPrompt(each))
        elif isinstance(each, list):
            made.append(TokenPrompt(tuple(each)))
    if not made:
        raise InvalidRequest("prompt", [], "a prompt of at least one token")
    return made


# --- chats --------------------------------------------------------------------------------------------------------


def _max_tokens(body: ChatRequest) -> int | None:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens", body.max_tokens, "what max_completion_tokens says, or nothing")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _chat_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs", body.top_logprobs, "nothing where logprobs is not true")
        return None
    return body.top_logprobs or 0


def _chat_prompt(body: ChatRequest, tools: list[Tool] | None) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(_message(f"messages[{index}]", each) for index, each in enumerate(body.messages)),
        tools=_json(lambda: [tool.model_dump(exclude_none=True) for tool in tools or ()]) if tools else "",
        template_arguments=_json(lambda: body.chat_template_kwargs) if body.chat_template_kwargs else "",
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template or "",
        parse_special_tokens=body.outrider.parse_special_tokens,
    )


def _json(value: Callable[[], Any]) -> str:
    return json.dumps(value(), ensure_ascii=False)


def _message(field: str, message: Message) -> ChatMessage:
    for name, value in (message.model_extra or {}).items():
        if name not in OF_ANSWERS:
            raise no_such_field(f"{field}.{name}", value, Message.model_fields)
    calls = message.tool_calls or ()
    silent = message.role == "assistant" and (calls or message.reasoning_content)
    if message.content is None and not silent:
        raise missing(f"{field}.content", "a text; an assistant's message with tool_calls may do without")
    return ChatMessage(
        role=message.role,
        content=_said(f"{field}.content", message.content),
        name=message.name or "",
        tool_calls=tuple(ToolCall(call.function.name, call.function.arguments, call.id) for call in calls),
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or "",
    )


def _forced_call(body: ChatRequest, tools: list[Tool] | None, *, calls_known: bool) -> Grammar | None:
    """Return the grammar of the call that must be made; None: none must."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise InvalidRequest("tool_choice", _shown(choice), "nothing, none or auto where there are no tools")
    if not calls_known:
        raise InvalidRequest("tool_choice", _shown(choice), "none or auto: it is not known how this model writes calls")
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    allowed = [tool for tool in tools if named in (None, tool.function.name)]
    if not allowed:
        raise InvalidRequest("tool_choice.function.name", named, "the name of one of the tools")
    other = next(iter(grammars(body)), None)
    if other is not None:
        raise InvalidRequest(other, "a grammar", "nothing beside a tool_choice that makes the whole answer a call")
    calls = {"anyOf": [_call_schema(tool) for tool in allowed], "x-guidance": COMPACT}
    lark = f'start: "{TOOL_START}\\n" call "\\n{TOOL_END}"\ncall: %json {json.dumps(calls)}\n'
    return Grammar(GrammarKind.LARK, lark)


def _shown(choice: str | ToolChoice | None) -> object:
    """Return a choice as the client wrote it."""
    return choice.model_dump() if isinstance(choice, ToolChoice) else choice


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": tool.function.parameters or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
