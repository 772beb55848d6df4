"""Takes secrets out of text for people: passwords in URLs, API keys, bearer tokens.

Every line of every log passes through here, tracebacks included, and so do errors on a terminal. It is the last line of
defence, not the first: no message is meant to have a secret in it.
"""

import re

from outrider.keys import KEY_PATTERN

HIDDEN = "***"

_RULES = (
    # User and password, or a password alone, before the host of a URL; the user's name stays. Up to the last "@" of the
    # word, for a password may hold "@" and, written wrongly, "/".
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^\s:@/'\"]*):[^\s'\"]+@"), rf"\1:{HIDDEN}@"),
    # What redis-py takes in a query instead.
    (re.compile(r"([?&](?:password|ssl_password)=)[^\s&'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(KEY_PATTERN), rf"outrider-\1-{HIDDEN}"),
    (re.compile(r"(bearer\s+)(?!outrider-[0-9a-f]{12}-)[^\s'\",;]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
)


def redacted(text: str) -> str:
    """Return a text without its secrets; what is left tells which secret it was."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
