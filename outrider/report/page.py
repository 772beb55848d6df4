"""Lays out a report: a title, facts, and sections of text, tables and plots, as one HTML page.

The page is self-contained: styles are inside, plots are data URIs, there is no script, and nothing is fetched when it
is opened. All texts are escaped; nothing that is passed in is taken for markup.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from outrider.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture, as `outrider.report.plots` draws it."""

    title: str
    """Shown above it, and read to those who do not see it."""
    svg: str
    """A whole SVG document."""

    @property
    def uri(self) -> str:
        """The picture as a data URI: its ids, of which every plot has the same, stay its own."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode("ascii")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Each as long as the header."""

    def __post_init__(self) -> None:
        """Refuse rows that do not fit.

        Raises:
            ValueError: a row is shorter or longer than the header.
        """
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.header):
                raise ValueError(f"row {number} has {len(row)} cells, the header {len(self.header)}")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report."""

    title: str
    text: str = ""
    """Paragraphs, with an empty line between them."""
    table: Table | None = None
    plots: tuple[Plot, ...] = ()

    @property
    def paragraphs(self) -> list[str]:
        """The text's paragraphs."""
        return [part.strip() for part in self.text.split("\n\n") if part.strip()]


def page(title: str, sections: Sequence[Section], facts: Mapping[str, str] | None = None) -> str:
    """Return a report as HTML.

    Args:
        title: of the page.
        sections: in order.
        facts: what it was made from and on: names and values, listed at the end.
    """
    environment = Environment(
        loader=PackageLoader("outrider.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html").render(title=title, sections=sections, facts=facts or {})


def check_writable(path: Path, field: str = "report") -> None:
    """Find out before long work whether a report can be written; a file that is there stays as it is.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidRequest(field, str(path), f"a file that can be written ({error.strerror})") from error


def save(path: Path, html: str, field: str = "report") -> None:
    """Write a report to a file.

    Args:
        path: the file; what it holds is replaced.
        html: from `page`.
        field: name of the option that named the file.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    check_writable(path, field)
    path.write_text(html, encoding="utf-8")
