"""A page of charts and tables, in one file that needs no network."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from studies.command import errors_in_one_line, parser
from workhorse.files.writing import write_atomically, writing
from workhorse.train.report.page import rendered


@dataclass
class Section:
    """A part of a page: words, charts (`<figure>`), and a table, its first row the head."""

    title: str
    words: str
    charts: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def write_page(
    name: str, title: str, sections: Callable[[], list[Section]], *, about: str | None
) -> None:
    """The command that writes a page: to `runs/NAME.html`, or where `--out` says.

    Args:
        name: of the file.
        title: of the page.
        sections: make what it shows.
        about: the docstring of the program, whose first line is its help.
    """
    command = parser(about)
    command.add_argument("--out", type=Path, default=Path(f"runs/{name}.html"), help="the page")
    out: Path = command.parse_args().out
    with errors_in_one_line():
        with writing(out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, rendered("studies", "page.html", title=title, sections=sections()))
    print(out)
