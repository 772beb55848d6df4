"""What is wrong with a body, said to whoever wrote it: the field by its name, what it holds, what it may hold."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from orchestrator.http.schema import (
    JsonSchema,
    OutriderOptions,
    Prediction,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
)
from outrider.errors import InvalidRequest

STRICT: Mapping[str, type[BaseModel]] = {
    "json_schema": JsonSchema,
    "outrider": OutriderOptions,
    "prediction": Prediction,
    "response_format": ResponseFormat,
    "stream_options": StreamOptions,
    "structured_outputs": StructuredOutputs,
}
"""By the field that holds one: objects without further fields."""

ALLOWED: Mapping[str, str] = {
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "too_short": "at least {min_length} of them",
    "string_too_long": "at most {max_length} characters",
}
"""By pydantic's kind of error: what is expected. Where its own words are good enough they stay."""

PARAMS = {
    "text": "prompt",
    "token_ids": "prompt",
    "input": "prompt",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_arguments": "chat_template_kwargs",
    "chat.chat_template": "chat_template",
    "chat.continue_final_message": "continue_final_message",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat": "messages",
    "max_wait": "outrider.max_wait_s",
    "priority": "outrider.priority",
    "processed_logprobs": "outrider.processed_logprobs",
    "speculation": "outrider",
    "mode": "outrider.mode",
    "drafter": "outrider.drafter",
    "session_id": "outrider.session_id",
    "request_id": "outrider.request_id",
    "sample_index": "n",
    "prediction.text": "prediction.content",
}
"""First parts of the names of gRPC's fields, and what the same are called here; "sampling." is left out."""

_OF_MESSAGES = re.compile(r"(tool_calls\[\d+\])\.(name|arguments)$|\.reasoning$")
"""Fields of messages that have another name, or place, here."""

MAX_SHOWN = 200
"""Characters of a name that are shown, of names that a client made up."""
_LABEL = re.compile(r"^(str|int|float|bool|none)$|[\[\]()\-]|^[A-Z]")
"""What the place of an error has for the members of a union; a field's name never looks like that."""
_WORDS = re.compile(r"^(Value error, |Input should be |String should (have )?)")

Found = Mapping[str, Any]


def no_such_field(field: str, value: object, known: Iterable[str]) -> InvalidRequest:
    """Return the error of a field that does not exist: with the nearest one that does."""
    if len(field) > MAX_SHOWN:
        field = f"{field[:MAX_SHOWN]}…"
    last = {each.rpartition(".")[2]: each for each in known}
    close = difflib.get_close_matches(field.rpartition(".")[2], list(last), 1)
    advice = f"; did you mean {last[close[0]]}?" if close else ""
    error = InvalidRequest(field, value, "nothing")
    return InvalidRequest.rebuild(f"{field}: there is no such field{advice}", error.metadata())


def invalid(errors: Sequence[Found], content_type: str = "application/json") -> InvalidRequest:
    """Return the first of the errors that a body or a parameter has.

    Args:
        errors: as pydantic tells them.
        content_type: what the client says the body is.
    """
    first = _deepest(errors)
    if first["type"] == "json_invalid":
        return InvalidRequest("body", f"character {first['loc'][-1]}", f"JSON ({first['ctx']['error']})")
    if isinstance(first.get("input"), bytes):
        return InvalidRequest("content-type", content_type, "application/json")
    if first["type"] == "extra_forbidden":
        *holders, name = first["loc"]
        field = f"{_field(holders)}.{name}"
        return no_such_field(field, first.get("input"), _names(STRICT[holders[-1]]))
    field = _field(first["loc"])
    if first["type"] == "missing":
        return missing(field or "body", "a value" if field else "a JSON object")
    # A field that may be of several kinds has an error for each of them.
    allowed = dict.fromkeys(_allowed(error) for error in errors if _field(error["loc"]) == field)
    return InvalidRequest(field or "body", first.get("input"), " or ".join(allowed))


def _deepest(errors: Sequence[Found]) -> Found:
    """Return the error to tell: of what may be of several kinds, that of the kind which fits furthest."""
    same = (error for error in errors if error["loc"][:2] == errors[0]["loc"][:2])
    return max(same, key=lambda error: len(_place(error["loc"])))


def missing(field: str, allowed: str) -> InvalidRequest:
    """Return the error of a field that is not there, or null, and may not be."""
    return InvalidRequest.rebuild(f"{field} is missing; expected {allowed}", {"field": field, "allowed": allowed})


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return an error of the sessions by the name of the field that the client sent.

    Args:
        error: by the name that the sessions have for the field.
        names: by those names, or the beginnings of them: what was sent, where it is not what `PARAMS` says.
    """
    field = error.field
    sent = (theirs for ours, theirs in names.items() if field == ours or field.startswith((f"{ours}.", f"{ours}[")))
    theirs = next(sent, None) or param_of(field)
    return InvalidRequest.rebuild(error.message.replace(field, theirs, 1), {**error.metadata(), "field": theirs})


def param_of(field: str) -> str:
    """Return what a field of a gRPC request is called in OpenAI's."""
    name = field.removeprefix("sampling.")
    for ours in sorted(PARAMS, key=len, reverse=True):
        if name == ours or name.startswith((f"{ours}.", f"{ours}[")):
            return _OF_MESSAGES.sub(_in_message, PARAMS[ours] + name[len(ours) :])
    return name


def _in_message(found: re.Match[str]) -> str:
    return ".reasoning_content" if found[0] == ".reasoning" else f"{found[1]}.function.{found[2]}"


def _field(location: Sequence[str | int]) -> str:
    """Return a place in a body as clients write it."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:MAX_SHOWN]}" for part in _place(location))
    return "".join(parts).removeprefix(".")


def _place(location: Sequence[str | int]) -> list[str | int]:
    """Return the fields and indices of a place, without the body and without what pydantic calls members of unions."""
    return [part for part in location[1:] if not (isinstance(part, str) and _LABEL.search(part))]


def _allowed(error: Found) -> str:
    """Return what an error expected."""
    kind = error["type"]
    if kind in ALLOWED:
        return ALLOWED[kind].format(**error.get("ctx", {}))
    return _WORDS.sub("", str(error["msg"]))


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
