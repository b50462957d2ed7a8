"""The result of `plan` as text and as an HTML page with charts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from workhorse.devices.memory import GIB, size
from workhorse.errors import counted
from workhorse.files.writing import write_atomically
from workhorse.plan.limits import MOST_TOKENS, WAYS
from workhorse.plan.subject import LEAST_FITTED
from workhorse.train.report.chart import shown, ticks
from workhorse.train.report.page import duration, rendered

STYLES = {
    "weights": ("weights", "#2563eb"),
    "teacher": ("weights of the teacher", "#1e3a8a"),
    "low_bits": ("low bits of float32 masters", "#93c5fd"),
    "optimizer": ("optimizer", "#9333ea"),
    "gradients": ("gradients", "#d97706"),
    "sums": ("float32 sums of micro-batches", "#fcd34d"),
    "activations": ("activations", "#059669"),
    "loss": ("logits and loss", "#db2777"),
    "temporary": ("temporary", "#9ca3af"),
}
"""The label and the color of each kind of memory, in the order of the chart."""
LABELS = {kind: label for kind, (label, _) in STYLES.items()}
COLORS = {kind: color for kind, (_, color) in STYLES.items()}


def lines(plan: dict[str, Any]) -> Iterator[str]:
    """Yield the result of `plan` as lines of text, section by section."""
    yield from _subject(plan)
    for title, section in (
        ("parameters", _parameters(plan["parameters"])),
        ("arithmetic", _arithmetic(plan["flops"])),
        ("memory", _memory(plan)),
        ("communication", _communication(plan["collectives"])),
        ("time", _time(plan)),
        ("compute-optimal", _optima(plan["compute_optimal"])),
        ("serving", _serving(plan["serving"])),
    ):
        if body := [f"  {line}" for line in section]:
            yield from ("", title, *body)


def table(plans: Mapping[str | None, dict[str, Any]]) -> Iterator[str]:
    """Yield the results of `plan_devices` as lines of text, with a row for each device."""
    first = next(iter(plans.values()))
    yield from _subject(first)
    yield from (f"parameters: {next(_parameters(first['parameters']))}", "")
    cells = [_cells(str(name), plan) for name, plan in plans.items()]
    rows = [[*cells[0]], *([*row.values()] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *others in rows:
        yield name.ljust(widths[0]) + "".join(
            f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)
        )
    for name, plan in plans.items():
        yield from (f"{name}: {line.strip()}" for line in _remedies(plan["remedies"]))


def _cells(name: str, plan: dict[str, Any]) -> dict[str, str]:
    """The row of a device in `table`, by the titles of the columns."""
    memory, time, limits = plan["memory"], plan["time"], plan["limits"]
    rows, length = limits["micro_batch_size"], limits["seq_len"]
    cells = {
        "device": name,
        "memory": size(memory["room"]),
        "peak": size(memory["peak"]["total"]),
        "fits": "yes" if memory["fits"] else "no",
        "rows at once": f"{'≥ ' * (rows >= _tried_rows(plan['train']))}{rows:,}",
        "longest row": f"{'≥ ' * (length >= MOST_TOKENS)}{length:,}",
    }
    if time is not None:
        cells[f"time for {_work(plan)}"] = duration(time["seconds"])
        cells["of the peak"] = f"{time['utilization']:.0%}"
        if time["cost"] is not None:
            cells["cost"] = _figure(time["cost"], 2)
    return cells


def _tried_rows(train: dict[str, Any]) -> int:
    return max(1, MOST_TOKENS // train["seq_len"])


def _work(plan: dict[str, Any]) -> str:
    steps, tokens = plan["time"]["steps"], plan["flops"]["tokens"]
    return f"{tokens:,} tokens" if steps is None else counted(steps, "step")


def _subject(plan: dict[str, Any]) -> Iterator[str]:
    train = plan["train"]
    yield (
        f"{plan['source']} ({plan['kind']}): {counted(train['batch_size'], 'row')} of "
        f"{train['seq_len']:,} tokens a step, {train['dtype']}, {train['optimizer']['kind']}"
    )
    if plan["assumed"]:
        yield f"assumed: {', '.join(plan['assumed'])}"


def _parameters(counts: dict[str, int]) -> Iterator[str]:
    total = counts["total"]
    active = counts["active"]
    parts = [f"{total:,}", *([f"{active:,} active per token"] if active != total else [])]
    if trained := counts.get("trained"):
        parts.append(f"{trained:,} trained (the adapter)")
    yield ", ".join(parts)
    for name, number in counts.items():
        if name not in ("total", "active", "trained") and number:
            yield _row(name.replace("_", " "), f"{number:,}", f"{number / total:.1%}")


def _arithmetic(flops: dict[str, Any]) -> Iterator[str]:
    forward, backward = flops["forward_per_token"], flops["backward_per_token"]
    yield (
        f"{shown(flops['per_token'])} FLOP per token: forward {shown(forward)} FLOP, backward "
        + ("twice as much" if backward == 2 * forward else f"{shown(backward)} FLOP")
    )
    if repeated := flops["repeated_per_token"]:
        yield f"plus {shown(repeated)} FLOP recomputed by activation checkpointing"
    for name, number in flops["forward"].items():
        yield _row(name.replace("_", " "), f"{shown(number)} FLOP", f"{number / forward:.1%}")
    yield f"{flops['training']:.4g} FLOP for {flops['tokens']:,} tokens"


def _memory(plan: dict[str, Any]) -> Iterator[str]:
    memory, devices = plan["memory"], plan["parallel"]["devices"]
    yield from step_lines(memory, f", on the fullest of {devices:,} devices" * (devices > 1))
    if memory["room"] is None:
        yield "the memory of the device is unknown; give --memory"
        return
    room = f"{plan['device']['name']} has {size(memory['room'])}"
    if memory["fits"]:
        yield f"fits: {room}"
    else:
        largest = max(LABELS, key=lambda kind: memory["peak"][kind])
        yield f"does not fit: {room}; the largest part is {LABELS[largest]}"
        yield from _remedies(plan["remedies"])
    yield from _limits(plan["limits"], plan["train"], devices)


def _remedies(remedies: list[dict[str, Any]]) -> Iterator[str]:
    for remedy in remedies:
        enough = "then it fits" if remedy["fits"] else "not enough by itself"
        saved = f"saves {size(remedy['saves'])}"
        yield f"  {remedy['setting']}: {saved}, {enough} ({remedy['cost']})"


def step_lines(memory: dict[str, Any], of: str = "") -> Iterator[str]:
    """Yield the peak memory of a training step, its kinds, and the memory between steps, as lines.

    Args:
        memory: bytes, as under `memory` in the result of `plan`.
        of: words to append to the line with the peak.
    """
    peak = memory["peak"]
    yield f"{size(peak['total'])} at its peak, {_where(peak)}{of}"
    for kind, name in LABELS.items():
        if peak[kind]:
            yield _row(name, size(peak[kind]), f"{peak[kind] / peak['total']:.1%}")
    held = sum(sum(sizes.values()) for sizes in memory["held"].values())
    yield f"{size(held)} between steps"


def _limits(limits: dict[str, Any], train: dict[str, Any], devices: int) -> Iterator[str]:
    rows, length = limits["micro_batch_size"], limits["seq_len"]
    of = " on each device" * (devices > 1)
    if rows:
        limit = "at least" if rows >= _tried_rows(train) else "at most"
        yield f"{limit} {counted(rows, 'row')} of {train['seq_len']:,} tokens at once{of}"
    else:
        yield f"not even one row of {train['seq_len']:,} tokens fits{of}"
    if length:
        yield f"{'at least' if length >= MOST_TOKENS else 'at most'} {length:,} tokens in one row"


def _communication(collectives: list[dict[str, Any]]) -> Iterator[str]:
    if collectives:
        yield "calls of the fullest device in a step, and bytes that it passes to them"
    for one in collectives:
        name = f"{one['kind'].replace('_', '-')}, {one['group']} ({one['size']:,} devices)"
        yield f"  {name:42} {one['count']:>8,} {size(one['bytes']):>12}"


def _time(plan: dict[str, Any]) -> Iterator[str]:
    time, devices = plan["time"], plan["parallel"]["devices"]
    if time is None and devices > 1:
        yield f"unknown for {devices:,} devices; give --utilization"
        return
    if time is None:
        yield "unknown for this machine; give --measure or --device NAME"
        return
    repeated = ", recomputation included" if plan["flops"]["repeated_per_token"] else ""
    yield (
        f"{duration(time['seconds'])} for {_work(plan)} on "
        f"{counted(devices, 'device')} at {time['utilization']:.0%} of "
        f"{shown(time['peak_flops'])} FLOP/s ({time['peak_of']}){repeated}"
    )
    if (step := time["step"]) is not None:
        whole = sum(step.values())
        parts = [
            f"{name.replace('_', ' ')} {part / whole:.0%}"
            for name, part in step.items()
            if part > whole / 200
        ]
        yield f"one step takes {_seconds(whole)} (simulated): {', '.join(parts)}"
    if (failures := time["failures"])["expected"] >= 1:
        yield (
            f"{counted(round(failures['expected']), 'device failure')} expected, leaving "
            f"{failures['goodput']:.1%} of the time for training"
        )
    hours = f"{_figure(time['device_hours'], 1)} device hours"
    if time["cost"] is not None:
        hours += f", {_figure(time['cost'], 2)} at the price given"
    if time["steps"] is None:
        hours += f", for each {_work(plan)}; set train.steps for a total"
    yield hours


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _figure(value: float, places: int) -> str:
    """Format a number with a number of decimal places, or two digits if it is below 0.1."""
    return f"{value:,.{places}f}" if value >= 0.1 else f"{value:.2g}"  # noqa: PLR2004


def _optima(optimal: dict[str, Any] | None) -> Iterator[str]:
    if optimal is None:
        return
    flops = optimal["flops"]
    small = f", far below {LEAST_FITTED:g}, the smallest budget that the laws were fitted to"
    yield f"{flops:.4g} FLOP{small if flops < LEAST_FITTED / 10 else ''}"
    for law in optimal["laws"]:
        loss = "" if law["loss"] is None else f", loss {law['loss']:.3f}"
        yield (
            f"{shown(round(law['parameters']))} parameters, {shown(round(law['tokens']))} "
            f"tokens{loss} ({law['law']})"
        )


def _serving(serving: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{serving['bytes_per_token']:,} bytes of cache per token, "
        f"{size(serving['bytes_per_text'])} for a sequence of {serving['context']:,} tokens"
    )
    for name in WAYS:
        way = serving[name]
        if way is None:
            yield f"{name}: no layer is wide enough for quantisation"
            continue
        line = f"{name}: weights {size(way['weights'])}"
        if way["texts"] == 0:
            yield f"{line}, too large to serve one such sequence"
            continue
        if way["texts"] is not None:
            line += f", {way['texts']:,} such sequences at once"
        if way["tokens_per_second"] is not None:
            line += f", up to {way['tokens_per_second']:,.0f} tokens per second for one sequence"
        yield line


def _where(peak: dict[str, Any]) -> str:
    part = peak["part"]
    return f"in the {peak['phase']}" + ("" if part == peak["phase"] else f" pass, at {part}")


def _row(name: str, figure: str, share: str) -> str:
    return f"  {name:30} {figure:>18} {share:>7}"


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1120, 300, 64, 8, 14, 34
LETTER = 7
"""Assumed width in SVG units of a letter of a chart label, including space between labels."""


class Bar(NamedTuple):
    """A stacked bar of the memory chart: its label, and the bytes of each kind of memory."""

    name: str
    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def write_page(path: Path, plan: dict[str, Any]) -> None:
    """Write the result of `plan` as an HTML page, replacing an existing file.

    Raises:
        WorkhorseError: the page cannot be written, for example because the disk is full.
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
        legend=[style for kind, style in STYLES.items() if kind in there],
        moments=stacked(moments, plan["memory"]["room"]),
        parts=stacked(parts),
        text="\n".join(lines(plan)),
    )
    write_atomically(path, page)


def _parts(memory: dict[str, Any]) -> list[Bar]:
    """A chart bar for each part of the model, in order, with its memory by kind."""
    names = dict.fromkeys([*memory["parts"], *memory["activations"]])
    kept = memory["activations"]
    return [
        Bar(name, {**memory["parts"].get(name, {}), "activations": kept.get(name, 0)})
        for name in names
    ]


def stacked(bars: Sequence[Bar], room: int | None = None) -> str:
    """Draw a chart of stacked bars as an `<svg>` element, with a line at the device's memory.

    Args:
        bars: the bars, from left to right.
        room: memory of the device in bytes. No line is drawn if it is None or above the chart.
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
    """Draw a bar as an SVG `<g>` element, with the bytes of each kind as a tooltip.

    The bar's first kind of memory is at the bottom. `x` is its left edge, `step` the distance
    between the left edges of two bars, and `y` converts bytes to a y coordinate.
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
