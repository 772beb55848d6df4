"""Certificates, private keys and CAs in files: checked when read, read again when they change.

Nothing of a key is ever kept in a message, a log or a `repr`. A file that cannot be used is named together with the
setting that named it. What was read before stays in force while new files are not yet whole: a certificate that is
replaced before its key would otherwise end every handshake in between.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeAlias, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from outrider.errors import InvalidRequest

log = logging.getLogger(__name__)

ParsedT = TypeVar("ParsedT")
Signature: TypeAlias = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, and what named it."""

    setting: str
    """Environment variable or option, for messages."""
    path: str
    """Empty: none was named."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What one side of a connection is told of files."""

    cert: SourceFile
    """Its certificate, followed by intermediate ones."""
    key: SourceFile
    """The certificate's private key, without a password."""
    ca: SourceFile
    """Whose certificates it accepts; several may stand one after the other."""

    @property
    def any_named(self) -> bool:
        """Whether a file is named at all."""
        return any(each.path for each in (self.cert, self.key, self.ca))

    def require(self, *wanted: SourceFile) -> None:
        """Require that all of these are named, since one of the files is.

        Raises:
            InvalidRequest: names the setting that is missing, and one that is not.
        """
        for file in wanted:
            if not file.path:
                named = next(each for each in (self.cert, self.key, self.ca) if each.path)
                raise InvalidRequest(file.setting, "", f"a file, since {named.setting} is {named.path}")


@dataclass(frozen=True, slots=True)
class Pem:
    """What the files held; a part is empty where no file was named."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    names: tuple[str, ...]
    """Names in the certificate."""
    expires: datetime | None
    """End of the certificate's validity."""


class TlsMaterial:
    """The present content of the files; safe to use from several threads."""

    def __init__(
        self, files: TlsFiles, *, of_its_ca: bool = False, clock: Callable[[], datetime] | None = None
    ) -> None:
        """Read the files.

        Args:
            files: certificate and key are named both or not at all.
            of_its_ca: whether the certificate has to be of the CA in the files, as where all sides share one.
            clock: the time, in UTC.

        Raises:
            InvalidRequest: a file is missing, unreadable, not what it should be, or expired; names setting and file.
        """
        self.files = files
        if files.cert.path or files.key.path:
            files.require(files.cert, files.key)
        self._of_its_ca = of_its_ca
        self._clock = clock or (lambda: datetime.now(UTC))
        self._lock = threading.Lock()
        self._signature = self._stat()
        self._complaint = ""
        self._pem = self._read()
        log.info("read %s", self._words())

    def current(self) -> Pem:
        """Return what is in force; the same object for as long as nothing changed.

        Costs three `stat` calls. Files that cannot be used yet are complained about once, and leave the old in force.
        """
        with self._lock:
            signature = self._stat()
            if signature == self._signature:
                self._look_at_the_end()
                return self._pem
            try:
                self._pem = self._read()
            except InvalidRequest as error:
                # Not remembered: a file may be completed within the resolution of its time.
                self._complain(f"{error.message}; what was read before stays in force")
                return self._pem
            self._signature, self._complaint = signature, ""
            log.info("read %s again: they have changed", self._words())
            return self._pem

    def _look_at_the_end(self) -> None:
        expires = self._pem.expires
        if expires is not None and self._clock() > expires:
            file = self.files.cert
            self._complain(f"{file.setting} ({file.path}) expired on {expires:%Y-%m-%d %H:%M} UTC; nothing new came")

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            log.warning("%s", text)
            self._complaint = text

    def _named(self) -> list[SourceFile]:
        return [file for file in (self.files.cert, self.files.key, self.files.ca) if file.path]

    def _words(self) -> str:
        expires = self._pem.expires
        until = f", valid until {expires:%Y-%m-%d %H:%M} UTC" if expires else ""
        names = f", names {', '.join(self._pem.names) or 'none'}" if expires else ""
        return f"{', '.join(f'{file.setting} ({file.path})' for file in self._named())}{names}{until}"

    def _stat(self) -> Signature:
        """Return what changes with a file: a secret's mount swaps links, so the inode counts as much as the times."""
        return tuple(_signature(file.path) for file in self._named())

    def _read(self) -> Pem:
        cert, key, ca = (_content(file) for file in (self.files.cert, self.files.key, self.files.ca))
        cas = _parsed(self.files.ca, ca, x509.load_pem_x509_certificates, "certificates in PEM") if ca else []
        if not cert:
            return Pem(cert, key, ca, (), None)
        chain = _parsed(self.files.cert, cert, x509.load_pem_x509_certificates, "certificates in PEM, its own first")
        leaf = chain[0]
        self._check_key(leaf, key)
        self._check_time(leaf)
        if self._of_its_ca and not any(_issued(each, ca_cert) for each in chain for ca_cert in cas):
            raise InvalidRequest(
                self.files.cert.setting,
                self.files.cert.path,
                f"a certificate issued by a CA in {self.files.ca.setting} ({self.files.ca.path})",
            )
        return Pem(cert, key, ca, _names(leaf), leaf.not_valid_after_utc)

    def _check_key(self, leaf: x509.Certificate, key: bytes) -> None:
        file, form = self.files.key, (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        private = _parsed(file, key, lambda data: load_pem_private_key(data, None), "a private key in PEM, no password")
        if private.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
            allowed = f"the key of the certificate in {self.files.cert.setting} ({self.files.cert.path})"
            raise InvalidRequest(file.setting, file.path, allowed)

    def _check_time(self, leaf: x509.Certificate) -> None:
        now, file = self._clock(), self.files.cert
        if now > leaf.not_valid_after_utc:
            ended = f"{leaf.not_valid_after_utc:%Y-%m-%d %H:%M}"
            raise InvalidRequest(file.setting, file.path, f"a valid certificate; this one expired on {ended} UTC")
        if now < leaf.not_valid_before_utc:
            begins = f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M}"
            raise InvalidRequest(file.setting, file.path, f"a valid certificate; this one begins on {begins} UTC")


def names_in(file: SourceFile) -> tuple[str, ...]:
    """Return the names in the first certificate of a file.

    Raises:
        InvalidRequest: the file is missing, unreadable, or holds no certificate; names setting and file.
    """
    return _names(_parsed(file, _content(file), x509.load_pem_x509_certificates, "certificates in PEM")[0])


def _content(file: SourceFile) -> bytes:
    if not file.path:
        return b""
    try:
        with open(file.path, "rb") as opened:
            content = opened.read()
    except OSError as error:
        raise InvalidRequest(file.setting, file.path, f"a readable file: {error.strerror}") from None
    if not content.strip():
        raise InvalidRequest(file.setting, file.path, "a file that is not empty")
    return content


def _parsed(file: SourceFile, content: bytes, parse: Callable[[bytes], ParsedT], allowed: str) -> ParsedT:
    try:
        return parse(content)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # a TypeError means a password; no text of a parser is shown
        raise InvalidRequest(file.setting, file.path, f"a file with {allowed}") from None


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _names(leaf: x509.Certificate) -> tuple[str, ...]:
    """Return the subject alternative names as text."""
    try:
        names: Sequence[x509.GeneralName] = list(
            leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return tuple(str(name.value) for name in names)


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
