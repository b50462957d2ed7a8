"""`workhorse models`: list the presets, show a model, or the table of the literature's systems."""

import re
import sys
import textwrap
from collections.abc import Mapping
from itertools import islice
from typing import Any

import click

from workhorse.cli.loading import json_option
from workhorse.cli.output import aligned, print_result, warn

Rows = list[dict[str, Any]]
SYSTEM_COLUMNS = ("name", "year", "parameters", "wiring", "norm", "positions", "attention")
COLUMNS = ("name", "params", "layers", "d_model", "heads", "d_ff", "vocab", "length")


@click.group("models")
def command() -> None:
    """List the presets (published models that can be built by name), or show one model."""


@command.command("list")
@click.argument("text", default="")
@json_option
def list_presets(text: str, as_json: bool) -> None:
    """List the presets with TEXT in their names, or all, with parameter counts and shapes.

    params: the total and, for a mixture of experts, after a slash the parameters active per token.
    heads: query heads and, if different, after a slash the key and value heads. length: maximum
    sequence length in tokens.
    """
    from workhorse.models import find_preset, search
    from workhorse.models.describe import summary

    families = [[summary(find_preset(name)) for name in names] for names in search(text)]
    if as_json or not sys.stdout.isatty():
        rows = [row for rows in families for row in rows]
        print_result({"presets": rows}, as_json, text=_plain_table(families))
    else:
        _print_table(families)


@command.command("show")
@click.argument("model")
@json_option
def show_model(model: str, as_json: bool) -> None:
    """Show MODEL: its config as YAML, parameters by component, its source, its tokenizer.

    MODEL is a preset, a run directory, a Hugging Face directory or hub id, a GGUF file, or a folder
    that `convert` wrote. The output is a valid config file: everything else is in comments.
    """
    from workhorse.model.model import describe
    from workhorse.models.describe import page

    found = describe(model, notify=warn)
    if as_json:
        print_result(found, as_json, text="")
    else:
        click.echo(page(found), nl=False)


@command.command("table")
@click.argument("name", default="")
@json_option
def table(name: str, as_json: bool) -> None:
    """Show the systems of the literature, by year: wiring, norm, positions and heads.

    NAME is a system, a preset or a part of their names. A single system is shown in full, and a
    preset without the other sizes of its system. layers, d_model and heads are in the order of the
    presets. heads: query heads and, if different, after a slash the key and value heads.
    """
    from workhorse.models.systems import find_systems, row

    rows = [row(system) for system in find_systems(name)]
    if len(rows) == 1:
        text = "\n".join(_entry(key, value or "none") for key, value in rows[0].items())
    else:
        cells = [[_brief(str(found.get(key, "—"))) for key in SYSTEM_COLUMNS] for found in rows]
        text = "\n".join(aligned([SYSTEM_COLUMNS, *cells], str.ljust))
    print_result({"systems": rows}, as_json, text)


def _entry(key: str, value: Any) -> str:
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return textwrap.fill(text, 96, initial_indent=f"{key:<14}", subsequent_indent=" " * 14)


def _brief(text: str) -> str:
    """Shorten a description to its kinds, without numbers: "multi-head, grouped-query"."""
    parts = (part.rpartition(": ")[2] for part in text.split("; "))
    ends = r", | \(| on | without | sub-layers"
    return ", ".join(dict.fromkeys(re.split(ends, part)[0] for part in parts))


def _cells(row: Mapping[str, Any]) -> list[str]:
    from workhorse.models.describe import short_count

    return [
        row["name"],
        _both(short_count(row["parameters"]), short_count(row["active_parameters"])),
        str(row["n_layers"]),
        str(row["d_model"]),
        _both(str(row["n_heads"]), str(row["n_kv_heads"])),
        str(row["d_ff"]),
        str(row["vocab_size"]),
        str(row["max_seq_len"]),
    ]


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first}/{second}"


def _plain_table(families: list[Rows]) -> str:
    lines = iter(aligned([COLUMNS, *(_cells(row) for rows in families for row in rows)]))
    blocks = ("\n".join(islice(lines, count)) for count in (1, *map(len, families)))
    return "\n\n".join(blocks)


def _print_table(families: list[Rows]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        first = column == COLUMNS[0]
        style = "cyan" if first else None
        table.add_column(column, justify="left" if first else "right", style=style, no_wrap=True)
    for rows in families:
        if table.rows:
            table.add_row()
        for row in rows:
            table.add_row(*_cells(row))
    Console().print(table)
