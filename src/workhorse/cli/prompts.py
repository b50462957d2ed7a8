"""Where the prompts of `generate` come from: the command line, standard input, a file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

LARGEST_FILE = 1 << 26
"""Most bytes of a file of prompts."""
BOM = "\ufeff"
"""The byte order mark, with which some editors begin a file of UTF-8."""


def read_prompts(given: tuple[str, ...], file: Path | None) -> list[str]:
    """The prompts of `--prompt`, then those of `--prompt-file`; at least one.

    Raises:
        UsageError: there is none, or stdin is named twice.
        WorkhorseError: the file cannot be read, is too large, or holds no prompt.
    """
    if not given and file is None:
        raise click.UsageError(
            "there is no prompt; give --prompt TEXT, --prompt - for stdin, or --prompt-file FILE"
        )
    if given.count("-") > 1:
        raise click.UsageError("stdin can be read only once; give --prompt - once")
    texts = [_prompt(sys.stdin.read()) if text == "-" else text for text in given]
    return texts if file is None else [*texts, *_prompts_of(file)]


def _prompt(text: str) -> str:
    """A text without a byte order mark and without its last line end."""
    return text.removeprefix(BOM).removesuffix("\n").removesuffix("\r")


def _prompts_of(file: Path) -> list[str]:
    from workhorse.errors import WorkhorseError
    from workhorse.files.plain import read_text

    text = read_text(file, limit=LARGEST_FILE).removeprefix(BOM)
    if file.suffix != ".jsonl":
        return [_prompt(text)]
    if not (prompts := list(_prompts_of_lines(text, file))):
        raise WorkhorseError(f'{file} is empty; write a line {{"prompt": "..."}} for each prompt')
    return prompts


def _prompts_of_lines(text: str, file: Path) -> Iterator[str]:
    from workhorse.errors import WorkhorseError
    from workhorse.files.json_file import parse_json

    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        prompt = parse_json(line.encode(), where).get("prompt")
        if not isinstance(prompt, str):
            raise WorkhorseError(f'{where} has no text as "prompt"; correct or remove the line')
        yield prompt
