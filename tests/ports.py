"""Ports for processes that listen a while after they were told where."""

import random
import socket

LASTING = range(23_000, 30_000)
"""Below those that the kernel gives to connections, so that a port is still free when its process has started."""

_given: set[int] = set()


def free_port() -> int:
    """Return a port that nobody has, and that was not returned before."""
    for port in random.sample(LASTING, len(LASTING)):
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise RuntimeError(f"no port is free of {LASTING}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
