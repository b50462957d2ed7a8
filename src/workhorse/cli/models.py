"""`workhorse models`: the presets, published models that can be built by name."""

import sys
from collections.abc import Mapping
from typing import Any

import click

from workhorse.cli.options import json_option
from workhorse.cli.output import print_result

COLUMNS = ("name", "params", "layers", "d_model", "heads", "d_ff", "vocab", "context")


@click.group("models")
def command() -> None:
    """List the presets (published models that can be built by name), or show one."""


@command.command("list")
@json_option
def list_presets(as_json: bool) -> None:
    """List the presets with their parameter counts and shapes.

    Heads are those of queries and, after a slash where they differ, of keys and values.
    """
    from workhorse.models import presets
    from workhorse.models.describe import summary

    rows = [summary(preset) for preset in presets().values()]
    if sys.stdout.isatty() and not as_json:
        _print_table(rows)
    else:
        print_result({"presets": rows}, as_json, text=_plain_table(rows))


@command.command("show")
@click.argument("name")
@json_option
def show_preset(name: str, as_json: bool) -> None:
    """Show a preset: its config as YAML, parameters by component, source and notes.

    Everything but the config is a comment, so that the output is a config file.
    """
    from workhorse.models import find_preset
    from workhorse.models.describe import details, page

    preset = find_preset(name)
    if as_json:
        print_result(details(preset), as_json, text="")
    else:
        click.echo(page(preset), nl=False)


def _cells(row: Mapping[str, Any]) -> list[str]:
    from workhorse.models.describe import short_count

    grouped = row["n_kv_heads"] != row["n_heads"]
    return [
        row["name"],
        short_count(row["parameters"]),
        str(row["n_layers"]),
        str(row["d_model"]),
        f"{row['n_heads']}/{row['n_kv_heads']}" if grouped else str(row["n_heads"]),
        str(row["d_ff"]),
        str(row["vocab_size"]),
        str(row["max_seq_len"]),
    ]


def _plain_table(rows: list[dict[str, Any]]) -> str:
    table = [list(COLUMNS), *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    )


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in COLUMNS:
        first = column == COLUMNS[0]
        style = "cyan" if first else None
        table.add_column(column, justify="left" if first else "right", style=style, no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    Console().print(table)
