"""API keys: what one looks like, what is kept of it, and what it may use.

A key is `outrider-<id>-<secret>`: the id is public and names the key everywhere, the secret has 256 random bits. What
is kept is a record with the SHA-256 of the whole key, never the key.

Why plain SHA-256, without salt and without a slow hash such as argon2: those protect passwords, which can be guessed
from a list. Nobody guesses 256 random bits, however cheap one guess is, and no two keys are equal, so that a table made
in advance finds nothing. A slow hash would only let strangers burn this side's time with wrong keys.

A record with a field that this version does not know is refused, not read in part: the field may be a limit.
"""

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from outrider.errors import InvalidRequest

SECRET_BYTES = 32
ID_BYTES = 6
MAX_NAME_CHARS = 100

KEY_PATTERN = r"outrider-([0-9a-f]{12})-[A-Za-z0-9_-]{43}"
"""What a key looks like; its group is the id."""

_FORM = re.compile(KEY_PATTERN)
_STRICT = ConfigDict(extra="forbid")

Limit = Annotated[int, Field(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may use, over all orchestrators together; 0: without limit."""

    __pydantic_config__ = _STRICT

    requests_per_minute: Limit = 0
    """Calls of any kind; a full minute's worth may come at once."""
    concurrent: Limit = 0
    """Generations at one time."""
    tokens_per_minute: Limit = 0
    """Tokens of prompts, earlier turns included, and of answers."""
    tokens_per_day: Limit = 0
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Share of the places where they are scarce, in those of a key of weight 1."""
    max_priority: Annotated[int, Field(ge=-8, le=8)] = 0
    """Highest priority that its requests may ask for."""

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are limited at all."""
        return bool(self.tokens_per_minute or self.tokens_per_day)

    @property
    def holds_places(self) -> bool:
        """Whether a generation under way has to be known to the store."""
        return bool(self.concurrent) or self.counts_tokens


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is kept of a key."""

    __pydantic_config__ = _STRICT

    key_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[^\x00-\x1f\x7f]+$")]
    """For people: whose key it is."""
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """Of the whole key, in hexadecimal."""
    created_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since 1970; here and below."""
    expires_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """None: never."""
    revoked_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """None: not revoked."""
    limits: KeyLimits = field(default_factory=KeyLimits)


_RECORDS = TypeAdapter(KeyRecord)


def make_key(name: str, limits: KeyLimits, now_s: float, expires_s: float | None = None) -> tuple[str, KeyRecord]:
    """Make a key; return it, to be shown once, and its record, to be kept.

    Args:
        name: whose key it is, 1 .. 100 printable characters.
        limits: what it may use.
        now_s: seconds since 1970.
        expires_s: seconds since 1970 from which on it is not valid; None: always valid.

    Raises:
        InvalidRequest: a value is not allowed.
    """
    if expires_s is not None and expires_s <= now_s:
        raise InvalidRequest("expires", expires_s, "a time to come")
    key_id = secrets.token_hex(ID_BYTES)
    secret = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).rstrip(b"=").decode()
    key = f"outrider-{key_id}-{secret}"
    record = KeyRecord(key_id, name, _hash(key), now_s, expires_s, None, limits)
    return key, read_record(write_record(record), "key")


def key_id_of(key: str) -> str | None:
    """Return the id in a key; None if it does not look like one."""
    match = _FORM.fullmatch(key)
    return match.group(1) if match else None


def belongs(key: str, record: KeyRecord) -> bool:
    """Whether a record is that of a key; takes as long whatever differs."""
    return hmac.compare_digest(_hash(key), record.sha256)


def write_record(record: KeyRecord) -> bytes:
    """Return a record as one line of JSON; what holds its default is left out."""
    return _RECORDS.dump_json(record, exclude_defaults=True)


def read_record(line: bytes | str, place: str) -> KeyRecord:
    """Read a record back.

    Args:
        line: what `write_record` returned.
        place: where it stands, for the error.

    Raises:
        InvalidRequest: it is no JSON object, or a field is missing, unknown or out of range.
    """
    try:
        return _RECORDS.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (place, *first["loc"])))
        raise InvalidRequest(where, first["input"], str(first["msg"])) from error


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
