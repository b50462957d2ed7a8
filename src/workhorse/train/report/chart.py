"""Line charts as SVG for reports, without external resources."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import cycle

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 32
COLORS = (
    *("#2563eb", "#d97706", "#059669", "#9333ea"),
    *("#dc2626", "#0891b2", "#65a30d", "#db2777"),
)
"""Colors of the lines, repeated if there are more lines."""
LETTERS = 80
"""Number of characters of title and legend that fit on one line. A longer legend is drawn below."""
ROW = 15
MAX_POINTS = 600
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


def line_chart(title: str, series: Sequence[Series], unit: str = "") -> str:
    """Return the chart as an `<svg>` element; an empty string if there is nothing to draw."""
    lines = [
        replace(one, points=thinned(one.points), band=_thinned_band(one.band)) for one in series
    ]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, *edges in line.band for y in edges]
    left, right = min(0, *xs), max(1, *xs)
    x_ticks = [tick for tick in ticks(left, right) if tick <= right]
    y_ticks = ticks(*clipped_range(ys))
    low, high = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left)
        up = (min(max(y, low), high) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (
            HEIGHT - TOP - BOTTOM
        )

    parts = [f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>']
    for tick in y_ticks:
        y = place(left, tick)[1]
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4:.1f}">{shown(tick)}</text>')
    for tick in x_ticks:
        x = place(tick, low)[0]
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{shown(tick)}</text>')
    for color, line in zip(cycle(COLORS), lines, strict=False):
        parts += _line(line, color, place)
    entries = [
        f'<tspan fill="{color}">{escape(line.name)} {shown(line.points[-1][1])}</tspan>'
        for color, line in zip(cycle(COLORS), lines, strict=False)
    ]
    note = [f"<tspan>{escape(unit)}</tspan>"] if unit else []
    letters = len(title) + sum(len(line.name) + 8 for line in lines)
    rows = [[*entries, *note]] if letters <= LETTERS else [[one] for one in [*entries, *note]]
    for number, row in enumerate(rows):
        y = 16 if len(rows) == 1 else HEIGHT + ROW * number
        parts.append(f'<text class="legend" x="{WIDTH - RIGHT}" y="{y}">{"  ".join(row)}</text>')
    height = HEIGHT if len(rows) == 1 else HEIGHT + ROW * len(rows)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _line(
    line: Series, color: str, place: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    """Return the SVG elements of one line: its band, the line, its dots."""
    parts = []
    if line.band:
        edges = [(x, high) for x, _, high in line.band] + [(x, y) for x, y, _ in line.band[::-1]]
        outline = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in edges)
        parts.append(f'<polygon points="{outline}" fill="{color}" fill-opacity="0.15"/>')
    spots = [place(x, y) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    parts.append(f'<polyline points="{path}" stroke="{color}"/>')
    if line.marked or len(spots) == 1:
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}">'
            f"<title>step {shown(step)}: {shown(value)}</title></circle>"
            for (x, y), (step, value) in zip(spots, line.points, strict=True)
        ]
    return parts


def _thinned_band(band: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Reduce a band to at most `MAX_POINTS` points, each the mean of a group; see `thinned`."""
    whole = [point for point in band if all(map(math.isfinite, point))]
    lows = thinned([(x, low) for x, low, _ in whole])
    highs = thinned([(x, high) for x, _, high in whole])
    return [(x, low, high) for (x, low), (_, high) in zip(lows, highs, strict=True)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a line to at most `MAX_POINTS` points, each the mean of a group of points."""
    finite = [point for point in points if math.isfinite(point[1])]
    size = math.ceil(len(finite) / MAX_POINTS)
    groups = [finite[start : start + size] for start in range(0, len(finite), size or 1)]
    return [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]


def clipped_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis: the smallest value, and a limit at which spikes are cut."""
    ordered = sorted(values)
    typical = ordered[int(0.98 * (len(ordered) - 1))]
    return ordered[0], min(ordered[-1], typical + 0.5 * (typical - ordered[0])) or ordered[-1]


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
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"  # noqa: PLR2004
