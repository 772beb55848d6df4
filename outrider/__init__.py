"""Outrider: exact, pipelined, distributed speculative decoding; what its services share.

For programs that ask a cluster, the names below; they are imported when they are first used, so that `import outrider`
costs nothing:

    import outrider

    with outrider.Client("127.0.0.1:7400") as client:
        print(client.ask("Once upon a time", max_tokens=20).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.asking import Answer, Message, Parameters
    from outrider.client import Client as AsyncClient
    from outrider.errors import OutriderError
    from outrider.generation import (
        ChatMessage,
        Chunk,
        Finished,
        GenerationEvent,
        GenerationRequest,
        Notice,
        PromptLogprobs,
        SpeculationChoice,
        Started,
        ToolCall,
    )
    from outrider.ids import FinishReason, Mode, TokenKind
    from outrider.resuming import NO_RETRY, Retry
    from outrider.rpc import ClientTls, client_tls
    from outrider.sync_client import SyncClient as Client

_HOMES = {
    "Answer": "outrider.asking",
    "AsyncClient": "outrider.client:Client",
    "ChatMessage": "outrider.generation",
    "Chunk": "outrider.generation",
    "Client": "outrider.sync_client:SyncClient",
    "ClientTls": "outrider.rpc",
    "FinishReason": "outrider.ids",
    "Finished": "outrider.generation",
    "GenerationEvent": "outrider.generation",
    "GenerationRequest": "outrider.generation",
    "Message": "outrider.asking",
    "Mode": "outrider.ids",
    "NO_RETRY": "outrider.resuming",
    "Notice": "outrider.generation",
    "OutriderError": "outrider.errors",
    "Parameters": "outrider.asking",
    "PromptLogprobs": "outrider.generation",
    "Retry": "outrider.resuming",
    "SpeculationChoice": "outrider.generation",
    "Started": "outrider.generation",
    "TokenKind": "outrider.ids",
    "ToolCall": "outrider.generation",
    "client_tls": "outrider.rpc",
}
"""Where each name lives, and its name there if it is another one."""

__all__ = [
    "NO_RETRY",
    "Answer",
    "AsyncClient",
    "ChatMessage",
    "Chunk",
    "Client",
    "ClientTls",
    "FinishReason",
    "Finished",
    "GenerationEvent",
    "GenerationRequest",
    "Message",
    "Mode",
    "Notice",
    "OutriderError",
    "Parameters",
    "PromptLogprobs",
    "Retry",
    "SpeculationChoice",
    "Started",
    "TokenKind",
    "ToolCall",
    "client_tls",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    module, _, other = _HOMES[name].partition(":")
    found = globals()[name] = getattr(import_module(module), other or name)
    return found
