"""Who a peer is, by the certificate it has shown, and what it may call.

A handshake has already refused peers without a certificate of the cluster's CA. What is left is which of the cluster's
certificates may do what: names are compared with an allow-list per method, so that a draft worker's certificate opens
no session on a verifier.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from outrider.errors import PermissionDenied
from outrider.sparing import Sparing

log = logging.getLogger(__name__)

OURS = "/outrider."
"""What the names of our own methods begin with; health and reflection are for every peer of the cluster."""


@dataclass(frozen=True, slots=True)
class Names:
    """An allow-list."""

    setting: str
    """Environment variable, for messages."""
    patterns: Sequence[str]
    """Names of certificates; "*" stands for any characters."""

    def match(self, name: str) -> bool:
        """Whether a name is on the list; case does not count, as in host names."""
        return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Callers:
    """Who may call each method of ours; methods that are not listed are for nobody, unless nothing is listed."""

    of_method: Mapping[str, Names] = field(default_factory=dict)
    """By full name, such as `/outrider.v1.VerifyService/Decode`."""
    _sparing: Sparing = field(default_factory=Sparing, compare=False, repr=False)

    def check(self, method: str, context: Any) -> None:
        """Refuse a call whose peer may not make it.

        Args:
            method: full name.
            context: of the call.

        Raises:
            PermissionDenied: names the peer and the setting; it is in the log too.
        """
        if not self.of_method or not method.startswith(OURS):
            return
        allowed, names = self.of_method.get(method), peer_names(context)
        if allowed is not None and any(map(allowed.match, names)):
            return
        listed = f"{allowed.setting} allows {', '.join(allowed.patterns)}" if allowed else "nobody may"
        text = f"a peer whose certificate names {', '.join(names) or 'nobody'} may not call {method}; {listed}"
        if self._sparing.allows():
            log.warning("refused %s: %s", context.peer(), text)
        raise PermissionDenied(text)


def peer_names(context: Any) -> tuple[str, ...]:
    """Return the names in the certificate that a call's peer has shown; none without TLS."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return tuple(name.decode("utf-8", "replace") for name in found)
