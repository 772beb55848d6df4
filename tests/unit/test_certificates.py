"""Certificate files: what cannot be used is named, and what is replaced is read again."""

import logging
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from outrider.certificates import SourceFile, TlsFiles, TlsMaterial
from outrider.errors import InvalidRequest
from tests.authority import Authority, Identity
from verify_service.config import VerifySettings


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def named(identity: Identity) -> TlsFiles:
    return TlsFiles(SourceFile("CERT", identity.cert), SourceFile("KEY", identity.key), SourceFile("CA", identity.ca))


def spoilt(identity: Identity, file: str, content: bytes | None) -> Identity:
    """Replace a file's content; None removes it."""
    path = Path(getattr(identity, file))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    return identity


def test_whole_files_are_read_with_the_names_and_the_end_of_the_certificate(authority: Authority) -> None:
    ends = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    pem = TlsMaterial(named(authority.issue("verifier", "127.0.0.1", ends=ends)), of_its_ca=True).current()
    assert (pem.names, pem.expires) == (("verifier", "127.0.0.1"), ends)


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"tls_cert": "c"}, "TLS_KEY"),
        ({"tls_key": "k"}, "TLS_CERT"),
        ({"tls_ca": "a"}, "TLS_CERT"),
        ({"tls_cert": "c", "tls_key": "k"}, "TLS_CA"),
    ],
)
def test_half_of_the_settings_names_the_missing_one_and_the_one_that_is_set(
    settings: dict[str, Any], missing: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        VerifySettings(**settings).cluster_tls()
    assert caught.value.field == f"OUTRIDER_VERIFY_{missing}"
    given = next(iter(settings))
    assert f"since OUTRIDER_VERIFY_{given.upper()} is {settings[given]}" in caught.value.message


@pytest.mark.parametrize(
    ("file", "setting", "content", "allowed"),
    [
        ("cert", "CERT", None, "a readable file: No such file or directory"),
        ("key", "KEY", b"", "a file that is not empty"),
        ("ca", "CA", b"no certificate", "a file with certificates in PEM"),
        ("cert", "CERT", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "certificates in PEM"),
        ("key", "KEY", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "a private key in PEM"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_setting(
    authority: Authority, file: str, setting: str, content: bytes | None, allowed: str
) -> None:
    identity = spoilt(authority.issue("verifier"), file, content)
    with pytest.raises(InvalidRequest) as caught:
        TlsMaterial(named(identity))
    assert caught.value.field == setting
    assert getattr(identity, file) in caught.value.message
    assert allowed in caught.value.message


def test_a_folder_in_place_of_a_file_is_unreadable(authority: Authority) -> None:
    identity = authority.issue("verifier")
    files = TlsFiles(SourceFile("CERT", str(authority.folder)), SourceFile("KEY", identity.key), SourceFile("CA", ""))
    with pytest.raises(InvalidRequest, match=r"CERT: .* a readable file: Is a directory"):
        TlsMaterial(files)


def test_the_key_of_another_certificate_is_refused_and_no_key_is_in_the_message(authority: Authority) -> None:
    identity, other = authority.issue("verifier"), authority.issue("draft")
    secret = Path(other.key).read_text().splitlines()[1]
    with pytest.raises(InvalidRequest) as caught:
        TlsMaterial(TlsFiles(SourceFile("CERT", identity.cert), SourceFile("KEY", other.key), SourceFile("CA", "")))
    assert caught.value.message.endswith(f"expected the key of the certificate in CERT ({identity.cert})")
    assert secret not in caught.value.message
    pem = TlsMaterial(named(other)).current()
    assert secret.encode() in pem.key
    assert secret not in repr(pem)


def test_a_certificate_that_is_over_or_not_begun_is_refused_with_the_day(authority: Authority) -> None:
    now = datetime.now(UTC)
    over = authority.issue("over", begins=now - timedelta(9), ends=now - timedelta(2))
    with pytest.raises(InvalidRequest, match=f"expired on {now - timedelta(2):%Y-%m-%d}"):
        TlsMaterial(named(over))
    early = authority.issue("early", begins=now + timedelta(2), ends=now + timedelta(9))
    with pytest.raises(InvalidRequest, match=f"begins on {now + timedelta(2):%Y-%m-%d}"):
        TlsMaterial(named(early))


def test_a_certificate_of_another_ca_than_the_clusters_is_refused(authority: Authority, tmp_path: Path) -> None:
    foreign = Authority(tmp_path / "theirs").issue("verifier")
    ours = authority.issue("verifier")
    files = TlsFiles(SourceFile("CERT", foreign.cert), SourceFile("KEY", foreign.key), SourceFile("CA", ours.ca))
    with pytest.raises(InvalidRequest, match=r"CERT: .* issued by a CA in CA \("):
        TlsMaterial(files, of_its_ca=True)
    assert TlsMaterial(files).current().names == ("verifier",)


def test_replaced_files_are_read_again_and_unchanged_ones_are_not(authority: Authority) -> None:
    material = TlsMaterial(named(authority.issue("verifier")))
    first = material.current()
    assert material.current() is first
    authority.issue("verifier", "another-name")
    assert material.current().names == ("verifier", "another-name")
    assert material.current() is material.current()


def test_a_half_replaced_pair_leaves_the_old_in_force_until_it_is_whole(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    identity, coming = authority.issue("verifier"), authority.issue("coming")
    material = TlsMaterial(named(identity))
    first = material.current()
    shutil.copy(coming.cert, identity.cert)
    caplog.clear()
    assert material.current() is first
    assert material.current() is first
    (complaint,) = caplog.messages
    assert complaint.startswith("KEY: ")
    assert complaint.endswith("what was read before stays in force")
    shutil.copy(coming.key, identity.key)
    assert material.current().names == ("coming",)


def test_a_certificate_that_runs_out_in_use_is_complained_of_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    now = datetime.now(UTC)
    identity = authority.issue("verifier", ends=now + timedelta(hours=1))
    material = TlsMaterial(named(identity), clock=lambda: now)
    caplog.clear()
    material.current()
    assert not caplog.messages
    now += timedelta(hours=2)
    material.current()
    material.current()
    (complaint,) = caplog.messages
    assert complaint.startswith(f"CERT ({identity.cert}) expired on")


def test_a_file_that_is_gone_for_a_while_leaves_the_old_in_force(authority: Authority) -> None:
    identity = authority.issue("verifier")
    material = TlsMaterial(named(identity))
    first, kept = material.current(), Path(identity.ca).read_bytes()
    Path(identity.ca).unlink()
    assert material.current() is first
    Path(identity.ca).write_bytes(kept)
    assert material.current().ca == kept


def test_what_is_read_is_told_by_setting_path_name_and_end_without_the_key(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    identity = authority.issue("verifier")
    TlsMaterial(named(identity))
    (told,) = caplog.messages
    for word in (f"CERT ({identity.cert})", f"KEY ({identity.key})", "names verifier", "valid until"):
        assert word in told
    assert Path(identity.key).read_text().splitlines()[1] not in told


def test_files_for_a_store_without_tls_are_refused_and_its_password_is_not_shown() -> None:
    settings = VerifySettings(store_url="redis://:secret@host", store_tls_ca="ca.pem")
    with pytest.raises(InvalidRequest) as caught:
        settings.store_tls()
    assert caught.value.field == "OUTRIDER_VERIFY_STORE_URL"
    assert "since OUTRIDER_VERIFY_STORE_TLS_CA is set" in caught.value.message
    assert "secret" not in caught.value.message
