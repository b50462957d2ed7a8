"""`workhorse convert`: convert a model to another format."""

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
    type=click.Choice(["hf", "workhorse", "gguf", "peft", "gguf-lora"]),
    help="Format of DST: a Hugging Face directory, Workhorse's own format, or a GGUF file;"
    " or only the adapter, as a PEFT directory or as a GGUF file for llama.cpp. Writing GGUF needs"
    " the extra gguf (pip install -e '.[gguf]')."
    "  [default: gguf if DST ends in .gguf]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_k"]),
    default="auto",
    show_default=True,
    help="Type of the written weights; q8_0, q4_0 and q4_k only for GGUF.",
)
@click.option(
    "--n-kv-heads",
    type=click.IntRange(min=1),
    help="Average the key and value heads in groups, down to this number of heads. The result is"
    " a different model, which needs further training.",
)
@click.option(
    "--adapter",
    type=PATH,
    help="Adapter of SRC: a PEFT directory or a run. Formats of models get weights to which it is"
    " added.",
)
@click.option(
    "--no-tokenizer", is_flag=True, help="Write the model without its tokenizer, for token ids."
)
@json_option
def command(
    *,
    source: str,
    target: Path,
    to: str | None,
    dtype: str,
    n_kv_heads: int | None,
    adapter: Path | None,
    no_tokenizer: bool,
    as_json: bool,
) -> None:
    """Convert the model SRC to another format and write it to DST.

    SRC is a run directory, a Hugging Face directory or hub id, a GGUF file, or a folder that this
    verb wrote. `--to hf` writes a model that the transformers library can load. If none of its
    model classes fits, the error gives the reason; `workhorse models show` also shows it.
    """
    if to is None and target.suffix != ".gguf":
        raise click.UsageError(
            "the format of DST is not known; give --to hf, workhorse, gguf, peft or gguf-lora"
        )

    from workhorse.model.convert import convert

    result = convert(
        source,
        target,
        to or "gguf",  # pyright: ignore[reportArgumentType]
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        n_kv_heads=n_kv_heads,
        adapter=adapter,
        tokenizer=not no_tokenizer,
        notify=warn,
    )
    what = f" as {result.architecture}" if result.architecture else ""
    text = f"{result.path}: {result.parameters:,} parameters{what}, {result.dtype}"
    print_result(result.to_dict(), as_json, text=text)
