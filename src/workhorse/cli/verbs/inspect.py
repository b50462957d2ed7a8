"""`workhorse inspect`: write a page that explains a model's forward pass over a prompt."""

import re
from pathlib import Path
from typing import Any

import click

from workhorse.cli.loading import (
    PATH,
    Running,
    adapter_option,
    json_option,
    open_model,
    runtime_options,
)
from workhorse.cli.output import print_result, progress
from workhorse.cli.sampling import read_prompts
from workhorse.errors import counted, shown
from workhorse.files.writing import check_place


@click.command("inspect")
@click.argument("model")
@runtime_options
@adapter_option
@click.option(
    "--quantize",
    type=click.Choice(["none", "int8", "int4"]),
    default="none",
    show_default=True,
    help="Store the weights of linear layers in 8 or 4 bits.",
)
@click.option("--prompt", metavar="TEXT", help="Prompt to explain; - reads it from stdin.")
@click.option(
    "--chat", is_flag=True, help="The prompt is a message of a user: format it as in `chat`."
)
@click.option("--tokens", metavar="IDS", help="Token ids instead of a prompt, such as 5,17,3.")
@click.option("--out", type=PATH, metavar="FILE", help="Write the page to this HTML file.")
@click.option(
    "--ablations/--no-ablations",
    default=True,
    show_default=True,
    help="Measure the prediction without each head, sub-layer and layer.",
)
@json_option
def command(
    *,
    model: str,
    prompt: str | None,
    chat: bool,
    tokens: str | None,
    out: Path | None,
    ablations: bool,
    as_json: bool,
    **running: Any,
) -> None:
    """Explain how MODEL processes a prompt, in one HTML file that works offline.

    MODEL is a run directory, a Hugging Face directory or hub id, a GGUF file, a folder that
    `convert` wrote, or a preset's name (random weights). A model of up to 2 million parameters is
    in the page, which then computes again while you type.
    """
    if (prompt is None) == (tokens is None):
        raise click.UsageError("give either --prompt TEXT or --tokens IDS")
    if chat and prompt is None:
        raise click.UsageError("--chat needs a message; give --prompt TEXT")
    if out is None and not as_json:
        raise click.UsageError("no output is given; use --out FILE, or --json")
    if tokens is not None and not re.fullmatch(r"[0-9]{1,9}([, ]+[0-9]{1,9})*", tokens):
        raise click.UsageError(f"--tokens {shown(tokens)} is not a list of token ids; give 5,17,3")
    if out is not None:
        check_place(out)  # fails before the model is loaded
    text = "" if prompt is None else read_prompts((prompt,), None)[0]
    given: str | list[int] = text
    if tokens is not None:
        given = [*map(int, re.findall("[0-9]+", tokens))]
    settings = Running(**running, kernel="auto", execution="reference")
    loaded = open_model(model, settings, with_ids=tokens is not None)
    from workhorse.inspect.page import page_data, write_page

    with progress("ablating layers", unit="layers") as report:
        data = page_data(loaded, given, chat=chat, ablations=ablations, progress=report)
    if out is not None:
        size = write_page(out, data)
        tokens = counted(len(data["ids"]), "token")
        click.echo(f"{out}: {size / 1e6:.1f} MB, {tokens}; open it in a browser", err=True)
    if as_json:
        print_result(data, as_json, text="")
