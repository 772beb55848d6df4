"""Certificates for tests, made by the tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import trustme


@dataclass(frozen=True)
class Identity:
    """A certificate's files."""

    cert: str
    key: str
    ca: str

    def settings(self) -> dict[str, Any]:
        """Return a service's settings of mutual TLS."""
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_ca": self.ca}


class Authority:
    """A CA of its own, whose files are in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = trustme.CA()
        self.bundle: bytes = self.ca.cert_pem.bytes()

    def issue(self, name: str, *names: str, **options: Any) -> Identity:
        """Write a certificate with these names, its key and the CA; a former one of that name is replaced.

        Replaced as a secret's mount does it: the files appear in a new folder, to which a link is moved.
        """
        self.write(name, (name, *names), **options)
        at = self.folder / name
        return Identity(str(at / "tls.crt"), str(at / "tls.key"), str(at / "ca.crt"))

    def write(
        self, name: str, names: Sequence[str], begins: datetime | None = None, ends: datetime | None = None
    ) -> None:
        """Put new files behind a name."""
        made = self.ca.issue_cert(*names, not_before=begins, not_after=ends)
        version = self.folder / f"{name}.{len(list(self.folder.iterdir()))}"
        version.mkdir()
        (version / "tls.crt").write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
        (version / "tls.key").write_bytes(made.private_key_pem.bytes())
        (version / "ca.crt").write_bytes(self.bundle)
        link = self.folder / f"{name}.next"
        link.symlink_to(version)
        link.replace(self.folder / name)
