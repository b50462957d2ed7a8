"""Put finished studies into the documentation: `python -m studies.publish runs/swiglu …`.

For each, docs/studies/NAME.md, its report, with the curves of the held-out loss beside it as
NAME.svg. Nothing else of a study is kept in the repository; anyone can run it again.
"""

import re
from importlib.resources import files
from pathlib import Path

from studies.command import errors_in_one_line, parser
from workhorse.compare.report import as_markdown
from workhorse.files.text_formats import read_json
from workhorse.files.writing import write_atomically

PAGES = Path(__file__).parent.parent / "docs" / "studies"
LIGHT = "--ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; --card: #ffffff"
"""Colours of a picture, which may stand on a page of another colour."""
CHART = re.compile(r"<svg .*?</svg>", re.DOTALL)


def picture(page: str) -> str:
    """The first chart of a report, as a file that stands alone."""
    found = CHART.search(page)
    assert found, "a report has a chart"
    rules = files("workhorse.train.report").joinpath("style.css").read_text("utf-8").splitlines()
    style = "\n".join(line for line in rules if line.startswith("svg"))
    head = f"<style>svg {{ {LIGHT} }}\n{style}</style>"
    return (
        re.sub(
            r"<svg ([^>]*)>",
            rf'<svg xmlns="http://www.w3.org/2000/svg" \1>{head}',
            found[0],
            count=1,
        )
        + "\n"
    )


def publish(study: Path, pages: Path = PAGES) -> Path:
    """Write the page and the picture of a finished study; returns the page."""
    results = read_json(study / "results.json")
    name = results["study"]
    title, _, rest = as_markdown(results).partition("\n\n")
    command = f"```\nworkhorse compare studies/{name}.yaml\n```"
    curves = f"![Held-out loss while training]({name}.svg)"
    pages.mkdir(parents=True, exist_ok=True)
    write_atomically(pages / f"{name}.svg", picture((study / "report.html").read_text("utf-8")))
    page = pages / f"{name}.md"
    write_atomically(page, "\n\n".join([title, command, rest.rstrip(), curves]) + "\n")
    return page


def main() -> None:
    """Publish the studies that are named."""
    command = parser(__doc__)
    command.add_argument(
        "studies", type=Path, nargs="+", metavar="FOLDER", help="of a study that has ended"
    )
    asked = command.parse_args()
    with errors_in_one_line():
        for study in asked.studies:
            print(publish(study))


if __name__ == "__main__":
    main()
