"""Line charts as SVG for reports, without external resources."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Any

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 8, 22
N_COLORS = 8
"""Number of colors of lines, the classes `c0`, `c1`, ... in `style.css`."""
MAX_POINTS = 400
SMOOTHED_FROM = 40
"""Lines with at least this number of points are smoothed, if they are noisy."""
NOISY = 3.0
"""A line is noisy if its values move up and down by more than this times their range in total. A
learning rate that rises and falls moves by 2."""
CUT_FROM = 50
"""Number of values from which an axis can be cut below its largest values."""
LOG_FROM = 100.0
"""Ratio of the largest to the smallest value from which an axis can be logarithmic."""
PREFIXES = (
    *((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P")),
    *((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")),
)
FROM = 1e4
"""Values below this are shown without an SI prefix."""


@dataclass(frozen=True)
class Series:
    """One line: points `(x, y)` with increasing x; points that are not finite are skipped."""

    name: str
    points: Sequence[tuple[float, float]]
    marked: bool = False
    """True to draw a dot at every point, for lines of few points."""
    band: Sequence[tuple[float, float, float]] = ()
    """A shaded band around the line: points `(x, low, high)`."""
    color: int | None = None
    """Index of the color; None: the position of the line in the chart."""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    include: Sequence[float] = (),
    log: bool = False,
) -> str:
    """Return the chart as a `<figure>` element; an empty string if there is nothing to draw.

    Args:
        title: the title, with the unit.
        series: the lines. A long noisy line is smoothed, with its values in a lighter color behind.
        include: values that the vertical axis includes, such as 0 and 1 for a fraction.
        log: True for a logarithmic axis if all values are positive and differ by `LOG_FROM`.
    """
    whole: list[Series] = []
    for one in series:
        if points := _finite(one.points):
            color = (len(whole) if one.color is None else one.color) % N_COLORS
            whole.append(replace(one, points=points, band=_finite(one.band), color=color))
    if not whole:
        return ""
    lines = [replace(line, points=thinned(line.points), band=thinned(line.band)) for line in whole]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, *edges in line.band for y in edges]
    left, right = min(0, *xs), max(1, *xs)
    log = log and min(ys) > 0 and max(ys) > LOG_FROM * min(ys)
    across: Callable[[float], float] = math.log10 if log else float
    edges = (min(ys), max(ys)) if log else (*clipped_range(ys), *include)
    y_ticks = (_powers if log else ticks)(min(edges), max(edges))
    low, high = across(y_ticks[0]), across(y_ticks[-1])
    cut = sum(y > y_ticks[-1] for y in ys)
    notes = [f"{cut} of {len(ys)} values are higher, up to {shown(max(ys))}"] if cut else []
    if (most := max(len(line.points) for line in whole)) > MAX_POINTS:
        notes.append(f"each point is the mean of up to {math.ceil(most / MAX_POINTS)} values")

    def place(x: float, y: float) -> tuple[float, float]:
        up = (min(max(across(y), low), high) - low) / (high - low)
        return (
            LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    parts: list[str] = []
    for tick in y_ticks:
        y = place(left, tick)[1]
        parts.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4:.1f}">{shown(tick)}</text>')
    for tick in ticks(left, right):
        if tick <= right:
            x = place(tick, y_ticks[0])[0]
            parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - 7}">{shown(tick)}</text>')
    for line in lines:
        parts += _line(line, place)
    legend = "".join(
        f'<span><i class="c{line.color}">{"●" if line.marked else "━"}</i>'
        f" {escape(line.name)} <b>{shown(line.points[-1][1])}</b></span>"
        for line in whole
    ) + "".join(f"<span>{note}</span>" for note in notes)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(_description(title, whole))}">{"".join(parts)}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


def _powers(low: float, high: float) -> list[float]:
    """Return powers of ten that enclose `low … high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = math.ceil((last - first) / 6)
    return [10.0**power for power in range(first, last + step, step)]


def _description(title: str, lines: Sequence[Series]) -> str:
    """Describe a chart in words, for readers who cannot see it."""
    found = [f"{title}, line chart over steps"]
    for line in lines:
        values = [value for _, value in line.points]
        first, last, low, high = map(shown, (values[0], values[-1], min(values), max(values)))
        found.append(f"{line.name} from {first} to {last}, lowest {low}, highest {high}")
    return ". ".join(found)


def _line(line: Series, place: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    """Yield the SVG elements of one line: its band, its values, the smoothed line, its dots."""
    color = f"c{line.color}"
    if line.band:
        edges = [(x, high) for x, _, high in line.band] + [(x, y) for x, y, _ in line.band[::-1]]
        yield f'<polygon class="{color}" points="{_path(edges, place)}"/>'
    smooth = not line.marked and not line.band and _is_noisy([y for _, y in line.points])
    kind = "raw" if smooth else "marked" if line.marked else "plain"
    values = escape(json.dumps([[x, float(f"{y:.7g}")] for x, y in line.points]))
    yield (
        f'<polyline class="{color} {kind}" points="{_path(line.points, place)}" '
        f'data-name="{escape(line.name)}" data-values="{values}"/>'
    )
    if smooth:
        yield f'<polyline class="{color}" points="{_path(smoothed(line.points), place)}"/>'
    for step, value in line.points if line.marked else ():
        x, y = place(step, value)
        yield f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _path(
    points: Sequence[tuple[float, float]], place: Callable[[float, float], tuple[float, float]]
) -> str:
    return " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)


def _is_noisy(values: Sequence[float]) -> bool:
    moved = math.fsum(abs(after - before) for before, after in pairwise(values))
    return len(values) >= SMOOTHED_FROM and moved > NOISY * (max(values) - min(values))


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Replace each value by the mean of a window around it.

    The window is narrower at the start, where values change fast, and one-sided at the end.
    """
    most = len(points) // 20
    found = []
    for middle, (x, _) in enumerate(points):
        half = min(most, middle)
        window = points[middle - half : middle + half + 1]
        found.append((x, math.fsum(value for _, value in window) / len(window)))
    return found


def _finite(points: Sequence[Any]) -> list[Any]:
    """Return the points `(x, values...)` without those that have a value that is not finite."""
    return [point for point in points if all(map(math.isfinite, point))]


def thinned(points: Sequence[Any]) -> list[Any]:
    """Reduce points `(x, values...)` to at most `MAX_POINTS`, each with the means of a group."""
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size or 1)]
    return [
        (group[-1][0], *(math.fsum(one) / len(group) for one in [*zip(*group, strict=True)][1:]))
        for group in groups
    ]


def clipped_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis: from the smallest to the largest value, or below spikes.

    Spikes are at most 2 % of at least `CUT_FROM` values, and so high that the other values would
    fill less than a third of the axis.
    """
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    spread = ordered[int(0.98 * (len(ordered) - 1))] - low
    cut = len(ordered) > CUT_FROM and 0 < 3 * spread < high - low
    return low, low + 1.5 * spread if cut else high


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers for an axis that enclose `low … high`."""
    span = high - low or abs(high) or 1.0
    raw = span / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * unit for unit in (1, 2, 5, 10) if raw <= scale * unit)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def shown(value: float) -> str:
    """Format a number for people."""
    if value == 0:
        return "0"
    for unit, prefix in PREFIXES:
        if abs(value) >= max(unit, FROM):
            return f"{value / unit:.4g}{prefix}"
    return f"{value:.4g}".replace("e-0", "e-")
