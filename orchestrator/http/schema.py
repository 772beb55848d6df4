"""The bodies of requests, as OpenAI's API has them, with vLLM's further fields and ours.

Only shapes are checked here; ranges are checked where gRPC's requests are (`outrider.codec`), so that both doors refuse
the same. What is known and not listed here is in `IGNORED` and `REFUSED`; anything else is refused as unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)
from pydantic_core import core_schema

from outrider.codec.checks import MAX_INT, MAX_NAME_CHARS, MAX_PRIORITY

MAX_ANSWERS = 128
"""Most generations of one request: prompts times samples."""
INT64 = 2**63
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Within:
    """A range, told whole whichever end is passed."""

    low: int
    high: int
    what: str = "an integer"
    note: str = ""

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Check behind the type's own checks."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Show both ends in the schema."""
        return {**handler(schema), "minimum": self.low, "maximum": self.high}

    def _checked(self, value: float) -> float:
        if not self.low <= value <= self.high:
            raise ValueError(f"{self.what} in {self.low} .. {self.high}{self.note}")
        return value


Id = Annotated[StrictInt, Within(0, MAX_INT, "a token id")]
Each = Annotated[list[T], Field(fail_fast=True)]
"""A list in whose first bad member it ends: a million ids are no list of strings a million times over."""
Ids = Each[Id]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[StrictInt, Within(0, MAX_INT)]
Small = Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)]
Wide = Annotated[StrictInt, Field(ge=-INT64, lt=INT64)]
"""What the wire between the doors and the sessions can hold; the range of each field is checked there."""
Seed = Annotated[StrictInt, Within(-INT64, 2 * INT64 - 1)]
TopK = Annotated[StrictInt, Within(-1, MAX_INT, note="; 0 and -1 keep all")]
Answers = Annotated[StrictInt, Within(1, MAX_ANSWERS)]
Wait = Annotated[Number, Within(0, 86_400, "seconds")]
Priority = Annotated[StrictInt, Within(-MAX_PRIORITY, MAX_PRIORITY)]

IGNORED: Mapping[str, str] = {
    "user": "names the end user for others",
    "safety_identifier": "names the end user for others",
    "metadata": "labels for a store of answers that is not kept here",
    "store": "answers are not kept for later; sessions are",
    "service_tier": "there is one",
    "prompt_cache_key": "the KV of equal beginnings is reused by itself",
    "prompt_cache_retention": "the KV of equal beginnings is reused by itself",
    "spaces_between_special_tokens": "special tokens are written as the tokenizer writes them",
}
"""Fields that change nothing here, and why."""

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "text alone is generated"),
    "modalities": ((["text"],), "text alone is generated"),
    "functions": ((), "deprecated; use tools"),
    "function_call": ((), "deprecated; use tool_choice"),
    "web_search_options": ((), "nothing is searched for"),
    "reasoning_effort": ((), "use chat_template_kwargs, where the model's template has such a variable"),
    "verbosity": (("medium",), "say it in the prompt"),
    "suffix": (("",), "text is continued, not filled in"),
    "use_beam_search": ((False,), "answers are sampled"),
    "length_penalty": ((1, 1.0), "answers are sampled"),
    "early_stopping": ((False,), "answers are sampled"),
    "bad_words": (([],), "use logit_bias, by token id"),
    "include_stop_str_in_output": ((False,), "a stop string is not part of the text"),
    "truncate_prompt_tokens": ((), "shorten the prompt before it is sent"),
    "documents": (([],), "write them into messages"),
    "best_of": ((1,), "use n; what came out best is for the client to choose"),
    "guided_decoding_backend": ((), "there is one"),
    "guided_whitespace_pattern": ((), "a grammar can say it"),
    "mm_processor_kwargs": ((), "text alone is read"),
}
"""Fields that would change the answer and are not supported: values that mean nothing, and what to do instead."""

OF_ANSWERS = (
    "refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_details", "thinking_blocks", "parsed",
    "provider_specific_fields", "id", "status", "cache_control",
)  # fmt: skip
"""Fields of messages that servers and client packages add to answers, and that come back with them: ignored."""


def _of_answers(schema: dict[str, Any]) -> None:
    """Show in the schema that nothing else is taken, and what of an earlier answer is taken and ignored."""
    schema["additionalProperties"] = False
    properties = schema.get("properties")
    if isinstance(properties, dict):
        properties.update({name: {"description": "Ignored."} for name in OF_ANSWERS})


def _with_known(schema: dict[str, Any]) -> None:
    """Show in the schema that nothing else is taken, and what is taken and ignored."""
    schema["additionalProperties"] = False
    properties = schema.get("properties")
    if isinstance(properties, dict):
        properties.update({name: {"description": f"Ignored: {why}."} for name, why in IGNORED.items()})


