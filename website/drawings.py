"""Draw the pictures of the course: `python -m website.drawings` writes `docs/course/*.svg`.

The numbers of a matrix or of slopes are those that the page prints, so text and picture agree.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

COURSE = Path(__file__).parent.parent / "docs" / "course"
INK, SOFT, ACCENT = "#1a1d24", "#5b6472", "#2563eb"
COLORS = (ACCENT, "#e8590c", "#0f766e", "#7c3aed")
CELL, EDGE = 34, 70


def numbers(page: str, start: str) -> list[list[float]]:
    """The rows of numbers of the first output on a page that begins with a string."""
    text = (COURSE / page).read_text("utf-8")
    (block, *_) = re.findall(rf"```text\n({re.escape(start)}.*?)```", text, re.DOTALL)
    rows = re.findall(r"[\[(][^\[\]()]+[\])]", block)
    return [[float(number) for number in re.findall(r"\d+\.?\d*", row)] for row in rows]


def svg(width: float, height: float, parts: Iterator[str], title: str) -> str:
    """A picture on white, which also reads well on a dark page."""
    lines, size = "\n".join(parts), f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif"'
        f' font-size="13" role="img" aria-label="{title}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#fff"/>\n{lines}\n</svg>\n'
    )


def text(x: float, y: float, words: str, anchor: str = "middle", color: str = SOFT) -> str:
    """Words at a place."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def shades(rows: Sequence[Sequence[float]], show: bool, title: str, *, causal: bool = True) -> str:
    """A matrix of weights: a row per query, a column per key, darker for larger weights."""
    n = len(rows)

    def parts() -> Iterator[str]:
        yield text(EDGE + n * CELL / 2, 22, "key: position that is read")
        for i, row in enumerate(rows):
            y = 46 + i * CELL
            yield text(EDGE + (i + 0.5) * CELL, 40, str(i))
            yield text(EDGE - 8, y + CELL / 2 + 5, f"query {i}", "end")
            for j, weight in enumerate(row):
                x = EDGE + j * CELL
                visible = j <= i or not causal
                fill = ACCENT if visible else "#e4e7ec"
                opacity = 0.08 + 0.92 * math.sqrt(weight) if visible else 0.6
                yield (
                    f'<rect x="{x:g}" y="{y:g}" width="{CELL - 2}" height="{CELL - 2}" rx="3"'
                    f' fill="{fill}" fill-opacity="{opacity:.2f}"/>'
                )
                if show and visible:
                    color = "#fff" if weight > 0.4 else INK  # noqa: PLR2004 (dark cells)
                    yield text(
                        x + CELL / 2 - 1, y + CELL / 2 + 4, f"{weight:.2f}".lstrip("0"), color=color
                    )

    return svg(EDGE + n * CELL + 20, 56 + n * CELL, parts(), title)


def arrows(positions: int, pairs: int, theta: float) -> str:
    """A row per pair of features: the direction of the same vector at each position."""
    step = 64

    def parts() -> Iterator[str]:
        yield text(12, 22, "position", "start")
        for position in range(positions):
            yield text(130 + position * step, 22, str(position))
        for pair in range(pairs):
            frequency, y = theta ** (-pair / pairs), 62 + pair * step
            yield text(12, y, f"pair {pair}", "start", COLORS[pair])
            yield text(12, y + 17, f"f = {frequency:g}", "start")
            for position in range(positions):
                x, angle = 130 + position * step, position * frequency
                left, top = x + 24 * math.cos(angle), y - 24 * math.sin(angle)
                yield f'<circle cx="{x}" cy="{y}" r="24" fill="none" stroke="#e4e7ec"/>'
                wings = " ".join(
                    f"{left - 8 * math.cos(turned):.1f},{top + 8 * math.sin(turned):.1f}"
                    for turned in (angle + 0.45, angle - 0.45)
                )
                yield (
                    f'<path d="M{x},{y}L{left:.1f},{top:.1f}" stroke="{COLORS[pair]}"'
                    ' stroke-width="2.5"/>'
                    f'<polygon points="{left:.1f},{top:.1f} {wings}" fill="{COLORS[pair]}"/>'
                )

    title = "Rotations of RoPE: fast pairs turn far between positions, slow pairs hardly"
    return svg(130 + positions * step - 20, 40 + pairs * step, parts(), title)


def slopes(values: Sequence[float], far: int) -> str:
    """A line per head: what ALiBi adds to the score of a key at each distance."""
    left, top, width, height = 60, 20, 380, 170

    def parts() -> Iterator[str]:
        for distance in range(0, far + 1, 4):
            yield text(left + width * distance / far, top + height + 20, str(distance))
        yield text(left + width / 2, top + height + 40, "distance from query to key")
        lowest = values[0] * far
        for value in (0, lowest / 2, lowest):
            y = top + height * value / lowest
            yield f'<path d="M{left},{y:g}h{width}" stroke="#e4e7ec"/>'
            yield text(left - 8, y + 4, f"{-value:g}".replace("-", "−"), "end")
        for head, slope in enumerate(values):
            y = top + height * slope * far / lowest
            color, line = COLORS[head], f"M{left},{top}L{left + width},{y:.1f}"
            yield f'<path d="{line}" stroke="{color}" stroke-width="2.5"/>'
            below = {len(values) - 2: 6, len(values) - 1: -6}.get(head, 0)  # two lines meet there
            yield text(left + width + 8, y + 4 + below, f"head {head}", "start", color)

    return svg(left + width + 70, top + height + 54, parts(), "Biases of ALiBi: a slope per head")


def drawings() -> dict[str, str]:
    """The pictures, by file name."""
    rings = numbers("02b-attention-derived.md", "tensor([[0.35")
    weights = numbers("03-attention-by-hand.md", "tensor([[1.00")
    window = numbers("04-attention-by-kernel.md", "tensor([[1, 0")
    (biases,) = numbers("05-positions.md", "(0.25")
    return {
        "ring-symmetric.svg": shades(
            rings[:5], True, "Weights from symmetric scores: the same to both sides", causal=False
        ),
        "ring.svg": shades(
            rings[5:], True, "Weights from A: each token looks at the next one", causal=False
        ),
        "attention.svg": shades(
            weights, True, "Attention weights of one head: causal, rows sum to 1"
        ),
        "window.svg": shades(
            window, False, "A window of four positions: each query sees four keys"
        ),
        "rotation.svg": arrows(positions=7, pairs=4, theta=10_000),
        "alibi.svg": slopes(biases, far=16),
    }


def main() -> None:
    """Write the pictures."""
    for name, content in drawings().items():
        (COURSE / name).write_text(content, "utf-8")


if __name__ == "__main__":
    main()
