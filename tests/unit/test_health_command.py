"""`outrider health`: exit status, what it says, whom it asks, and what it loads."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.certificates import SourceFile, TlsFiles, TlsMaterial
from outrider.cli.health import PLAINTEXT, Tls, described, main
from outrider.errors import InvalidRequest
from outrider.rpc import Callers, RpcServer, ServerTls
from tests.authority import Authority, Identity

NAME = "outrider.v1.VerifyService"


async def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command in a thread of this process; return its status and everything that it printed."""

    def work() -> int:
        try:
            main(list(arguments))
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code)
                return 1
            return int(ended.code or 0)
        return 0

    status = await asyncio.to_thread(work)
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def server_tls(identity: Identity, ca: str = "") -> ServerTls:
    files = TlsFiles(SourceFile("cert", identity.cert), SourceFile("key", identity.key), SourceFile("ca", ca))
    return ServerTls(TlsMaterial(files), Callers())


async def test_the_status_is_0_only_while_the_service_serves(capsys: pytest.CaptureFixture[str]) -> None:
    server = RpcServer()
    address = await server.start("127.0.0.1:0", [NAME])
    try:
        assert await asked(capsys, "--address", address) == (1, f"{address}: NOT_SERVING\n")
        await server.set_serving(True)
        assert await asked(capsys, "--address", address) == (0, "SERVING\n")
        assert await asked(capsys, "--address", address, "--service", NAME) == (0, "SERVING\n")
        status, said = await asked(capsys, "--address", address, "--service", "no.such.Service")
        assert status == 1
        assert "NOT_FOUND" in said
        await server.drain()
        assert await asked(capsys, "--address", address) == (1, f"{address}: NOT_SERVING\n")
    finally:
        await server.stop(0)
    status, said = await asked(capsys, "--address", address)
    assert status == 1
    assert said.startswith(f"error: {address}: UNAVAILABLE: ")


async def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        status, said = await asked(capsys, "--address", f"127.0.0.1:{port}", "--timeout-s", "0.3")
    assert status == 1
    assert "DEADLINE_EXCEEDED" in said or "UNAVAILABLE" in said


async def test_a_process_that_serves_nobody_is_alive_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    server = RpcServer()
    address = await server.start("127.0.0.1:0", [NAME])
    try:
        assert (await asked(capsys, "--address", address))[0] == 1
        assert await asked(capsys, "--address", address, "--service", "live") == (0, "SERVING\n")
    finally:
        await server.stop(0)


async def test_under_mutual_tls_it_shows_the_certificate_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = Authority(tmp_path / "ours").issue("verifier")
    server = RpcServer(tls=server_tls(ours, ours.ca))
    address = await server.start("127.0.0.1:0", [NAME])
    await server.set_serving(True)
    shown = ("--ca", ours.ca, "--cert", ours.cert, "--key", ours.key)
    try:
        assert await asked(capsys, "--address", address, *shown, "--server-name", "verifier") == (0, "SERVING\n")
        assert (await asked(capsys, "--address", address, "--ca", ours.ca, "--server-name", "verifier"))[0] == 1
        for options, why in (((*shown, "--server-name", "other"), "has another name"), ((), "perhaps it wants TLS")):
            status, said = await asked(capsys, "--address", address, *options)
            assert (status, said.count("\n")) == (1, 1)
            assert said.startswith("error: no connection to ")
            assert why in said, "in the words that the other commands have for it"
    finally:
        await server.stop(0)


async def test_a_service_asks_itself_with_what_its_own_environment_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Authority(tmp_path / "ours").issue("verifier")
    server = RpcServer(tls=server_tls(ours, ours.ca))
    address = await server.start("127.0.0.1:0", [NAME])
    await server.set_serving(True)
    settings = {"LISTEN": address, "TLS_CERT": ours.cert, "TLS_KEY": ours.key, "TLS_CA": ours.ca}
    for name, value in settings.items():
        monkeypatch.setenv(f"OUTRIDER_VERIFY_{name}", value)
    try:
        assert await asked(capsys) == (0, "SERVING\n")
    finally:
        await server.stop(0)


async def test_an_orchestrator_trusts_its_own_certificate_whoever_has_issued_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Authority(tmp_path / "public").issue("serving.example")
    server = RpcServer(tls=server_tls(front))
    address = await server.start("127.0.0.1:0", [NAME])
    await server.set_serving(True)
    monkeypatch.setenv("OUTRIDER_ORCHESTRATOR_LISTEN", address)
    monkeypatch.setenv("OUTRIDER_ORCHESTRATOR_SERVE_TLS_CERT", front.cert)
    try:
        assert await asked(capsys) == (0, "SERVING\n")
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("0.0.0.0:7401", "127.0.0.1:7401"),
        ("[::]:7401", "127.0.0.1:7401"),
        ("127.0.0.3:7401", "127.0.0.3:7401"),
        ("unix:/run/verify", "unix:/run/verify"),
    ],
)
def test_every_interface_is_asked_at_loopback_and_any_other_one_where_it_is(listen: str, address: str) -> None:
    assert described({"OUTRIDER_VERIFY_LISTEN": listen}) == (address, PLAINTEXT)


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({}, "address"),
        ({"OUTRIDER_VERIFY_LISTEN": "a:1", "OUTRIDER_DRAFT_LISTEN": "b:1"}, "address"),
        ({"OUTRIDER_ORCHESTRATOR_LISTEN": "a:1", "OUTRIDER_ORCHESTRATOR_SERVE_TLS_CLIENT_CA": "f"}, "cert"),
    ],
    ids=["none", "two", "clients-need-certificates"],
)
def test_an_environment_that_does_not_say_whom_to_ask_is_refused(environment: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        described(environment)
    assert refused.value.field == field


@pytest.mark.parametrize("arguments", [("--timeout-s", "0"), ("--timeout-s", "61"), ("--ca", "f")])
async def test_wrong_options_are_named(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    status, said = await asked(capsys, *arguments)
    assert status == 1
    assert "error: " in said
    assert "timeout_s" in said or "address" in said


async def test_a_file_of_tls_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = await asked(capsys, "--address", "127.0.0.1:1", "--ca", "/nowhere/ca.crt")
    assert status == 1
    assert "--ca" in said
    assert "/nowhere/ca.crt" in said


def test_it_loads_none_of_what_the_other_commands_need() -> None:
    ask = (
        "import sys; sys.argv = ['outrider', 'health', '--address', '127.0.0.1:1'];"
        "from outrider.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(bool(ended.code))\n"
        "print(*sorted({'torch', 'numpy', 'pydantic', 'redis', 'outrider.cli.app'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True"]


def test_plaintext_is_what_no_option_of_tls_means() -> None:
    assert not PLAINTEXT.is_on
    assert Tls(server_name="verifier").is_on


async def test_its_help_calls_it_what_is_to_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = await asked(capsys, "--help")
    assert (status, said.splitlines()[0]) == (0, "Usage: outrider health [OPTIONS]")
