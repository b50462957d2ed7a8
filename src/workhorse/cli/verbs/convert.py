"""`workhorse convert`: a model from one format into another."""

from pathlib import Path

import click

from workhorse.cli.loading import PATH, json_option
from workhorse.cli.output import print_result, warn


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=PATH)
@click.option(
    "--to",
    "to",
    type=click.Choice(["hf", "workhorse", "gguf"]),
    help="A Hugging Face directory, our own format, or a GGUF file; may be left out if DST ends"
    " in .gguf.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_k"]),
    default="auto",
    show_default=True,
    help="Type of the written weights; q8_0, q4_0 and q4_k are for GGUF.",
)
@click.option(
    "--n-kv-heads",
    type=click.IntRange(min=1),
    help="Merge the heads of keys and values into this many, each the mean of its group. The result"
    " is another model, which needs further training.",
)
@json_option
def command(
    *, source: str, target: Path, to: str | None, dtype: str, n_kv_heads: int | None, as_json: bool
) -> None:
    """Write the model SRC as DST, in another format.

    SRC is a run directory, a Hugging Face directory or hub id, a GGUF file, or a folder that this
    verb wrote. `--to hf` writes the model as a class of transformers; one that no class can hold is
    refused with the reason (`workhorse models show` tells it beforehand).
    """
    if to is None and target.suffix != ".gguf":
        raise click.UsageError("give --to hf, workhorse or gguf: the format of DST")

    from workhorse.model.convert import convert

    result = convert(
        source,
        target,
        to or "gguf",  # pyright: ignore[reportArgumentType]
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        n_kv_heads=n_kv_heads,
        tell=warn,
    )
    what = f" as {result.architecture}" if result.architecture else ""
    text = f"{result.path}: {result.parameters:,} parameters{what}, {result.dtype}"
    print_result(result.to_dict(), as_json, text=text)
