"""What the command line prints: the streamed answer, and tables of figures."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.generation import Chunk, Figures, Finished, GenerationEvent, Notice, Usage
from outrider.ids import FinishReason, TokenKind

STYLES = {
    TokenKind.ACCEPTED: "green",
    TokenKind.RECOVERED: "red",
    TokenKind.BONUS: "cyan",
    TokenKind.PLAIN: "default",
}
"""Colour of a token by where it came from."""

MIN_TESTED = 10
"""Positions tested less often than that are not listed: their rate says little."""


class Answer:
    """Streams an answer to a console and remembers what came."""

    def __init__(self, console: Console, notes: Console, *, origins: bool = False, quiet: bool = False) -> None:
        """Prepare.

        Args:
            console: where the text is printed, and nothing else.
            notes: where notices are printed.
            origins: colour every token by its origin; a chunk whose text lags behind its tokens takes the last one's.
            quiet: remember only.
        """
        self._console, self._notes = console, notes
        self._origins = origins
        self._quiet = quiet
        self.text = ""
        self.token_ids: list[int] = []
        self.finished: Finished | None = None

    def take(self, event: GenerationEvent) -> None:
        """Take one event of a generation."""
        match event:
            case Chunk():
                self.text += event.text
                self.token_ids.extend(event.token_ids)
                self._print(event)
            case Notice() if not self._quiet:
                self._notes.print(Text(f"\n[{event.reason}] {event.text}", style="yellow"))
            case Finished():
                self.finished = event
            case _:
                pass

    def _print(self, chunk: Chunk) -> None:
        if self._quiet or not chunk.text:
            return
        if not self._console.is_terminal:  # Rich would expand tabs
            self._console.file.write(chunk.text)
            self._console.file.flush()
            return
        style = STYLES[chunk.kinds[-1]] if self._origins and chunk.kinds else ""
        self._console.print(Text(chunk.text, style=style), end="", soft_wrap=True)


def legend() -> Text:
    """Return the key to the colours."""
    text = Text("tokens: ")
    for kind, style in STYLES.items():
        text.append(kind.name.lower(), style=style).append("  ")
    return text


def comparison(answer: Answer, twin: Answer, *, repeatable: bool) -> Iterable[Text]:
    """Say how an answer compares with its twin's: the ratio of their speeds, and whether the texts are equal.

    Args:
        answer: finished.
        twin: finished, of the same request without speculation.
        repeatable: whether the texts have to be equal.
    """
    ours, theirs = (each.finished.figures.tokens_per_second if each.finished else 0.0 for each in (answer, twin))
    yield Text(f"speed: {ours / theirs:.2f} times the twin's" if ours and theirs else "too short to compare")
    if not repeatable:
        yield Text("the texts need not be equal: without a seed only their distribution is the same")
    elif answer.token_ids == twin.token_ids:
        yield Text("the texts are equal")
    else:
        yield Text("the texts differ", style="red")


def figures_table(finished: Finished, title: str = "") -> Table:
    """Lay out how a generation went."""
    table = Table(title=title or None, show_header=False, box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name, value in _lines(finished.reason, finished.usage, finished.figures):
        table.add_row(name, value)
    return table


def _lines(reason: FinishReason, usage: Usage, figures: Figures) -> Iterable[tuple[str, str]]:
    yield "tokens", f"{usage.completion_tokens} (finished: {reason.name.lower()})"
    measured = figures.num_accepted + figures.num_recovered + figures.num_bonus + figures.num_plain
    if measured < usage.completion_tokens:
        yield "measured", f"{measured} of them, those after it was resumed"
    # Of what came at once there is no time between, and no speed.
    speed = f"{figures.tokens_per_second:.1f}" if figures.tokens_per_second else "too few tokens"
    yield "tokens per second", speed
    yield "time to first token", f"{figures.time_to_first_token_s * 1000:.0f} ms"
    yield "tokens per round", f"{figures.tokens_per_round:.2f} over {figures.num_rounds} rounds"
    yield "rollbacks", str(figures.num_rollbacks)
    yield "accepted / tested / drafted", f"{figures.num_accepted} / {figures.num_tested} / {figures.num_drafted}"
    yield "acceptance by position", by_position(figures)
    predicted = figures.accepted_prediction_tokens + figures.rejected_prediction_tokens
    if predicted:
        yield "of what was expected", f"{figures.accepted_prediction_tokens} of {predicted} tokens came true"
    yield "recovered, bonus, plain", f"{figures.num_recovered}, {figures.num_bonus}, {figures.num_plain}"
    yield "model time", f"verify {figures.verify_s:.2f} s of {figures.total_s:.2f} s"
    if figures.drafter:
        yield "drafter", figures.drafter
    if figures.speculation_off:
        yield "speculation off", figures.speculation_off
    if figures.guarantee_void:
        yield "guarantee void", f"{figures.guarantee_void} times a drafter withheld tokens it had announced"


def by_position(figures: Figures) -> str:
    """Write the share accepted at each distance from the start of an epoch."""
    rates = [
        f"{accepted / tested:.2f}"
        for tested, accepted in zip(figures.tested_per_position, figures.accepted_per_position, strict=True)
        if tested >= MIN_TESTED
    ]
    return " ".join(rates) or "too few tests"
