"""`outrider health`: ask a service whether it serves. Exit status 0 if it does, 1 in every other case.

Container engines run it every few seconds beside the service, so it loads neither the other commands nor pydantic, but
gRPC alone, and what reads certificates where there are some. Hence also the settings straight from the environment:
where to ask, and with which certificates, of which no value but the service itself judges.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from cyclopts import App, Parameter
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider.handshake import handshake_error

app = App(
    name="health",
    usage="Usage: outrider health [OPTIONS]",
    help="Ask a service whether it serves; exit status 0 if it does, else 1.",
)

OPTIONS = [("grpc.enable_http_proxy", 0)]
"""A proxy of the environment is not for calls inside a cluster."""
LEAST_S, MOST_S = 0.1, 60.0
"""Range of the time-out."""
ALONE = "OUTRIDER_ORCHESTRATOR_"
"""Prefix of the one service that shows callers another certificate than its peers."""
PREFIXES = ("OUTRIDER_VERIFY_", "OUTRIDER_DRAFT_", ALONE)


@Parameter(name="*")
@dataclass(frozen=True)
class Tls:
    """How to speak to a service that serves TLS; without any of these the command speaks plaintext."""

    ca: str = ""
    """File with the CAs that the service's certificate must be of."""
    cert: str = ""
    """File with a certificate of ours, where the service asks for one."""
    key: str = ""
    """File with that certificate's key."""
    server_name: str = ""
    """Name in the service's certificate; unset: the host of its address."""

    @property
    def is_on(self) -> bool:
        """Whether TLS is spoken."""
        return bool(self.ca or self.cert or self.key or self.server_name)


PLAINTEXT = Tls()


def main(arguments: list[str]) -> None:
    """Run the command; an error of Outrider's own is one line on standard error and status 1."""
    try:
        app(arguments)
    except OutriderError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(1)


@app.default
def health(*, address: str = "", service: str = "", timeout_s: float = 3.0, tls: Tls = PLAINTEXT) -> None:
    """Ask a service whether it serves; exit status 0 if it does, else 1.

    Args:
        address: host:port or unix:path; unset: the service that this environment's variables describe, with its TLS.
        service: Name as in "outrider.v1.VerifyService"; unset: the whole process.
        timeout_s: Seconds to wait for the answer, 0.1 to 60.
        tls: How to speak to it.
    """
    if not LEAST_S <= timeout_s <= MOST_S:
        raise InvalidRequest("timeout_s", timeout_s, f"{LEAST_S:g} to {MOST_S:g}")
    if not address and tls.is_on:
        raise InvalidRequest("address", "", "host:port, since files or names of TLS are given")
    where, how = (address, tls) if address else described(os.environ)
    print(status(where, how, service, timeout_s))


def described(environment: Mapping[str, str]) -> tuple[str, Tls]:
    """Return address and TLS of the service that an environment's variables set up.

    Raises:
        InvalidRequest: they set up none or several, or one whose certificate needs options here.
    """
    prefixes = [prefix for prefix in PREFIXES if environment.get(f"{prefix}LISTEN")]
    if len(prefixes) != 1:
        several = ", ".join(f"{prefix}LISTEN" for prefix in prefixes) or "none"
        raise InvalidRequest("address", "", f"host:port where not just one OUTRIDER_…_LISTEN is set ({several} here)")
    prefix = prefixes[0]
    address = _reachable(environment[f"{prefix}LISTEN"])
    if prefix == ALONE:
        if environment.get(f"{prefix}SERVE_TLS_CLIENT_CA"):
            raise InvalidRequest("cert", "", f"a client's certificate, since {prefix}SERVE_TLS_CLIENT_CA is set")
        # Of its own certificate it knows for sure whom to trust: that very certificate.
        own = environment.get(f"{prefix}SERVE_TLS_CERT", "")
        return address, Tls(ca=own, server_name=_own_name(own))
    ca, cert, key = (environment.get(f"{prefix}TLS_{part}", "") for part in ("CA", "CERT", "KEY"))
    return address, Tls(ca, cert, key, _own_name(cert))


def status(address: str, tls: Tls, service: str, timeout_s: float) -> str:
    """Return "SERVING".

    Raises:
        SystemExit: it does not serve; with status 1, and the reason on standard error.
        Unavailable: it does not answer.
        InvalidRequest: a file of TLS cannot be used.
    """
    with _channel(address, tls) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            details = str(error.details())
            raise handshake_error(details) or Unavailable(f"{address}: {error.code().name}: {details}") from error
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(f"{address}: {name}")
    return str(name)


def _channel(address: str, tls: Tls) -> grpc.Channel:
    if not tls.is_on:
        return grpc.insecure_channel(address, options=OPTIONS)
    from outrider.certificates import SourceFile, TlsFiles, TlsMaterial  # noqa: PLC0415 - takes a tenth of a second

    files = TlsFiles(*(SourceFile(f"--{name}", getattr(tls, name)) for name in ("cert", "key", "ca")))
    pem = TlsMaterial(files).current()
    credentials = grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert or None)
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.secure_channel(address, credentials, options=[*OPTIONS, *named])


def _own_name(cert: str) -> str:
    """Return a name in a service's own certificate; the service is called at loopback, which need not be one."""
    if not cert:
        return ""
    from outrider.certificates import SourceFile, names_in  # noqa: PLC0415 - takes a tenth of a second

    return next(iter(names_in(SourceFile("certificate", cert))), "")


def _reachable(listen: str) -> str:
    """Return where a process of this machine reaches what listens there."""
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host.strip("[]") in {"", "0.0.0.0", "::"} else listen
