"""Write `RESULTS.md` and its plot from the stored results.

    python -m benchmarks.report

`results/*.json` are files that benchmarks wrote with `--save`. `results/*.md` are other
measurements, written by hand; they are copied unchanged.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import MIB, OURS, RESULTS

Result = dict[str, Any]

TITLES = {
    "train": "Training",
    "decode": "Decoding one text",
    "prefill": "Reading a prompt",
    "generate_batch": "Decoding several texts at once",
    "tokenize": "Encoding a corpus",
    "load": "Loading a model",
    "start": "Starting",
    "roofline": "What the machine can do at most",
}
"""The benchmarks in the order of their sections."""
INTRODUCTION = """\
# Results

Written by `python -m benchmarks.report` from what `make bench` measured; [README.md](README.md)
says how. Everyone is measured in turn in one run, since absolute times on a shared
machine drift: figures are medians over the rounds, and "Workhorse is" is the median of the ratios
of the same round, above 1 where Workhorse is faster. "Of the limit" is the share of what the
machine can do at most, measured in the same rounds.
"""
COLUMNS = (
    *("case", "who", "median", "reached", "of the limit", "Workhorse is", "peak memory"),
    "ready after",
)
PLOT = "results.svg"


def main() -> None:
    """Write the page and the plot beside the folder of results."""
    results = load(RESULTS)
    page = RESULTS.parent / "RESULTS.md"
    drawn = plot(results, RESULTS.parent / PLOT)
    parts = [path.read_text() for path in sorted(RESULTS.glob("*.md"))]
    page.write_text(render(results, parts, plot=PLOT if drawn else None))


def load(folder: Path) -> dict[str, list[Result]]:
    """The cases of each benchmark, in the order of the page."""
    paths = {name: folder / f"{name}.json" for name in TITLES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def render(
    results: dict[str, list[Result]], parts: Iterable[str] = (), plot: str | None = None
) -> str:
    """The page as Markdown.

    Args:
        results: cases by benchmark.
        parts: sections written by hand.
        plot: the file of the picture; None if there is none.
    """
    sections = [INTRODUCTION]
    if plot:
        sections.append(f"![How many times as fast as the fastest peer]({plot})\n")
    sections += [_section(name, cases) for name, cases in results.items()]
    return "\n".join([*sections, *parts])


def _section(name: str, cases: Sequence[Result]) -> str:
    return "\n".join(
        [f"## {TITLES[name]}", "", *_table(cases), "", *_remarks(cases), *_origins(cases)]
    )


def _table(cases: Sequence[Result]) -> Iterable[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|---|" + "--:|" * (len(COLUMNS) - 2)
    for case in cases:
        for entry in case["entries"]:
            ratio, share, peak = entry["ratio"], entry["of_limit"], entry["peak_bytes"]
            achieved = entry["achieved"]
            cells = (
                case["case"],
                entry["name"],
                f"{number(entry['median'])} {case['unit']}",
                "" if achieved is None else f"{number(achieved)} {case['limit_unit']}",
                "" if share is None else f"{share:.0%}",
                "" if ratio is None else f"{ratio:.2f} ×",
                "" if peak is None else f"{peak / MIB:,.0f} MiB",
                f"{entry['build_seconds']:.1f} s",
            )
            yield f"| {' | '.join(cells)} |"


def _remarks(cases: Sequence[Result]) -> Iterable[str]:
    """Limits, notes and missing contestants, without repetitions."""
    lines: list[str] = []
    for case in cases:
        if case["limit_median"] is not None:
            bound = f"{number(case['limit_median'])} {case['limit_unit']}"
            lines.append(f"- {case['case']}: the limit, {case['limit']}, was {bound}.")
    lines += [
        f"- {entry['name']}: {entry['note']}."
        for case in cases
        for entry in case["entries"]
        if entry["note"]
    ]
    lines += [f"- {line}." for case in cases for line in case["missing"]]
    return [*dict.fromkeys(lines), ""] if lines else []


def _origins(cases: Sequence[Result]) -> Iterable[str]:
    """The command, machine and date of each group of cases."""
    origins: dict[str, list[Result]] = {}
    for case in cases:
        machine = "; ".join(filter(None, case["machine"].values()))
        packages = ", ".join(f"{name} {version}" for name, version in case["versions"].items())
        origin = f"{case['rounds']} rounds, {case['date']}, on {machine}; with {packages}."
        origins.setdefault(f"`{case['command']}`, {origin}", []).append(case)
    for origin, its_cases in origins.items():
        which = "" if len(origins) == 1 else ", ".join(case["case"] for case in its_cases) + ": "
        yield which + origin
        yield ""


def number(value: float) -> str:
    """A number with at least three significant digits and thousands separators."""
    for bound, digits in ((1, 3), (10, 2), (100, 1)):
        if value < bound:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def against_best(results: dict[str, list[Result]]) -> list[tuple[str, str, float]]:
    """(case, fastest peer, speed of Workhorse relative to it) for each case with a peer."""
    found = []
    for name in TITLES:
        for case in results.get(name, []):
            peers = [
                (entry["ratio"], entry["name"])
                for entry in case["entries"]
                if entry["ratio"] is not None and not entry["name"].startswith(OURS)
            ]
            if peers and name != "start":  # the rows of `start` are not peers of one another
                ratio, peer = min(peers)
                found.append((f"{name}: {case['case']}", peer, ratio))
    return found


def plot(results: dict[str, list[Result]], path: Path) -> bool:
    """Draw a bar for each case; False if there is nothing to draw or matplotlib is missing."""
    rows = against_best(results)
    if not rows:
        return False
    try:
        import matplotlib as mpl  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("no plot: pip install matplotlib")
        return False
    mpl.rcParams["svg.hashsalt"] = "workhorse"  # the same picture, byte for byte
    figure = Figure(figsize=(8, 0.6 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{case}, {peer}" for case, peer, _ in rows]
    ratios = [ratio for *_, ratio in rows]
    colors = ["tab:blue" if ratio >= 1 else "tab:gray" for ratio in ratios]
    bars = axes.barh(names, ratios, color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the fastest peer measured")
    axes.margins(x=0.12)
    figure.savefig(path, metadata={"Date": None})
    return True


if __name__ == "__main__":
    main()
