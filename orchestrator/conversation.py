"""Conversations to ids: what a model's chat template makes of messages and tools.

Rendering is `transformers`' own, in its immutable sandbox, so that a prompt has the same ids there and here. Added are:

* **Special tokens in messages are text.** A user who writes `<|im_end|>` ends no turn: what the tokenizer would read as
  a control token is encoded as plain text, unless the client asks otherwise. Control tokens are all special ones and,
  outside of what the assistant has said, the other added tokens that the template names, such as `<tool_call>`.
* **A later turn of a session** gets what the template puts behind an earlier answer, not the beginning of a
  conversation again: no second beginning-of-sequence token, default system prompt, or end of a turn.
* **Bounds** on time and size: a template is a program, and may loop.
* **What a template would leave out is refused**: tools or arguments that it does not name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from orchestrator.time_limit import TimeIsUp, within
from outrider.codec.chat import MAX_PROMPT_CHARS, parsed
from outrider.errors import InvalidRequest
from outrider.generation import ChatMessage, ChatPrompt

TIME_LIMIT_S = 5.0
"""Longest time a template may take."""
MAX_RENDERED_CHARS = 2 * MAX_PROMPT_CHARS
"""Most characters that a template may make of a conversation."""
ANCHOR = "\U000f0002answer\U000f0002"
"""Stands for what the assistant has said before; private characters, which no template looks for."""

TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What a template raises that does not fit a conversation, or is wrong itself."""


class ChatTokenizer(Protocol):
    """The part of a `transformers` tokenizer that conversations need. May block; every call is repeatable."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Return the tokens beside the vocabulary proper, by id; each has `content` and `special`."""
        ...

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """Return the template's text, the model's if none is given; ValueError: there is none."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Return a conversation as the model wants to see it."""
        ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""
        ...


