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

_LABEL = re.compile(r"^(str|int|float|bool|none)$|[\[\]()\-]|^[A-Z]")
"""What the place of an error has for the members of a union; a field's name never looks like that."""
_WORDS = re.compile(r"^(Value error, |Input should be |String should (have )?)")

Found = Mapping[str, Any]


def no_such_field(field: str, value: object, known: Iterable[str]) -> InvalidRequest:
    """Return the error of a field that does not exist: with the nearest one that does."""
    close = difflib.get_close_matches(field.rpartition(".")[2], list(known), 1)
    advice = f"; did you mean {close[0]}?" if close else ""
    error = InvalidRequest(field, value, "nothing")
    return InvalidRequest.rebuild(f"{field}: there is no such field{advice}", error.metadata())


def invalid(errors: Sequence[Found], content_type: str = "application/json") -> InvalidRequest:
    """Return the first of the errors that a body or a parameter has.

    Args:
        errors: as pydantic tells them.
        content_type: what the client says the body is.
    """
    first = errors[0]
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


def missing(field: str, allowed: str) -> InvalidRequest:
    """Return the error of a field that is not there, or null, and may not be."""
    return InvalidRequest.rebuild(f"{field} is missing; expected {allowed}", {"field": field, "allowed": allowed})


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return an error by the name of the field that the client sent.

    Args:
        error: by the name that the sessions have for the field.
        names: by those names, or the beginnings of them: what was sent.
    """
    for ours, theirs in names.items():
        if error.field == ours or error.field.startswith((f"{ours}.", f"{ours}[")):
            message = error.message.replace(error.field, theirs, 1)
            return InvalidRequest.rebuild(message, {**error.metadata(), "field": theirs})
    return error


def _field(location: Sequence[str | int]) -> str:
    """Return a place in a body as clients write it."""
    place = [part for part in location[1:] if not (isinstance(part, str) and _LABEL.search(part))]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def _allowed(error: Found) -> str:
    """Return what an error expected."""
    kind = error["type"]
    if kind in ALLOWED:
        return ALLOWED[kind].format(**error.get("ctx", {}))
    return _WORDS.sub("", str(error["msg"]))


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
