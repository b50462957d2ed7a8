"""Functions for the verbs `generate` and `chat`: sampling flags, prompts, and speed."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.flags import flag
from workhorse.cli.output import warn
from workhorse.generate.options import table

if TYPE_CHECKING:
    from workhorse.generate import Completion, Delta, GenerationConfig
    from workhorse.model.model import Model

LARGEST_FILE = 1 << 26
"""Maximum size of a prompt file in bytes."""
SHOWN_UNKNOWN = 5
"""Maximum number of unknown words that a warning lists."""
BOM = "\ufeff"
"""Byte order mark. Some editors write it at the start of a UTF-8 file."""


def read_prompts(given: tuple[str, ...], file: Path | None) -> list[str]:
    """Return the prompts of `--prompt` and then of `--prompt-file`, at least one."""
    if not given and file is None:
        raise click.UsageError(
            "no prompt is given; use --prompt TEXT, --prompt - for stdin, or --prompt-file FILE"
        )
    if given.count("-") > 1:
        raise click.UsageError("stdin can be read only once; give --prompt - once")
    texts = [_prompt(sys.stdin.read()) if text == "-" else text for text in given]
    return texts if file is None else [*texts, *_prompts_of(file)]


def _prompt(text: str) -> str:
    """Remove a byte order mark and the last line ending from a prompt."""
    return text.removeprefix(BOM).removesuffix("\n").removesuffix("\r")


def _prompts_of(file: Path) -> list[str]:
    from workhorse.errors import WorkhorseError
    from workhorse.files.text_formats import read_text

    text = read_text(file, limit=LARGEST_FILE).removeprefix(BOM)
    if file.suffix != ".jsonl":
        return [_prompt(text)]
    if not (prompts := list(_prompts_of_lines(text, file))):
        raise WorkhorseError(f'{file} is empty; write a line {{"prompt": "..."}} for each prompt')
    return prompts


def _prompts_of_lines(text: str, file: Path) -> Iterator[str]:
    from workhorse.errors import WorkhorseError
    from workhorse.files.text_formats import parse_json

    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        prompt = parse_json(line.encode(), where).get("prompt")
        if not isinstance(prompt, str):
            raise WorkhorseError(
                f'{where}: "prompt" is missing or not a string; correct or remove the line'
            )
        yield prompt


def warn_of_unknown(model: "Model", prompts: Sequence[str]) -> None:
    """Warn about words or characters of the prompts that the model's tokenizer does not have."""
    from workhorse.errors import counted

    found = list(dict.fromkeys(part for text in prompts for part in model.text.unknown(text)))
    if found:
        noun = "word" if max(map(len, found)) > 1 else "character"
        more = f" and {len(found) - SHOWN_UNKNOWN} more" if len(found) > SHOWN_UNKNOWN else ""
        warn(
            f"the tokenizer has no token for {counted(len(found), noun)} of the prompt "
            f"({', '.join(map(repr, found[:SHOWN_UNKNOWN]))}{more}), so the model cannot tell them "
            f"from other unknown {noun}s; use {noun}s of its training data"
        )


def speed(lengths: Iterable[int], seconds: float, prompt_seconds: float) -> dict[str, Any]:
    """The speed of decoding, as the result fields `tokens_per_second` and `prompt_seconds`.

    The first token of a completion comes from the prompt's forward pass, so it is not counted.
    `tokens_per_second` is None if no completion has a second token. `seconds` is the total time,
    `prompt_seconds` the part spent on the forward passes of the prompts.
    """
    decoded = sum(max(0, n - 1) for n in lengths)
    rate = decoded / (seconds - prompt_seconds) if decoded else None
    return {"tokens_per_second": rate, "prompt_seconds": prompt_seconds}


def prompt_seconds(results: "Sequence[Completion] | Sequence[Delta]") -> float:
    """Seconds spent on the forward passes of all prompts, from completions or streamed pieces."""
    return sum(result.prompt_seconds for result in results)


def _biases(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> Any:
    """Parse the values of `--logit-bias` (`ID=VALUE`) into a mapping; None if none is given."""
    biases: dict[int, float] = {}
    for setting in given:
        name, _, value = setting.partition("=")
        try:
            if not setting.isascii() or "_" in setting:  # int() and float() would accept these
                raise ValueError
            token, bias = int(name), float(value)
        except ValueError:
            raise click.BadParameter(f"{setting!r} is not a bias; write ID=VALUE") from None
        if token in biases:
            raise click.BadParameter(f"token {token} is given twice; keep one")
        biases[token] = bias
    return biases or None


def sampling_options(verb: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the flags of a verb's options, such as `--temperature`.

    The verb's function gets a parameter for each flag, named like the field of `GenerationConfig`;
    it is None if the flag is not given.
    """
    rows = [(name, row) for name, row in table().items() if verb in row.option.verbs]

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, row in reversed(rows):
            how: dict[str, Any] = {"metavar": row.option.metavar, "also": row.option.also}
            if name == "logit_bias":
                how |= {"type": str, "multiple": True, "callback": _biases}
            function = flag(name, row.type, row.default, row.help, **how)(function)
        return function

    return add


def draft_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--draft` to a verb. The verb's function gets `draft: str | None`."""
    return click.option(
        "--draft",
        metavar="MODEL",
        help="With --speculate: a smaller model with the same vocabulary that guesses the tokens.",
    )(verb)


def with_sampling(
    config: "GenerationConfig", model: "Model", options: Mapping[str, Any]
) -> "GenerationConfig":
    """Add the options in a model's `generation_config.json` to a config; print them on stderr.

    Flags in `options` that are not None take precedence.
    """
    given = [name for name, value in options.items() if value is not None]
    full = model.with_sampling(config, given)
    if full != config:
        own = (
            f"{key}={value:g}"
            for key, value in model.sampling.items()
            if getattr(full, key) != getattr(config, key)
        )
        print(f"generation_config.json: {', '.join(own)}; flags override it", file=sys.stderr)
    return full


def generation_config(**options: Any) -> "GenerationConfig":
    """Make a config from a verb's flags; flags that are None keep the library's defaults."""
    from workhorse.generate import GenerationConfig

    given = {name: value for name, value in options.items() if value is not None}
    return GenerationConfig(**given)
