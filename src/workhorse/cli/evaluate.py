"""`workhorse evaluate`: how well a model predicts text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.loading import model_options, open_model
from workhorse.cli.options import json_option
from workhorse.cli.output import print_result, progress

if TYPE_CHECKING:
    from workhorse.data import Document
    from workhorse.load_model import Model
    from workhorse.nn.kernels import KernelName


@click.command("evaluate")
@model_options
@click.option(
    "--data",
    metavar="FILE_OR_DIR",
    help="Text, .jsonl or .parquet; a folder of texts; - for stdin; or stdlib, the held-out part of"
    " the built-in corpus.  [default: the validation split of the run]",
)
@click.option(
    "--stride",
    type=int,
    help="Tokens predicted by each window of the context; fewer see more of what came before, and"
    " take longer.  [default: the context]",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Windows at once.  [default: as suits the device]",
)
@click.option(
    "--compare-gzip", is_flag=True, help="Also what gzip -9 and xz -9 reach on the same bytes."
)
@json_option
def command(
    *,
    model: str,
    device: str,
    dtype: str,
    threads: int,
    kernel: "KernelName",
    data: str | None,
    stride: int | None,
    batch_size: int | None,
    compare_gzip: bool,
    as_json: bool,
) -> None:
    """Measure loss, perplexity and bits per byte of MODEL over text, every token predicted once.

    MODEL is a run directory, or a preset's name (random weights).
    """
    from workhorse.evaluate import compressed_bits_per_byte, evaluate

    loaded = open_model(model, device=device, dtype=dtype, threads=threads, kernel=kernel)
    total = sum(len(document.text.encode()) for document in _documents(loaded, data))
    with progress("evaluating", unit="bytes") as report:
        result: dict[str, Any] = evaluate(
            loaded.decoder,
            loaded.tokenizer,
            _documents(loaded, data),
            start=loaded.start,
            stride=stride,
            batch_size=batch_size,
            progress=lambda done: report(done, total),
        ).to_dict()
    if compare_gzip:
        texts = (document.text for document in _documents(loaded, data))
        result["compressors"] = compressed_bits_per_byte(texts)
    print_result(result, as_json, text=_page(result))


def _documents(model: "Model", data: str | None) -> Iterator["Document"]:
    """What `--data` names, read anew."""
    from workhorse.data import read_documents, source_of
    from workhorse.errors import WorkhorseError

    if data is not None:
        source = source_of(data)  # all of a file or folder, the held-out modules of the stdlib
        yield from read_documents(source, "validation" if source.has_validation else "train")
        return
    if model.data is None:
        raise WorkhorseError(f"{model.name} has no data of its own; give --data FILE_OR_DIR")
    for source in model.data.sources.values():
        yield from read_documents(source, "validation")


def _page(result: dict[str, Any]) -> str:
    lines = [
        f"loss            {result['loss']:.4f} nats per token",
        f"perplexity      {result['perplexity']:.2f}",
        f"bits per byte   {result['bits_per_byte']:.4f}",
    ]
    for name, bits in result.get("compressors", {}).items():
        lines.append(f"  {name} -9".ljust(16) + f"{bits:.4f}")
    lines.append(
        f"over {result['tokens']:,} tokens, {result['bytes']:,} bytes,"
        f" {result['documents']:,} documents"
    )
    if result["unpredicted"]:
        lines.append(
            f"{result['unpredicted']:,} first tokens have nothing before them: not in the loss, and"
            " log2(vocabulary) bits each"
        )
    if result["unknown"]:
        lines.append(
            f"{result['unknown']:,} tokens are unknown to the tokenizer, so the figures flatter it"
        )
    return "\n".join(lines)
