"""TLS of servers and channels, with files that are read again when they change.

A server takes changed files with its next connection. A channel keeps what it was opened with, for its reconnects too:
whoever keeps channels for long opens new ones when `ClientTls.version` has changed. Connections that are open are not
touched by either: TLS looks at certificates when a connection is made, and never again.
"""

from dataclasses import dataclass, field

import grpc

from outrider.certificates import Pem, SourceFile, TlsFiles, TlsMaterial
from outrider.rpc.peers import Callers


@dataclass(frozen=True, slots=True)
class ServerTls:
    """How a server proves who it is, and whom it serves. With a CA, clients need a certificate of it."""

    material: TlsMaterial
    """The server's files."""
    callers: Callers = field(default_factory=Callers)
    """Who may call what, among those with a certificate."""

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials that follow the files; a half-replaced pair leaves the last whole one in force."""
        in_force = self.material.current()

        def changed() -> "grpc.ServerCertificateConfiguration | None":
            """Called by gRPC before each handshake, on a thread of its own."""
            nonlocal in_force
            found = self.material.current()
            if found is in_force:
                return None
            in_force = found
            return _configuration(found)

        # The stubs forget that None is an answer.
        return grpc.dynamic_ssl_server_credentials(_configuration(in_force), changed, bool(in_force.ca))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client checks its server, and, with a certificate, proves who it is."""

    material: TlsMaterial
    """The client's files; without a CA those that gRPC ships are trusted."""
    server_name: str = ""
    """Name that the server's certificate must have; empty: the host of the address."""

    @property
    def version(self) -> Pem:
        """What a channel opened now is opened with; another object after the files have changed."""
        return self.material.current()

    def credentials(self) -> grpc.ChannelCredentials:
        """Return credentials from the files as they are now."""
        pem = self.material.current()
        return grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert or None)

    def options(self) -> list[tuple[str, str]]:
        """Return channel options."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def client_tls(ca: str, cert: str = "", key: str = "", server_name: str = "") -> ClientTls:
    """Return TLS for a client of an orchestrator.

    Args:
        ca: file with the CAs that the orchestrator's certificate must be of; empty: those that gRPC ships.
        cert: file with the client's certificate, where the orchestrator asks for one.
        key: file with that certificate's key.
        server_name: name in the orchestrator's certificate; empty: the host of its address.

    Raises:
        InvalidRequest: a file cannot be used; names it.
    """
    files = TlsFiles(SourceFile("--cert", cert), SourceFile("--key", key), SourceFile("--ca", ca))
    return ClientTls(TlsMaterial(files), server_name)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca or None)
