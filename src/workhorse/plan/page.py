"""A plan as a page with pictures, in one file that needs no network."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from workhorse.devices.memory import GIB, size
from workhorse.files.writing import write_atomically
from workhorse.plan.text import LABELS, lines
from workhorse.train.report.chart import ticks
from workhorse.train.report.page import rendered

COLORS = {
    "weights": "#2563eb",
    "low_bits": "#93c5fd",
    "optimizer": "#9333ea",
    "gradients": "#d97706",
    "sums": "#fcd34d",
    "activations": "#059669",
    "loss": "#db2777",
    "temporary": "#9ca3af",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1120, 300, 64, 8, 14, 34
LETTER = 7
"""Width of a letter in a label, with some space to the next label."""


class Bar(NamedTuple):
    """Bytes of each kind, under a name."""

    name: str
    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def write_page(path: Path, plan: dict[str, Any]) -> None:
    """Write the page, replacing an earlier one.

    Raises:
        WorkhorseError: the disk is full or refuses.
    """
    moments = [
        Bar(f"{moment['phase']} {moment['part']}", {kind: moment[kind] for kind in LABELS})
        for moment in plan["moments"]
    ]
    parts = _parts(plan["memory"])
    there = {kind for bar in (*moments, *parts) for kind, n_bytes in bar.kinds.items() if n_bytes}
    page = rendered(
        "workhorse.plan",
        "page.html",
        title=f"Plan of {plan['source']}",
        legend=[(LABELS[kind], color) for kind, color in COLORS.items() if kind in there],
        moments=stacked(moments, plan["memory"]["room"]),
        parts=stacked(parts),
        text="\n".join(lines(plan)),
    )
    write_atomically(path, page)


def _parts(memory: dict[str, Any]) -> list[Bar]:
    """What each part of the model holds, in its order."""
    names = dict.fromkeys([*memory["parts"], *memory["activations"]])
    return [
        Bar(
            name,
            {
                **memory["parts"].get(name, {}),
                "activations": memory["activations"].get(name, 0),
            },
        )
        for name in names
    ]


def stacked(bars: Sequence[Bar], room: int | None = None) -> str:
    """Stacked bars as an `<svg>` element, with a line at `room` if it is in sight.

    Args:
        bars: from left to right.
        room: bytes of the device.
    """
    highest = max(bar.total for bar in bars)
    if room is not None and room < 2 * highest:
        highest = max(highest, room)
    marks = ticks(0, highest / GIB)
    top = marks[-1] * GIB

    def y(n_bytes: float) -> float:
        return HEIGHT - BOTTOM - n_bytes / top * (HEIGHT - TOP - BOTTOM)

    step = (WIDTH - LEFT - RIGHT) / len(bars)
    drawn = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark * GIB):.1f}" '
        f'y2="{y(mark * GIB):.1f}"/><text class="y" x="{LEFT - 6}" y="{y(mark * GIB) + 4:.1f}">'
        f"{mark:g} GiB</text>"
        for mark in marks
    ]
    labelled = math.ceil(LETTER * max(len(bar.name) + 1 for bar in bars) / step)
    for number, bar in enumerate(bars):
        x = LEFT + number * step
        drawn.append(_drawn(bar, x, step, y))
        if number % labelled == 0:
            half = LETTER * len(bar.name) / 2
            middle = min(x + step / 2, WIDTH - half)
            drawn.append(
                f'<text class="x" x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}">'
                f"{escape(bar.name)}</text>"
            )
    if room is not None and room <= top:
        across = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(room):.1f}" y2="{y(room):.1f}"'
        drawn.append(f'<line class="room" {across}/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _drawn(bar: Bar, x: float, step: float, y: Callable[[float], float]) -> str:
    """A bar as a `<g>` element whose figures show under the pointer.

    Args:
        bar: with its kinds from the bottom up.
        x: its left side.
        step: from one bar to the next.
        y: gives the height of a number of bytes in the picture.
    """
    figures = ", ".join(f"{LABELS[kind]} {size(n)}" for kind, n in bar.kinds.items() if n)
    parts = [f"<title>{escape(f'{bar.name}: {size(bar.total)} ({figures})')}</title>"]
    below = 0
    for kind, n_bytes in bar.kinds.items():
        if n_bytes:
            above = below + n_bytes
            parts.append(
                f'<rect x="{x + 0.05 * step:.1f}" width="{0.9 * step:.1f}" y="{y(above):.1f}" '
                f'height="{y(below) - y(above):.1f}" fill="{COLORS[kind]}"/>'
            )
            below = above
    return f"<g>{''.join(parts)}</g>"