class Conversations:
    """A model's chat template and what follows from it; used by several threads."""

    def __init__(self, model: str, tokenizer: ChatTokenizer, *, own_templates: bool = False) -> None:
        """Look for control tokens.

        Args:
            model: its name, for errors.
            tokenizer: of the model.
            own_templates: whether clients may bring a template.
        """
        self._model, self._tokenizer, self._own_templates = model, tokenizer, own_templates
        added = {token: (entry.content, entry.special) for token, entry in tokenizer.added_tokens_decoder.items()}
        self._special = frozenset(content for content, special in added.values() if special)
        self._plain = frozenset(content for content, special in added.values() if not special)
        self._special_text = {token: content for token, (content, special) in added.items() if special}

    def encode(self, chat: ChatPrompt, after: Sequence[int] = ()) -> list[int]:
        """Turn a conversation into ids; may block for seconds.

        Args:
            chat: the conversation, or only what is new in it if it continues a session.
            after: tokens of the session so far; empty: it begins one.

        Raises:
            InvalidRequest: the model has no template, the template refuses the conversation or takes too long for it,
                or it would leave out what the client sends.
        """
        tools = parsed("chat.tools", chat.tools, list) if chat.tools else None
        source = self._source(chat, tools)
        variables = self._variables(chat, tools, source)
        messages = [plain(index, message) for index, message in enumerate(chat.messages)]
        if chat.parse_special_tokens:
            marked = False
        else:
            messages, tools, variables, marked = self._marked(source, messages, tools, variables)
        options = {
            **variables,
            "chat_template": chat.chat_template or None,
            "add_generation_prompt": chat.add_generation_prompt is not False and not chat.continue_final_message,
            "continue_final_message": chat.continue_final_message,
        }
        text = self._bounded(lambda: self._text(messages, tools, options, after))
        return self._ids(text, marked)

    def _source(self, chat: ChatPrompt, tools: list[Any] | None) -> str:
        """Return the text of the template that is used."""
        if chat.chat_template and not self._own_templates:
            allowed = "nothing: this server takes no templates of clients (OUTRIDER_ORCHESTRATOR_ALLOW_CHAT_TEMPLATES)"
            raise InvalidRequest("chat.chat_template", chat.chat_template, allowed)
        try:
            return self._tokenizer.get_chat_template(chat.chat_template or None, tools)
        except ValueError as error:
            allowed = f"text or token_ids instead: {self._model} has no chat template"
            raise InvalidRequest("chat", f"{len(chat.messages)} messages", allowed) from error

    def _variables(self, chat: ChatPrompt, tools: list[Any] | None, source: str) -> dict[str, Any]:
        """Return the further variables of the template; all that is sent must be named in it."""
        if tools is not None and not _names(source, "tools"):
            allowed = f"nothing: the chat template of {self._model} shows no tools"
            raise InvalidRequest("chat.tools", f"{len(tools)} tools", allowed)
        if not chat.template_arguments:
            return {}
        variables: dict[str, Any] = parsed("chat.template_arguments", chat.template_arguments, dict)
        for name in variables:
            if not _names(source, name):
                allowed = f"variables that the chat template of {self._model} reads"
                raise InvalidRequest("chat.template_arguments", name, allowed)
        return variables

    def _text(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any], after: Sequence[int]
    ) -> str:
        """Render a conversation, or what it adds to a session."""
        if not after:
            return self._rendered(messages, tools, options)
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": ANCHOR}]
        _, found, rest = self._rendered(before + messages, tools, options).partition(ANCHOR)
        if not found or ANCHOR in rest:
            allowed = f"a new session: the chat template of {self._model} does not show the turn before as it was"
            raise InvalidRequest("session_id", "a conversation", allowed)
        if tools is not None and self._rendered(before + messages, None, options).endswith(rest):
            allowed = f"nothing in a later turn: the chat template of {self._model} shows tools at the beginning"
            raise InvalidRequest("chat.tools", f"{len(tools)} tools", allowed)
        ended_by = self._special_text.get(after[-1], "")
        bare = rest.lstrip()
        return bare[len(ended_by) :] if ended_by and bare.startswith(ended_by) else rest

    def _rendered(self, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any]) -> str:
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        return str(text)

    def _bounded(self, work: Callable[[], str]) -> str:
        """Render inside the bounds, and blame the conversation for what goes wrong."""
        try:
            text = within(TIME_LIMIT_S, work)
        except TEMPLATE_ERRORS as error:
            allowed = f"a conversation that the chat template of {self._model} takes ({error})"
            raise InvalidRequest("chat.messages", "what was sent", allowed) from error
        except TimeIsUp:
            allowed = f"a conversation that the chat template takes at most {TIME_LIMIT_S:g} s for"
            raise InvalidRequest("chat.messages", "what was sent", allowed) from None
        if len(text) > MAX_RENDERED_CHARS:
            allowed = f"a conversation that the chat template makes at most {MAX_RENDERED_CHARS} characters of"
            raise InvalidRequest("chat.messages", f"{len(text)} characters", allowed)
        return text

    # -- special tokens in messages ------------------------------------------------------------------------------------

    def _marked(
        self, source: str, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], Any, dict[str, Any], bool]:
        """Mark control tokens where they are written by the client, and say whether there are any."""
        special, all_of_them = (
            _any_of(self._special),
            _any_of(self._special | set(filter(source.__contains__, self._plain))),
        )
        spoken = [special if message["role"] == "assistant" else all_of_them for message in messages]
        parts = [*zip(spoken, messages, strict=True), (all_of_them, tools), (all_of_them, variables)]
        if not any(_holds(pattern, part) for pattern, part in parts):
            return messages, tools, variables, False
        # Here, because it takes seconds to import and is hardly ever needed.
        from transformers.utils.chat_template_utils import mark_control_tokens  # noqa: PLC0415

        *messages, tools, variables = [mark_control_tokens(part, pattern) for pattern, part in parts]
        return messages, tools, variables, True

    def _ids(self, text: str, marked: bool) -> list[int]:
        if not marked:
            return self._tokenizer.encode(text, add_special_tokens=False)
        from transformers.utils.chat_template_utils import encode_marked_chat  # noqa: PLC0415 - as above

        try:
            return list(encode_marked_chat(self._tokenizer, text))
        except (ValueError, NotImplementedError, AttributeError) as error:
            allowed = f"messages without special tokens, or parse_special_tokens ({error})"
            raise InvalidRequest("chat.messages", "what was sent", allowed) from error


def plain(index: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message in the shape that templates read: that of the OpenAI API, with arguments as objects.

    Raises:
        InvalidRequest: the arguments of a call are no JSON object.
    """
    spoken: dict[str, Any] = {"role": message.role}
    if message.content or not message.tool_calls:
        spoken["content"] = message.content
    further = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning}
    spoken |= {name: value for name, value in further.items() if value}
    if message.tool_calls:
        at = f"chat.messages[{index}].tool_calls"
        spoken["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.id} if call.id else {}),
                "function": {
                    "name": call.name,
                    "arguments": parsed(f"{at}[{i}].arguments", call.arguments or "{}", dict),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return spoken


def _names(source: str, variable: str) -> bool:
    return re.search(rf"\b{re.escape(variable)}\b", source) is not None


def _any_of(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return what matches any of the tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _holds(pattern: re.Pattern[str], part: Any) -> bool:
    """Return whether a token is in any text of a part."""
    match part:
        case str():
            return pattern.search(part) is not None
        case dict():
            return any(_holds(pattern, value) for value in part.values())
        case list():
            return any(_holds(pattern, value) for value in part)
        case _:
            return False


def template_of(path: str) -> str:
    """Read an operator's chat template.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("OUTRIDER_ORCHESTRATOR_CHAT_TEMPLATE", path, f"a text file ({error})") from error
