"""Ranges of options: one wording for all commands."""

from outrider.errors import InvalidRequest


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
