"""Put finished studies into the documentation: `python -m studies.publish runs/swiglu …`.

For each, docs/studies/NAME.md, its report, with the curves of the held-out loss beside it as
NAME.svg. Nothing else of a study is kept in the repository; anyone can run it again.
"""

import re
from importlib.resources import files
from pathlib import Path

from studies.command import errors_in_one_line, parser
from workhorse.compare.report import as_markdown
from workhorse.compare.results import ONE_SEED
from workhorse.files.text_formats import read_json
from workhorse.files.writing import write_atomically

PAGES = Path(__file__).parent.parent / "docs" / "studies"
LIGHT = "--ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; --card: #ffffff"
"""Colours of a picture, which may stand on a page of another colour."""
CHART = re.compile(
    r"<figure><figcaption>(.*?)</figcaption><svg viewBox=\"0 0 (\d+) (\d+)\"[^>]*>(.*?)</svg>"
    r"<div class=\"legend\">(.*?)</div></figure>",
    re.DOTALL,
)
ENTRY = re.compile(r'<i class="(c\d)">(.)</i> (.*?) <b>(.*?)</b>')
ROW = 16


def picture(page: str) -> str:
    """The first chart of a report, as a file that stands alone."""
    found = CHART.search(page)
    assert found, "a report has a chart"
    title, width, height, drawn, legend = found.groups()
    css = files("workhorse.train.report").joinpath("style.css").read_text("utf-8")
    rules = [line for line in css.splitlines() if line.startswith(("svg", ".c"))]
    colors = "; ".join(re.findall(r"--c\d: #\w+", css)[:8])  # the first ones are for light pages
    parts = [f'<text x="12" y="-10">{title}</text>', re.sub(r' data-\w+="[^"]*"', "", drawn)]
    entries = ENTRY.findall(legend)
    for row, (color, mark, name, value) in enumerate(entries, start=1):
        spot = f'<tspan class="{color}" style="fill: currentColor">{mark}</tspan>'
        parts.append(f'<text x="12" y="{int(height) + ROW * row}">{spot} {name} {value}</text>')
    box = f"0 {-2 * ROW} {width} {int(height) + ROW * (len(entries) + 3)}"
    style = "\n".join([f"svg {{ {LIGHT}; {colors}; background: var(--card) }}", *rules])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}"><style>{style}</style>'
        f"{''.join(parts)}</svg>\n"
    )


def publish(study: Path, pages: Path = PAGES) -> Path:
    """Write the page and the picture of a finished study; returns the page."""
    results = read_json(study / "results.json")
    name = results["study"]
    title, _, rest = as_markdown(results).partition("\n\n")
    rest = re.sub(r"^(C\d+(?:, C\d+)*)([.,]) ", r"Claim [\1](../claims.md)\2 ", rest)
    rest = rest.replace(f"- {ONE_SEED}", "- one seed: no confidence intervals")
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
