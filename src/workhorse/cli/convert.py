"""`workhorse convert`: a model from one format into another."""

from pathlib import Path

import click

from workhorse.cli.options import json_option
from workhorse.cli.output import print_result, warn


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "to",
    type=click.Choice(["hf", "workhorse", "gguf"]),
    required=True,
    help="A Hugging Face directory, our own format, or a GGUF file.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16", "q8_0"]),
    default="auto",
    show_default=True,
    help="Of the written weights; q8_0 is for GGUF.",
)
@json_option
def command(source: str, target: Path, to: str, dtype: str, as_json: bool) -> None:
    """Write the model SRC as DST, in another format.

    SRC is a run directory, a Hugging Face directory or hub id, or a folder that this verb wrote. A
    Hugging Face directory is of a class that transformers has; a model that none can hold is
    refused with what stands in the way (`workhorse models show` tells beforehand).
    """
    from workhorse.convert import convert

    result = convert(source, target, to, dtype=dtype, tell=warn)  # pyright: ignore[reportArgumentType]
    what = f" as {result.architecture}" if result.architecture else ""
    text = f"{result.path}: {result.parameters:,} parameters{what}, {result.dtype}"
    print_result(result.to_dict(), as_json, text=text)
