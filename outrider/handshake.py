"""What gRPC reports of a connection that TLS prevented, as a sentence that says what to look at.

gRPC itself reports an error of its TLS library or, where the server ended the handshake, only a closed socket.
"""

import re

_PEER = re.compile(r"(?:ipv4|ipv6|unix):\S+?(?=: )")
_REASONS = (
    (
        "Hostname Verification Check failed",
        "the server's certificate has another name than the one that was looked for: see the address called, or the "
        "setting of the server's name",
    ),
    ("certificate has expired", "the server's certificate has expired"),
    ("certificate is not yet valid", "the server's certificate is not valid yet"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not of a CA in the CA file used here"),
    ("WRONG_VERSION_NUMBER", "the server speaks no TLS"),
    (
        "Socket closed",
        "the server closed the connection at once; perhaps it wants TLS, or does not accept the certificate shown, "
        "which then its log says",
    ),
)
"""Part of gRPC's text -> what it means; the first that fits counts."""


def handshake_failure(details: str) -> str:
    """Return the sentence for the details of a call that found no connection; empty if TLS had no part in it."""
    if "failed to connect to all addresses" not in details:
        return ""
    for part, meaning in _REASONS:
        if part in details:
            peer = _PEER.search(details)
            return f"no connection to {peer.group() if peer else 'the server'}: {meaning}"
    return ""
