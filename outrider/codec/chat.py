"""Codec of `Chat` in `generation.proto`: conversations, the tools they know, and how a template is asked to show them.

Parts that only a template reads arrive as JSON text. Tools and template arguments are checked here; arguments of calls,
which may be as long as a whole prompt, are left to where the template is applied, off the event loop.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from outrider.codec.checks import CLIENT
from outrider.generation import ChatMessage, ChatPrompt, ToolCall
from outrider.v1 import generation_pb2 as pb

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_PROMPT_CHARS = 1 << 22
"""Most characters of a text, and of all messages of a conversation together."""
MAX_CHAT_MESSAGES = 1 << 14
MAX_TOOL_CALLS = 128
"""Most calls of one message."""
MAX_TOOLS = 1024
MAX_TOOLS_CHARS = 1 << 18
MAX_TEMPLATE_CHARS = 1 << 16
"""Most characters of a template, and of its arguments."""
MAX_JSON_DEPTH = 64
"""How deep JSON of a client may be nested."""
RESERVED = frozenset({
    "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""Names that are no variables of a template, or are set by fields of their own."""

_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)
"""Strings, whole or not ended, are stepped over in one go."""


def chat_to_proto(chat: ChatPrompt) -> pb.Chat:
    """Encode a conversation."""
    return pb.Chat(
        messages=[_message_to_proto(message) for message in chat.messages],
        tools=chat.tools,
        template_arguments=chat.template_arguments,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        chat_template=chat.chat_template,
        parse_special_tokens=chat.parse_special_tokens,
    )


def chat_from_proto(chat: pb.Chat) -> ChatPrompt:
    """Decode and check a client's conversation.

    Raises:
        InvalidRequest: a field is out of range, is not the JSON it should be, or contradicts another.
    """
    CLIENT.count("chat.messages", chat.messages, 1, MAX_CHAT_MESSAGES)
    num_chars = sum(map(_num_chars, chat.messages))
    allowed = f"at most {MAX_PROMPT_CHARS} characters"
    CLIENT.require(num_chars <= MAX_PROMPT_CHARS, "chat.messages", f"{num_chars} characters", allowed)
    _check_tools(chat.tools)
    _check_arguments(chat.template_arguments)
    _check_open_end(chat)
    return ChatPrompt(
        messages=tuple(_message_from_proto(index, message) for index, message in enumerate(chat.messages)),
        tools=chat.tools,
        template_arguments=chat.template_arguments,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
        continue_final_message=chat.continue_final_message,
        chat_template=CLIENT.text("chat.chat_template", chat.chat_template, MAX_TEMPLATE_CHARS),
        parse_special_tokens=chat.parse_special_tokens,
    )


def parsed(field: str, text: str, kind: type) -> Any:
    """Read JSON of a client.

    Args:
        field: name of the field, for the error.
        text: what it holds.
        kind: `dict` or `list`: what the outermost value must be.

    Raises:
        InvalidRequest: it is no JSON, or another kind of value, nested too deep, or has text that is no Unicode.
    """
    allowed = f"a JSON {'object' if kind is dict else 'array'}, nested at most {MAX_JSON_DEPTH} deep"
    # Before it is read: the reader itself gives up only where the process is near its limits.
    CLIENT.require(_depth(text) <= MAX_JSON_DEPTH, field, text, allowed)
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair has no bytes
    except ValueError as error:
        raise CLIENT.fault(field, text, f"{allowed} ({error})") from error
    CLIENT.require(isinstance(value, kind), field, text, allowed)
    return value


def _depth(text: str) -> int:
    """Return how deep brackets are nested, those in strings left out."""
    deepest = depth = 0
    for found in _BRACKETS.finditer(text):
        depth += 1 if found[1] else -1 if found[2] else 0
        deepest = max(deepest, depth)
    return deepest


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check_tools(text: str) -> None:
    if not text:
        return
    CLIENT.text("chat.tools", text, MAX_TOOLS_CHARS)
    tools = parsed("chat.tools", text, list)
    CLIENT.count("chat.tools", tools, 1, MAX_TOOLS)
    for index, tool in enumerate(tools):
        CLIENT.require(isinstance(tool, dict), f"chat.tools[{index}]", tool, "an object that defines a tool")


def _check_arguments(text: str) -> None:
    if not text:
        return
    CLIENT.text("chat.template_arguments", text, MAX_TEMPLATE_CHARS)
    arguments = parsed("chat.template_arguments", text, dict)
    allowed = "names of the template's own variables"
    for name in arguments:
        CLIENT.require(name not in RESERVED, "chat.template_arguments", name, allowed)


def _check_open_end(chat: pb.Chat) -> None:
    if chat.continue_final_message:
        field, allowed = "chat.add_generation_prompt", "false, or unset, beside continue_final_message"
        CLIENT.require(not chat.add_generation_prompt, field, True, allowed)
        allowed = "false where the last message says nothing"
        CLIENT.require(bool(chat.messages[-1].content), "chat.continue_final_message", True, allowed)


def _num_chars(message: pb.ChatMessage) -> int:
    texts: Iterable[str] = (message.content, message.reasoning, *(call.arguments for call in message.tool_calls))
    return sum(map(len, texts))


def _message_to_proto(message: ChatMessage) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _message_from_proto(index: int, message: pb.ChatMessage) -> ChatMessage:
    role = message.role
    if role in ROLES and not (message.name or message.tool_calls or message.tool_call_id or message.reasoning):
        return ChatMessage(role, message.content)  # nearly all are like this, and there may be thousands
    at = f"chat.messages[{index}]"
    CLIENT.require(role in ROLES, f"{at}.role", role, f"one of {', '.join(ROLES)}")
    if role != "assistant":
        allowed = f"nothing in a message of role {role}"
        CLIENT.require(not message.reasoning, f"{at}.reasoning", message.reasoning, allowed)
        CLIENT.require(not message.tool_calls, f"{at}.tool_calls", len(message.tool_calls), allowed)
    if role != "tool":
        allowed = f"nothing in a message of role {role}"
        CLIENT.require(not message.tool_call_id, f"{at}.tool_call_id", message.tool_call_id, allowed)
    CLIENT.count(f"{at}.tool_calls", message.tool_calls, 0, MAX_TOOL_CALLS)
    return ChatMessage(
        role=role,
        content=message.content,
        name=CLIENT.text(f"{at}.name", message.name),
        tool_calls=tuple(_call_from_proto(f"{at}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)),
        tool_call_id=CLIENT.text(f"{at}.tool_call_id", message.tool_call_id),
        reasoning=message.reasoning,
    )


def _call_from_proto(at: str, call: pb.ToolCall) -> ToolCall:
    """Decode a call; its arguments are read where the template is applied, for they may be long."""
    return ToolCall(CLIENT.name(f"{at}.name", call.name), call.arguments, CLIENT.text(f"{at}.id", call.id))
