"""What gRPC reports of a connection that TLS prevented, as an error whose sentence says what to look at.

gRPC itself reports an error of its TLS library or, where the server ended the handshake, only a closed socket. The
former is definite, since this side has looked at the server's certificate or at its answer. The latter is not: a
process that is just stopping closes its socket too.
"""

import re

from outrider.errors import HandshakeFailed, Unavailable

_PEER = re.compile(r"(?:ipv4|ipv6|unix):\S+?(?=: )")
_DEFINITE = (
    (
        "Hostname Verification Check failed",
        "the server's certificate has another name than the one that was looked for: see the address called, or the "
        "setting of the server's name",
    ),
    ("certificate has expired", "the server's certificate has expired"),
    ("certificate is not yet valid", "the server's certificate is not valid yet"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not of a CA in the CA file used here"),
    ("WRONG_VERSION_NUMBER", "the server speaks no TLS"),
)
"""Part of gRPC's text -> what it means; the first that fits counts."""
_CLOSED = (
    "Socket closed",
    "the server closed the connection at once; perhaps it wants TLS, or does not accept the certificate shown, "
    "which then its log says",
)


def handshake_error(details: str) -> Unavailable | None:
    """Return the error for the details of a call that found no connection; None if TLS had no part in it.

    `HandshakeFailed` if another try cannot do better, plain `Unavailable` if it may.
    """
    if "failed to connect to all addresses" not in details:
        return None
    for part, meaning in _DEFINITE:
        if part in details:
            return HandshakeFailed(_sentence(details, meaning))
    part, meaning = _CLOSED
    return Unavailable(_sentence(details, meaning)) if part in details else None


def _sentence(details: str, meaning: str) -> str:
    peer = _PEER.search(details)
    return f"no connection to {peer.group() if peer else 'the server'}: {meaning}"
