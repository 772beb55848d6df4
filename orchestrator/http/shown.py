"""Shapes of responses, for the schema alone: responses are built as they are sent, and not checked against these."""

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class Usage(BaseModel):
    """What was consumed, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class Choice(BaseModel):
    """One answer."""

    index: int
    finish_reason: str
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None


class ChatMessageShown(BaseModel):
    """What the assistant said."""

    role: str
    content: str | None


class ChatChoice(Choice):
    """One answer of a chat."""

    message: ChatMessageShown


class TextChoice(Choice):
    """One continuation of a text."""

    text: str


class Whole(BaseModel):
    """A response."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage
    system_fingerprint: str | None
    outrider: dict[str, Any]


class ChatCompletion(Whole):
    """The answers of a chat."""

    choices: list[ChatChoice]


class Completion(Whole):
    """The continuations of texts."""

    choices: list[TextChoice]


class ModelShown(BaseModel):
    """A model that can be asked for."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    outrider: dict[str, Any]


class ModelsShown(BaseModel):
    """All models that can be asked for."""

    object: str
    data: list[ModelShown]


class HealthShown(BaseModel):
    """Whether requests are served."""

    status: str
    reason: str = ""


_MEANINGS: dict[int | str, str] = {
    400: "A field is unknown, not supported, or out of range; `param` names it.",
    401: "No API key, or one that is not valid.",
    404: "No such model or session.",
    409: "Another generation of the session is under way, or this one was called off.",
    413: "The body is too large.",
    "4XX": "Another error of the client's.",
    429: "A limit of the key, or no room; `retry-after` says when to try again.",
    500: "A defect; the server's log knows more.",
    503: "Not serving now; `retry-after` says when to try again.",
    504: "A deadline passed.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()
}
"""Errors of every route that generates, for the schema."""
