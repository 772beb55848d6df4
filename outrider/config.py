"""Settings: the part that all services share, and how they are read.

Settings come from `OUTRIDER_*` environment variables and are read once, in `__main__`. A variable that no field of the
service knows is an error: a misspelt option that is silently ignored costs more than a refused start. Each service adds
its fields, and a prefix of its own such as `OUTRIDER_VERIFY_`, so that one environment can hold the variables of
several, in a subclass in its own `config.py`; below `__main__` only plain values are passed on.
"""

import difflib
import os
import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from outrider.address import ADDRESS, is_address
from outrider.certificates import SourceFile, TlsFiles, TlsMaterial
from outrider.errors import InvalidRequest

PREFIX = "OUTRIDER_"
SERVICE_PREFIXES = ("OUTRIDER_DRAFT_", "OUTRIDER_ORCHESTRATOR_", "OUTRIDER_VERIFY_")
"""Variables behind another service's prefix are that service's to check."""
SHARED_VARIABLES = frozenset({"OUTRIDER_CACHE", "OUTRIDER_API_KEY"})
"""Variables that are no service's setting: where models and probe results are kept, and what a client shows."""


def _split(value: object) -> object:
    """Take comma-separated words."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


_PUT_BEFORE = re.compile(r"^(Value error, |Input should be )")
"""By pydantic, before a validator's words and its own."""
NameList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Several names, comma-separated in the environment."""


def _check_address(value: str) -> str:
    if not is_address(value):
        raise ValueError(ADDRESS)
    return value


class ServiceSettings(BaseSettings):
    """What every service can be told."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    listen: Annotated[str, AfterValidator(_check_address)] = "127.0.0.1:0"
    """Where to serve: host:port (port 0 takes a free one) or unix:path."""
    advertise: str = ""
    """Address that other services are told; empty: where it listens, on every interface the one on the store's side."""
    store_url: str = ""
    """redis://, rediss:// or unix:// URL of the session store and registry."""
    store_tls_ca: str = ""
    """File with the CAs that a `rediss://` store's certificate must be of; empty: those of the system."""
    store_tls_cert: str = ""
    """File with the certificate shown to the store; empty: none is."""
    store_tls_key: str = ""
    """File with that certificate's key."""
    tls_cert: str = ""
    """File with this process's certificate in the cluster; with key and CA it turns on mutual TLS between services."""
    tls_key: str = ""
    """File with that certificate's key."""
    tls_ca: str = ""
    """File with the CAs of the cluster's certificates."""
    worker_id: str = ""
    """Name of this process in the cluster; empty: a fresh one."""
    grace_s: float = Field(default=10.0, ge=0, le=86_400)
    """Seconds from SIGTERM until running calls are cancelled."""
    otlp_endpoint: str = ""
    """http:// or https:// address of a collector of traces that speaks OTLP over gRPC; empty: nothing is traced."""
    otlp_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the generations that come without a trace of their own and are traced; orchestrators decide it."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint; 0: none."""
    metrics_host: str = "0.0.0.0"
    """Interface that it is on; all, if unset."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level to log."""
    log_format: Literal["plain", "json"] = "plain"
    """Lines for people, or one JSON object per line for containers."""

    @classmethod
    def load(cls, **overrides: object) -> Self:
        """Read the environment, once.

        Args:
            **overrides: fields that a command line sets; they win over the environment.

        Raises:
            InvalidRequest: a variable is unknown, or its value is not allowed; `field` is the variable's name.
        """
        _refuse_unknown(cls)
        try:
            return cls(**overrides)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            name = _prefix(cls) + str(first["loc"][0]).upper()
            allowed = _PUT_BEFORE.sub("", str(first["msg"]))
            raise InvalidRequest(name, first["input"], allowed) from error

    def cluster_tls(self) -> TlsMaterial | None:
        """Read the files of mutual TLS between services; None: it is off.

        Raises:
            InvalidRequest: some of them are named and others are not, or one cannot be used.
        """
        files = TlsFiles(self.file("tls_cert"), self.file("tls_key"), self.file("tls_ca"))
        if not files.any_named:
            return None
        files.require(files.cert, files.key, files.ca)
        return TlsMaterial(files, of_its_ca=True)

    def store_tls(self) -> TlsMaterial | None:
        """Read the files of TLS with the store; None: there are none.

        Raises:
            InvalidRequest: one of them cannot be used, or the store is spoken to without TLS.
        """
        files = TlsFiles(self.file("store_tls_cert"), self.file("store_tls_key"), self.file("store_tls_ca"))
        if not files.any_named:
            return None
        if not self.store_url.startswith("rediss"):
            named = next(each for each in (files.ca, files.cert, files.key) if each.path)
            scheme = self.store_url.partition(":")[0]
            raise InvalidRequest(self.variable("store_url"), scheme, f"rediss://, since {named.setting} is set")
        return TlsMaterial(files)

    @classmethod
    def variable(cls, field: str) -> str:
        """Return the environment variable of a field."""
        return _prefix(cls) + field.upper()

    def file(self, field: str) -> SourceFile:
        """Return the file that a field names, together with the field's variable."""
        return SourceFile(self.variable(field), getattr(self, field))


def _refuse_unknown(cls: type[ServiceSettings]) -> None:
    """Raise for the first `OUTRIDER_*` variable that names no field."""
    prefix = _prefix(cls)
    known = {prefix + name.upper() for name in cls.model_fields}
    others = tuple(other for other in SERVICE_PREFIXES if other != prefix)
    ours = [name for name in os.environ if name.upper().startswith(PREFIX) and not name.upper().startswith(others)]
    unknown = sorted(name for name in ours if name.upper() not in known | SHARED_VARIABLES)
    if unknown:
        name = unknown[0]
        # The prefix is the same in all: what is behind it has to be near.
        endings = {entry.removeprefix(prefix): entry for entry in known}
        near = difflib.get_close_matches(name.upper().removeprefix(prefix).removeprefix(PREFIX), endings, 1)
        close = [endings[ending] for ending in near] or sorted(known)
        # What it holds is not shown: it may be a secret meant for a variable of a similar name.
        known_ones = ", ".join(close)
        said = f"{name}: there is no such variable; {'the nearest is' if near else 'known are'} {known_ones}"
        raise InvalidRequest.rebuild(said, {"field": name, "allowed": known_ones})


def _prefix(cls: type[ServiceSettings]) -> str:
    """Return what the names of a service's variables begin with."""
    return str(cls.model_config.get("env_prefix", PREFIX)).upper()
