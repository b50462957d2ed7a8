"""Draw the pictures of the course: `python -m website.drawings` writes `docs/course/*.svg`.

The numbers of a matrix or of slopes are those that the page prints, so text and picture agree.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from workhorse.nn.positions.absolute import SinusoidalPositions, alibi_slopes
from workhorse.nn.positions.rope import inverse_powers

COURSE = Path(__file__).parent.parent / "docs" / "course"
INK, SOFT, ACCENT = "#1a1d24", "#5b6472", "#2563eb"
COLORS = (ACCENT, "#e8590c", "#0f766e", "#7c3aed", "#be185d", "#854d0e", "#334155")
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


def waves(positions: int, width: int) -> str:
    """The table of sinusoidal positions: a row per feature, a column per position."""
    left, top, cell, height = 90, 40, 6, 6
    table = SinusoidalPositions(width).vectors(torch.arange(positions)[None])[0].tolist()

    def parts() -> Iterator[str]:
        for position in range(0, positions + 1, 16):
            yield text(left + cell * position, top - 10, str(position))
        yield text(left - 10, top - 10, "position", "end")
        for feature in range(width):
            y = top + height * feature
            if feature % 8 == 0:
                yield text(left - 10, y + height + 4, f"feature {feature}", "end")
        shaded = defaultdict[float, str](str)  # a path for each shade, so that the file is small
        for position, row in enumerate(table):
            for feature, value in enumerate(row):
                at = f"M{left + cell * position} {top + height * feature}"
                shaded[round(value, 1)] += f"{at}h{cell}v{height}h-{cell}z"
        for value, path in sorted(shaded.items()):
            color = ACCENT if value > 0 else COLORS[1]
            yield f'<path d="{path}" fill="{color}" fill-opacity="{abs(value):.1f}"/>'
        below = top + height * width + 22
        yield text(left, below, "1", "start", ACCENT)
        yield text(left + 14, below, "and", "start")
        yield text(left + 44, below, "−1", "start", COLORS[1])

    title = "Sinusoidal positions: fast waves in the first features, slow ones in the last"
    return svg(left + cell * positions + 20, top + height * width + 34, parts(), title)


def lines(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    below: str,
    marks: Sequence[float],
    heights: Sequence[float],
) -> str:
    """A line per name through points (x, y); `marks` of the x axis are equally far apart."""
    left, top, width, height = 60, 20, 400, 180
    lowest, highest = min(heights), max(heights)

    def place(x: float, y: float) -> tuple[float, float]:
        after = max(index for index, mark in enumerate(marks) if x >= mark)
        after = min(after, len(marks) - 2)
        share = (x - marks[after]) / (marks[after + 1] - marks[after])
        across = left + width * (after + share) / (len(marks) - 1)
        return across, top + height * (highest - y) / (highest - lowest)

    def parts() -> Iterator[str]:
        for mark in marks:
            yield text(place(mark, lowest)[0], top + height + 20, f"{mark:g}")
        yield text(left + width / 2, top + height + 40, below)
        for value in heights:
            y = place(marks[0], value)[1]
            yield f'<path d="M{left},{y:.1f}h{width}" stroke="#e4e7ec"/>'
            yield text(left - 8, y + 4, f"{value:g}".replace("-", "−"), "end")
        ends: list[float] = []
        for (name, points), color in zip(curves.items(), COLORS, strict=False):
            path = "L".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
            yield f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>'
            y = place(*points[-1])[1]
            while any(abs(y - other) < 15 for other in ends):  # noqa: PLR2004 (height of a name)
                y -= 15
            ends.append(y)
            yield text(left + width + 8, y + 4, name, "start", color)

    return svg(left + width + 130, top + height + 54, parts(), title)


def decays() -> dict[str, str]:
    """How the weight of a key falls with its distance: RoPE's similarity, ALiBi's factor."""
    marks = (0, 32, 64, 96, 128)
    distances = torch.arange(129.0)
    angles = {
        f"theta {theta:,}": torch.outer(inverse_powers(theta, 64, distances.device), distances)
        for theta in (100, 10_000, 500_000)
    }
    similar = {name: of_pairs.cos().mean(dim=0) for name, of_pairs in angles.items()}
    factors = {
        f"head {head}": torch.exp(-slope * distances) for head, slope in enumerate(alibi_slopes(4))
    }
    titles = {
        "rope-decay.svg": "RoPE: the score of equal vectors falls and swings with their distance",
        "alibi-decay.svg": "ALiBi: the factor on a weight falls exponentially with the distance",
    }
    drawn = zip(titles.items(), (similar, factors), ((-0.5, 0, 0.5, 1), (0, 0.5, 1)), strict=True)
    return {
        file: lines(
            {name: list(enumerate(values.tolist())) for name, values in curves.items()},
            title,
            "distance from query to key",
            marks,
            heights,
        )
        for (file, title), curves, heights in drawn
    }


LONGER = "../longer-contexts.svg"


def losses() -> dict[str, list[tuple[float, float]]]:
    """The losses by context length in the tables of docs/longer-contexts.md."""
    page = (COURSE.parent / "longer-contexts.md").read_text("utf-8")
    lengths = [float(one) for one in re.findall(r"\| variant \|(.*)\|\n", page)[0].split("|")]
    rows = re.findall(r"^\| `(.*?)` \|([\d. |]+)\|$", page, re.MULTILINE)
    return {
        name: list(zip(lengths, map(float, values.split("|")), strict=True))
        for name, values in rows
    }


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
        "sinusoidal.svg": waves(positions=80, width=32),
        **decays(),
        LONGER: lines(
            losses(),
            "Held-out loss by context length, trained at 128 tokens",
            "context length in tokens",
            (128, 256, 512, 1024),
            (3.5, 3.6, 3.7, 3.8, 3.9, 4.0, 4.1),
        ),
    }


def main() -> None:
    """Write the pictures."""
    for name, content in drawings().items():
        (COURSE / name).write_text(content, "utf-8")


if __name__ == "__main__":
    main()
