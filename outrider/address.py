"""What addresses of services look like; whether anybody is there is another question."""

ADDRESS = "host:port, as in 127.0.0.1:7400, or unix:path"
"""What is allowed, in words."""
_MAX_PORT = 65535


def is_address(text: str) -> bool:
    """Whether text has the form of an address.

    gRPC itself takes a port modulo 65,536, and none as 0 or 443.
    """
    if text.startswith("unix:"):
        return text != "unix:"
    host, colon, port = text.rpartition(":")
    if not colon or host.startswith(("http:", "https:")):
        return False
    return port.isascii() and port.isdigit() and int(port) <= _MAX_PORT