class Nullable(BaseModel):
    """An object in which null means the same as leaving the field out."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Strict(Nullable):
    """An object without further fields."""

    model_config = ConfigDict(extra="forbid")


class Loose(Nullable):
    """An object whose further fields mean nothing here."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(Strict):
    """How a stream is told."""

    include_usage: StrictBool = False
    """Whether a last chunk without choices brings the usage of the whole request."""
    include_obfuscation: StrictBool = False
    """Ignored."""


class OutriderOptions(Strict):
    """What only Outrider knows."""

    drafter: StrictStr = ""
    """Kind of drafter, or label of draft workers; empty: any."""
    mode: Literal["auto", "greedy", "coupled", "rejection", "block"] = "auto"
    """How drafts are verified."""
    off: StrictBool = False
    """Decode without drafts."""
    gamma: Small | None = None
    """Tokens per proposal; unset: measured."""
    restart_gamma: Small | None = None
    """Tokens of the first proposal after a rollback; unset: measured."""
    window: Small | None = None
    """Most tokens the drafter may be ahead; needs gamma."""
    max_gamma: Small | None = None
    """Most tokens per proposal where gamma is measured."""
    session_id: StrictStr = ""
    """Session to continue: the input is appended to its log. Empty: a new one."""
    request_id: Annotated[StrictStr, Field(max_length=64)] = ""
    """The client's own name for this request, by which a repeat of a turn is known."""
    return_token_origin: StrictBool = False
    """Whether chunks say of each token its id, its text and where it came from."""
    processed_logprobs: StrictBool = False
    """Whether log-probabilities are of what was sampled from, instead of the model's own."""
    priority: Priority = 0
    """Who goes first where places are scarce, -8 .. 8; higher first."""
    max_wait_s: Wait | None = None
    """Longest wait for a place; unset: the server's."""
    parse_special_tokens: StrictBool = False
    """Whether special tokens written in messages are taken as such, instead of as plain text."""


class StructuredOutputs(Strict):
    """What the whole answer must match; exactly one is set."""

    json_: Annotated[dict[str, Any] | StrictStr | None, Field(alias="json")] = None
    """A JSON schema."""
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    grammar: StrictStr | None = None
    """In Lark's dialect of EBNF, from the rule `start`."""
    json_object: StrictBool | None = None
    """Any JSON object."""


class Sampled(Nullable):
    """What chat and completion requests have in common."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_with_known)

    model: Annotated[StrictStr, Field(max_length=MAX_NAME_CHARS)] = ""
    """Name of the model; empty: the served one."""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Answers | None = None
    """Answers to give; with a seed each is repeatable by itself."""
    max_tokens: Wide | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Seed | None = None
    stop: StrictStr | list[StrictStr] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Number] | None = None
    """By token id."""

    priority: Priority | None = None
    """As vLLM's, lower first: the negative of `outrider.priority`."""
    top_k: TopK | None = None
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Count | None = None
    ignore_eos: StrictBool = False
    stop_token_ids: Ids | None = None
    allowed_token_ids: Ids | None = None
    prompt_logprobs: Small | None = None
    """Likeliest tokens to report with each log-probability of the prompt; -1 or unset: none."""
    skip_special_tokens: StrictBool = True
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: list[StrictStr] | None = None
    guided_grammar: StrictStr | None = None
    structured_outputs: StructuredOutputs | None = None
    outrider: OutriderOptions = OutriderOptions()


class Part(Loose):
    """A part of a message."""

    type: StrictStr
    text: StrictStr | None = None


Content = StrictStr | list[Part]


class CalledFunction(Loose):
    """The function that a call names."""

    name: StrictStr
    arguments: StrictStr = ""


class Call(Loose):
    """A call that the assistant made."""

    id: StrictStr = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Nullable):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_of_answers)

    role: StrictStr
    content: Content | None = None
    name: StrictStr | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    """What the assistant thought before it spoke."""


class Function(Loose):
    """A function that the model may call."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: StrictBool | None = None


class Tool(Loose):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Loose):
    """The name of a function."""

    name: StrictStr


class ToolChoice(Loose):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Strict):
    """A named JSON schema."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Strict):
    """What the answer is expected to be."""

    type: Literal["content"]
    content: Content


class ChatRequest(Sampled):
    """Body of a chat completion."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Wide | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Small | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    prediction: Prediction | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    include_reasoning: StrictBool = True
    """Whether what the model thinks is told apart from its answer; if not, it is left out."""


class CompletionRequest(Sampled):
    """Body of a completion."""

    prompt: StrictStr | Each[StrictStr] | Ids | Each[Ids]
    echo: StrictBool | None = None
    logprobs: Small | None = None
    """Likeliest tokens to report with each token's log-probability."""
    prediction: Prediction | None = None
