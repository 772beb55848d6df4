"""What an API key looks like, and what is kept of it."""

import hashlib
import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest

from outrider.errors import InvalidRequest
from outrider.keys import KeyLimits, belongs, key_id_of, make_key, read_record, write_record
from outrider.redaction import redacted
from outrider.telemetry import configure_logging

LIMITS = KeyLimits(requests_per_minute=60, concurrent=2, tokens_per_minute=5, tokens_per_day=7)


def test_a_record_holds_the_hash_and_nothing_else_of_the_key() -> None:
    key, record = make_key("alice", LIMITS, 10.0, 20.0)
    line = write_record(record).decode()
    assert record.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert key.removeprefix(f"outrider-{record.key_id}-") not in line
    assert read_record(line, "here") == record
    assert key_id_of(key) == record.key_id


def test_no_two_keys_are_alike_and_secrets_have_256_bits() -> None:
    keys = {make_key("alice", LIMITS, 1.0)[0] for _ in range(200)}
    assert len({key_id_of(key) for key in keys}) == 200
    assert {len(key.split("-", 2)[2]) for key in keys} == {43}


def test_a_record_belongs_to_its_key_alone() -> None:
    key, record = make_key("alice", LIMITS, 1.0)
    other, _ = make_key("alice", LIMITS, 1.0)
    last = "A" if key[-1] != "A" else "B"
    assert belongs(key, record)
    for wrong in (other, key[:-1] + last, key[:-1], key + "A", key.upper(), "", "ä"):
        assert not belongs(wrong, record)


@pytest.mark.parametrize(
    "text", ["", "outrider-", "outrider-0123456789ab-short", "x" * 5000, f" outrider-0123456789ab-{'A' * 43}", "ä"]
)
def test_what_does_not_look_like_a_key_has_no_id(text: str) -> None:
    assert key_id_of(text) is None


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"concurrent"', '"concurent"', "limits.concurent"),
        ('"concurrent":2', '"concurrent":-2', "limits.concurrent"),
        ('"concurrent":2', '"concurrent":"many"', "limits.concurrent"),
        ('"name"', '"title"', "name"),
        ('"name":"alice"', '"name":""', "name"),
        ('"name":"alice"', '"name":"a\\nb"', "name"),
        ('"created_s":10.0', '"created_s":NaN', "here"),
        ('"sha256":"', '"sha256":"0', "sha256"),
        ("{", '{"scope":"read",', "scope"),
        ("{", "[", "here"),
    ],
)
def test_a_record_with_a_field_that_is_unknown_missing_or_wrong_is_refused_by_name(
    old: str, new: str, field: str
) -> None:
    line = write_record(make_key("alice", LIMITS, 10.0)[1]).decode()
    assert old in line
    with pytest.raises(InvalidRequest) as refused:
        read_record(line.replace(old, new, 1), "here")
    assert field in refused.value.field


@pytest.mark.parametrize(("name", "expires_s"), [("", None), ("a" * 101, None), ("a\x1b[1m", None), ("alice", 1.0)])
def test_a_key_needs_a_name_that_can_be_shown_and_a_time_to_come(name: str, expires_s: float | None) -> None:
    with pytest.raises(InvalidRequest):
        make_key(name, LIMITS, 1.0, expires_s)


def test_a_revocation_is_part_of_a_record() -> None:
    record = replace(make_key("alice", LIMITS, 1.0)[1], revoked_s=3.0)
    assert read_record(write_record(record), "here") == record


# --- redaction ------------------------------------------------------------------------------------------------------

KEY = make_key("alice", LIMITS, 1.0)[0]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("cannot reach redis://alice:s3cr3t@host:6379/0", "s3cr3t"),
        ("'rediss+cluster://:s3cr3t@host:1'", "s3cr3t"),
        ("redis://alice:s3@cr3t@host", "cr3t"),
        ("redis://alice:s3/cr3t@host", "cr3t"),
        ("unix:///run/x.sock?db=0&password=s3cr3t&x=1", "s3cr3t"),
        pytest.param(f"{{'authorization': 'Bearer {KEY}'}}", KEY[-43:], id="bearer"),
        pytest.param(f"key {KEY}.", KEY[-43:], id="key"),
        ("authorization: bearer abcdefgh12345678", "abcdefgh"),
    ],
)
def test_secrets_are_taken_out_of_text(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in redacted(text)
    assert "***" in redacted(text)


def test_what_is_left_tells_which_secret_it_was() -> None:
    assert redacted(f"Bearer {KEY}") == f"Bearer outrider-{key_id_of(KEY)}-***"
    assert redacted("redis://alice:pw@host:6379/0 is away") == "redis://alice:***@host:6379/0 is away"


@pytest.mark.parametrize(
    "text",
    ["redis://host:6379/0", "listens on 127.0.0.1:7400", "mail a@b.org", "unix:///x/server.sock?db=0", "key 0a1b"],
)
def test_text_without_secrets_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.fixture
def root() -> Iterator[None]:
    """Put the root logger back as it was."""
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield
    logger.handlers[:], level = before[0], before[1]
    logger.setLevel(level)


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_no_line_of_a_log_has_a_secret_not_even_in_a_traceback(
    root: None, log_format: Literal["plain", "json"]
) -> None:
    written = io.StringIO()
    configure_logging("DEBUG", log_format, written)
    log = logging.getLogger("x")
    log.info("called with %s", f"Bearer {KEY}")
    try:
        raise RuntimeError("cannot reach redis://alice:s3cr3t@host")
    except RuntimeError:
        log.exception("redis://bob:%s@host", "s3cr3t")
    assert written.getvalue().count("***") == 4  # the traceback shows the line too
    assert "s3cr3t" not in written.getvalue()
    assert KEY[-43:] not in written.getvalue()
