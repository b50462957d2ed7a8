"""`workhorse tokenizer`: train, measure or inspect a tokenizer."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.loading import PATH, json_option
from workhorse.cli.output import for_terminal, print_result, progress, warn
from workhorse.errors import WorkhorseError, counted

if TYPE_CHECKING:
    from workhorse.data.documents import SplitName
    from workhorse.tokenizers import Tokenizer, TokenizerConfig

FLAGS = {"kind": "--algorithm", "vocab_size": "--vocab-size"}
"""Keys of a tokenizer's config that have their own option, so `--set` does not accept them."""
MAX_DIGITS = 18
"""Maximum number of digits of a token id; more may not fit into 64 bits."""

files_argument = click.argument("files", nargs=-1, type=PATH)


@click.group("tokenizer")
def command() -> None:
    """Train a tokenizer, measure one, or show how it splits a string.

    DIR is a folder with a tokenizer: the output of train, a run directory or a Hugging Face
    directory. FILES are text, .jsonl(.gz, .zst) or .parquet files, folders of text files, - for
    stdin, or stdlib for the built-in corpus. From stdlib, train reads the training split, and
    report the held-out split.
    """


@command.command("train")
@files_argument
@click.option(
    "--algorithm",
    type=click.Choice(
        ["bpe", "byte_fallback_bpe", "wordpiece", "unigram", "characters", "words", "bytes"]
    ),
    default="bpe",
    show_default=True,
    help="bpe is byte-level; byte_fallback_bpe is LLaMA's; bytes needs no FILES.",
)
@click.option(
    "--vocab-size",
    type=int,
    help="Number of tokens, including special tokens; optional for characters and words.",
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
    type=PATH,
    help="Folder for tokenizer.json; replaces a tokenizer in it.",
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
    from workhorse.tokenizers import check_output_folder, missing_tokens, train_tokenizer

    config = _config(algorithm, vocab_size, settings)
    if not files and algorithm != "bytes":
        raise WorkhorseError(f"no FILES to train {algorithm} on; give files, or - for stdin")
    check_output_folder(out)
    replaced = (out / "tokenizer.json").exists()
    with progress("reading", unit="bytes") as report:
        tokenizer = train_tokenizer(config, _texts(files, "train"), progress=report)
    tokenizer.save(out)
    if missing := missing_tokens(config, tokenizer):
        warn(
            f"the vocabulary has {tokenizer.vocab_size:,} tokens, {missing:,} fewer than requested:"
            " the training text is too small for more"
        )
    result = {
        "out": out,
        "replaced": replaced,
        "algorithm": algorithm,
        "vocab_size": tokenizer.vocab_size,
        "missing_tokens": missing,
        "special_tokens": tokenizer.special_tokens,
        "fingerprint": tokenizer.fingerprint,
    }
    text = f"{out}: {algorithm}, {tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint[:16]}"
    instead = "; replaced the previous tokenizer" if replaced else ""
    print_result(result, as_json, text=f"{text}{instead}")


@command.command("report")
@click.argument("tokenizer", metavar="DIR", type=PATH)
@files_argument
@json_option
def report_command(tokenizer: Path, files: tuple[Path, ...], as_json: bool) -> None:
    """Measure the tokenizer in DIR on FILES, preferably files that it was not trained on."""
    from workhorse.tokenizers import load_tokenizer, tokenizer_report

    loaded = load_tokenizer(tokenizer)
    if not files:
        raise WorkhorseError("no FILES to measure on; give files, or - for stdin")
    with progress("measuring", unit="bytes") as report:
        result = tokenizer_report(loaded, _texts(files, "validation"), progress=report).to_dict()
    print_result(result, as_json, text=_page(result))


@command.command("encode")
@click.argument("tokenizer", metavar="DIR", type=PATH)
@click.argument("text", default="-")
@click.option(
    "--allow-special", is_flag=True, help="Encode names of special tokens in TEXT as those tokens."
)
@click.option(
    "--whole", is_flag=True, help="Add the model's begin and end tokens, such as bos and eos."
)
@click.option(
    "--drop-leading-space",
    is_flag=True,
    help="Drop a leading space of TEXT if the tokenizer's class in transformers does (LLaMA).",
)
@json_option
def encode_command(
    *,
    tokenizer: Path,
    text: str,
    allow_special: bool,
    whole: bool,
    drop_leading_space: bool,
    as_json: bool,
) -> None:
    """Show the tokens of TEXT, or of stdin: each token's id and its piece of the text.

    Special tokens are marked with a star. A piece that is only a part of a character is shown as
    its bytes.
    """
    from workhorse.tokenizers import load_tokenizer

    loaded = load_tokenizer(tokenizer, drop_leading_space=drop_leading_space or None)
    text = _stdin() if text == "-" else text
    encode = loaded.encode_sequence if whole else loaded.encode
    ids = encode(text, allow_special=allow_special)
    _print_pieces(loaded, ids, as_json, n_bytes=len(text.encode()))


@command.command("decode")
@click.argument("tokenizer", metavar="DIR", type=PATH)
@click.argument("ids", nargs=-1, type=int)
@click.option("--skip-special", is_flag=True, help="Omit special tokens.")
@click.option("--pieces", is_flag=True, help="Show each token, as encode does.")
@json_option
def decode_command(
    *, tokenizer: Path, ids: tuple[int, ...], skip_special: bool, pieces: bool, as_json: bool
) -> None:
    """Print the text of the token ids IDS, or of those on stdin."""
    from workhorse.tokenizers import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    found = list(ids) or _numbers(_stdin())
    if skip_special:
        special = set(loaded.special_tokens.values())
        found = [number for number in found if number not in special]
    if pieces or as_json:
        _print_pieces(loaded, found, as_json)
    else:
        print(for_terminal(loaded.decode(found)))


def _print_pieces(
    tokenizer: "Tokenizer", ids: list[int], as_json: bool, n_bytes: int | None = None
) -> None:
    """Print each token's id and its piece of the text, then the number of tokens and bytes.

    If `n_bytes` is None, the bytes of all tokens except special tokens are counted.
    """
    pieces = tokenizer.pieces(ids)
    result = {
        "ids": ids,
        "text": tokenizer.decode(ids),
        "pieces": [
            {"id": one.id, "text": one.text, "bytes": one.data.hex(), "special": one.special}
            for one in pieces
        ],
    }
    width = max((len(str(number)) for number in ids), default=0)
    lines = [
        f"{one.id:>{width}} {'*' if one.special else ' '} "
        f"{repr(one.data)[1:] if one.text is None else repr(one.text)}"
        for one in pieces
    ]
    if n_bytes is None:
        n_bytes = sum(len(one.data) for one in pieces if not one.special)
    print_result(result, as_json, text="\n".join([*lines, f"{len(ids)} tokens, {n_bytes} bytes"]))


def _stdin() -> str:
    from workhorse.files.text_formats import decoded

    return decoded(sys.stdin.buffer.read(), "stdin")


def _numbers(text: str) -> list[int]:
    words = text.replace(",", " ").strip(" \n[]").split()
    if wrong := [word for word in words if not (word.isascii() and word.isdigit())]:
        raise WorkhorseError(f"{wrong[0][:40]!r} is not a token id; give integers of 0 or more")
    if too_long := [word for word in words if len(word) > MAX_DIGITS]:
        raise WorkhorseError(f"{too_long[0][:40]}… is too large for a token id; give smaller ids")
    return [int(word) for word in words]


def _config(algorithm: str, vocab_size: int | None, settings: tuple[str, ...]) -> "TokenizerConfig":
    from workhorse.config.overrides import apply_overrides
    from workhorse.tokenizers import tokenizer_config

    for setting in settings:
        if (key := setting.partition("=")[0]) in FLAGS:
            raise WorkhorseError(f"--set {key}= is the same as {FLAGS[key]}; use {FLAGS[key]}")
    fields: dict[str, Any] = {"kind": algorithm}
    if vocab_size is not None:
        if algorithm == "bytes":
            raise WorkhorseError(
                "--vocab-size does not apply to bytes, which always has 256 tokens plus special "
                "ones; remove it"
            )
        fields["vocab_size"] = vocab_size
    elif algorithm not in ("bytes", "characters", "words"):
        raise WorkhorseError(f"{algorithm} needs --vocab-size, such as 4096 for a small corpus")
    return tokenizer_config(apply_overrides(fields, settings))


def _texts(files: tuple[Path, ...], split: "SplitName") -> Iterator[str]:
    """Yield the text of each document in files and folders.

    Of the built-in corpus (`stdlib`), only the documents of `split` are read.
    """
    from workhorse.data import check_source_files, read_documents, source_of

    sources = [source_of(path) for path in files]
    for source in sources:
        check_source_files(source)
    for source in sources:
        for document in read_documents(source, split if source.has_validation else "train"):
            yield document.text


def _page(result: dict[str, Any]) -> str:
    changed = f"{result['changed_documents']:,} of {counted(result['texts'], 'document')} change"
    lines = [
        f"bytes per token   {result['bytes_per_token']:.3f}",
        f"tokens per word   {result['tokens_per_word']:.3f}",
        f"unknown           {result['unknown_rate']:.4%} of tokens",
        f"vocabulary used   {result['used_share']:.1%} of {result['vocab_size']:,} tokens",
        f"round trip        {changed if result['changed_documents'] else 'exact'}",
        f"measured on       {counted(result['bytes'], 'byte')}, {counted(result['words'], 'word')}",
    ]
    if result["first_change"]:
        lines.insert(5, f"first change      {result['first_change']}")
    return "\n".join(lines)
