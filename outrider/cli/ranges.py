"""Ranges of options: one wording for all commands, before they start anything."""

import re
import socket

from outrider.address import ADDRESS, is_address
from outrider.errors import InvalidRequest, Unavailable

LOOKS_LIKE_AN_OPTION = re.compile(r"--?[A-Za-z][\w-]*(=.*)?", re.DOTALL)


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Refuse an option that is out of its range, or not a number.

    Args:
        name: of the option.
        value: what was given.
        least: smallest that is allowed.
        most: largest that is allowed.

    Raises:
        InvalidRequest: it is none of those.
    """
    if not least <= value <= most:
        raise InvalidRequest(name, value, f"{least} to {most}")


def check_prompt(kind: object, prompt: str) -> None:
    """Refuse a prompt that is one word and looks like an option, which most likely is a misspelt one.

    Args:
        kind: type of the parameter; the library's validators are told.
        prompt: what was given.

    Raises:
        ValueError: it does.
    """
    del kind
    if LOOKS_LIKE_AN_OPTION.fullmatch(prompt):
        name = prompt.partition("=")[0]
        raise ValueError(f'There is no option {name}; a prompt of that look comes from standard input ("-").')


def check_listen(name: str, listen: str) -> None:
    """Refuse an address that cannot be listened on, now rather than when everything else has started.

    Args:
        name: of the option.
        listen: what was given.

    Raises:
        InvalidRequest: it is no address.
        Unavailable: it is in use, or none of this machine's.
    """
    if listen.startswith("unix:"):
        return
    host, _, port = listen.rpartition(":")
    if not host or not is_address(listen):
        raise InvalidRequest(name, listen, ADDRESS)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except (OSError, UnicodeError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise Unavailable(f"cannot listen on {listen}: {why}") from error
