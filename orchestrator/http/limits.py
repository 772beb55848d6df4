"""What an operator sets about the HTTP server, as plain values: nothing here needs the server."""

from dataclasses import dataclass
from typing import Literal

Markers = Literal["auto", "hermes", "think", "hermes+think", "none"]
"""How the text of answers is taken apart: hermes for calls of tools, think for thoughts."""

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may ask of the HTTP server itself."""

    max_body_bytes: int = 8 << 20
    """Largest body of a request."""
    max_head_bytes: int = 32 * KIB
    """Largest request line and headers together."""
    max_connections: int = 4096
    """Connections at once; more are closed unheard."""
    read_timeout_s: float = 20.0
    """How long a request's head may take to arrive, and its body."""
    keep_alive_s: float = 75.0
    """How long a connection may wait for its next request."""
    stall_timeout_s: float = 120.0
    """How long a client may refuse to read, before its connection is closed."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages browsers let call this server; "*": all of them."""
