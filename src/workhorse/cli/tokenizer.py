"""`workhorse tokenizer`: train a tokenizer, or measure one."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.options import json_option
from workhorse.cli.output import print_result, progress

if TYPE_CHECKING:
    from workhorse.data.documents import SplitName
    from workhorse.tokenizers import TokenizerConfig

files_argument = click.argument("files", nargs=-1, type=click.Path(path_type=Path))


@click.group("tokenizer")
def command() -> None:
    """Train a tokenizer, or measure one.

    FILES are texts, .jsonl(.gz, .zst) or .parquet files, folders of texts, - for stdin, or stdlib,
    the built-in corpus: train reads its training part, report the held-out part.
    """


@command.command("train")
@files_argument
@click.option(
    "--algorithm",
    type=click.Choice(["bpe", "byte_fallback_bpe", "wordpiece", "unigram", "characters", "bytes"]),
    default="bpe",
    show_default=True,
    help="bpe is byte-level; byte_fallback_bpe is LLaMA's; bytes needs no FILES.",
)
@click.option(
    "--vocab-size",
    type=int,
    help="Tokens in all, special ones included; characters may go without.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other key of the algorithm's config, such as digits=1 or special.eos='</s>'.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for tokenizer.json; a tokenizer that is there is replaced.",
)
@json_option
def train_command(
    *,
    files: tuple[Path, ...],
    algorithm: str,
    vocab_size: int | None,
    settings: tuple[str, ...],
    out: Path,
    as_json: bool,
) -> None:
    """Train a tokenizer on FILES."""
    from workhorse.errors import WorkhorseError
    from workhorse.tokenizers import check_output_folder, train_tokenizer

    config = _config(algorithm, vocab_size, settings)
    if not files and algorithm != "bytes":
        raise WorkhorseError(f"no FILES to train {algorithm} on; name some, or - for stdin")
    check_output_folder(out)
    with progress("reading", unit="bytes") as report:
        tokenizer = train_tokenizer(config, _texts(files, "train"), progress=report)
    tokenizer.save(out)
    result = {
        "out": out,
        "algorithm": algorithm,
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": tokenizer.special_tokens,
        "fingerprint": tokenizer.fingerprint,
    }
    text = f"{out}: {algorithm}, {tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint[:16]}"
    print_result(result, as_json, text=text)


@command.command("report")
@click.argument("tokenizer", metavar="DIR", type=click.Path(path_type=Path))
@files_argument
@json_option
def report_command(tokenizer: Path, files: tuple[Path, ...], as_json: bool) -> None:
    """Measure the tokenizer in DIR on FILES, best ones that it was not trained on."""
    from workhorse.errors import WorkhorseError
    from workhorse.tokenizers import load_tokenizer, tokenizer_report

    loaded = load_tokenizer(tokenizer)
    if not files:
        raise WorkhorseError("no FILES to measure on; name some, or - for stdin")
    with progress("measuring", unit="bytes") as report:
        result = tokenizer_report(loaded, _texts(files, "validation"), progress=report).to_dict()
    print_result(result, as_json, text=_page(result))


def _config(algorithm: str, vocab_size: int | None, settings: tuple[str, ...]) -> "TokenizerConfig":
    from workhorse.config import apply_overrides
    from workhorse.errors import WorkhorseError
    from workhorse.tokenizers import tokenizer_config

    fields: dict[str, Any] = {"kind": algorithm}
    if vocab_size is not None:
        if algorithm == "bytes":
            raise WorkhorseError("--vocab-size does not go with bytes: they are 256; leave it out")
        fields["vocab_size"] = vocab_size
    elif algorithm not in ("bytes", "characters"):
        raise WorkhorseError(f"{algorithm} needs --vocab-size; 4096 suits a small corpus")
    return tokenizer_config(apply_overrides(fields, settings))


def _texts(files: tuple[Path, ...], split: "SplitName") -> Iterator[str]:
    """The texts of all files, one after another; of the built-in corpus, those of a split."""
    from workhorse.data import read_documents, source_of

    for path in files:
        source = source_of(path)
        for document in read_documents(source, split if source.has_validation else "train"):
            yield document.text


def _page(result: dict[str, Any]) -> str:
    changed = f"no, {result['changed_texts']:,} of {result['texts']:,} texts change"
    lines = [
        f"bytes per token   {result['bytes_per_token']:.3f}",
        f"tokens per word   {result['tokens_per_word']:.3f}",
        f"unknown           {result['unknown_rate']:.4%} of tokens",
        f"vocabulary used   {result['used_share']:.1%} of {result['vocab_size']:,} tokens",
        f"round trip        {changed if result['changed_texts'] else 'exact'}",
        f"measured on       {result['bytes']:,} bytes, {result['words']:,} words",
    ]
    if result["first_change"]:
        lines.insert(5, f"first change      {result['first_change']}")
    return "\n".join(lines)
