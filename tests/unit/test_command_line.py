"""What the command line refuses before it starts anything, and in which words."""

import io
import socket

import pytest
from rich.console import Console

from outrider.cli.app import app, up
from outrider.cli.ask import Ask
from outrider.cli.drafters import live
from outrider.cli.ranges import check_listen
from outrider.cli.replay import replay
from outrider.cli.show import figures_table
from outrider.errors import InvalidRequest, Unavailable
from outrider.generation import Figures, Finished, TextPrompt
from outrider.ids import FinishReason


def refused(*arguments: str) -> str:
    """Return the error of the library that reads command lines, as it is printed."""
    printed = io.StringIO()
    with pytest.raises(SystemExit):
        app(list(arguments), error_console=Console(file=printed, width=200))
    return " ".join(printed.getvalue().replace("│", " ").split())


@pytest.mark.parametrize("arguments", [("--nosuch", "x"), ("--nosuch",), ("--nosuch=3",), ("x", "--nosuch")], ids=str)
def test_an_option_that_does_not_exist_is_named_and_never_taken_as_the_prompt(arguments: tuple[str, ...]) -> None:
    said = refused("run", *arguments)
    assert "option" in said
    assert "--nosuch" in said
    assert "Unused" not in said


@pytest.mark.parametrize("prompt", ["- one", "-5 degrees", "-- so he said", "-"])
def test_a_prompt_may_begin_with_a_hyphen(prompt: str) -> None:
    _, bound, _ = app.parse_args(["run", prompt], exit_on_error=False, print_error=False)
    assert bound.args == (prompt,)


def test_of_the_commands_that_exist_all_are_named() -> None:
    said = refused("nosuch")
    for name in app:
        assert name.startswith("-") or name in said
    assert "..." not in said


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (Ask(temperature=-1.0), "sampling.temperature"),
        (Ask(temperature=1000.0), "sampling.temperature"),
        (Ask(top_p=7.0), "sampling.top_p"),
        (Ask(gamma=999), "speculation.gamma"),
        (Ask(gamma=4, window=2), "speculation.window"),
        (Ask(max_tokens=0), "max_tokens"),
        (Ask(seed=-1), "seed"),
        (Ask(mode="psychic"), "mode"),
    ],
    ids=str,
)
def test_ranges_are_checked_before_a_cluster_is_started(ask: Ask, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        ask.request("x")
    assert error.value.field == field


def test_what_is_in_range_is_asked_as_it_was_said() -> None:
    request = Ask(raw=True, temperature=0.5, gamma=3).request("x")
    assert (request.prompt, request.sampling.temperature, request.speculation.gamma) == (TextPrompt("x"), 0.5, 3)


@pytest.mark.parametrize("listen", ["foo", "localhost", "127.0.0.1:http", "127.0.0.1:65536", ":7400"])
def test_an_address_without_host_and_port_is_refused_before_anything_starts(listen: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^listen: .*host:port"):
        up(listen=listen)
    with pytest.raises(InvalidRequest, match=r"^http: .*host:port"):
        up(listen="127.0.0.1:0", http=listen)


def test_an_address_that_is_taken_or_elsewhere_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(Unavailable, match=r"cannot listen on .*: Address already in use$"):
            check_listen("listen", f"127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(Unavailable, match=r"cannot listen on 256\.1\.1\.1:1"):
        check_listen("listen", "256.1.1.1:1")
    check_listen("listen", "127.0.0.1:0")
    check_listen("listen", "unix:/nowhere/socket")


def test_a_replay_of_nothing_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="one record"):
        replay()


def test_a_speed_that_nothing_measured_is_no_figure() -> None:
    for speed, said in ((0.0, "too few tokens"), (12.34, "12.3")):
        table = figures_table(Finished(FinishReason.STOP, figures=Figures(tokens_per_second=speed)))
        cells = dict(zip(*(column.cells for column in table.columns), strict=True))
        assert cells["tokens per second"] == said


def test_shares_that_are_not_of_a_hundred_are_said_to_be_weights(capsys: pytest.CaptureFixture[str]) -> None:
    for shares, said in ((("a=80", "b=30"), True), (("a=80", "b=20"), False)):
        with pytest.raises(InvalidRequest, match="store"):
            live.split(*shares, store="")
        assert ("add up to 110, not 100" in capsys.readouterr().err) is said
