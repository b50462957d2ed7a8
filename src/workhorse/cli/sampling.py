"""What `generate` and `chat` share: sampling flags, reading prompts, reporting the speed."""

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from workhorse.generate import Completion, Delta, GenerationConfig
    from workhorse.model.model import Model

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
            raise WorkhorseError(f'{where} has no text as "prompt"; correct or remove the line')
        yield prompt


def speed(lengths: Iterable[int], seconds: float, prompt_seconds: float) -> dict[str, Any]:
    """`prompt_seconds`, and `tokens_per_second` of the decoding that followed.

    The first token of a text comes from reading its prompt, so it is not counted; the rate is None
    if no text has a second one.

    Args:
        lengths: new tokens of each text.
        seconds: in total.
        prompt_seconds: spent reading the prompts.
    """
    decoded = sum(max(0, n - 1) for n in lengths)
    rate = decoded / (seconds - prompt_seconds) if decoded else None
    return {"tokens_per_second": rate, "prompt_seconds": prompt_seconds}


def prompt_seconds(results: "Sequence[Completion] | Sequence[Delta]") -> float:
    """How long it took to read all prompts."""
    return sum(result.prompt_seconds for result in results)


def _biases(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> Any:
    """`ID=VALUE` settings as a mapping; None if there are none."""
    biases: dict[int, float] = {}
    for setting in given:
        name, _, value = setting.partition("=")
        try:
            if not setting.isascii() or "_" in setting:  # Python reads these as numbers
                raise ValueError
            token, bias = int(name), float(value)
        except ValueError:
            raise click.BadParameter(f"{setting!r} is not a bias; write ID=VALUE") from None
        if token in biases:
            raise click.BadParameter(f"token {token} is given twice; keep one")
        biases[token] = bias
    return biases or None


_FLAGS = (
    click.option("--max-new-tokens", type=int, help="Most tokens to add.  [default: 128]"),
    click.option(
        "--temperature",
        type=float,
        help="Below 1 sharper, above 1 more varied, 0 always the likeliest token.  [default: 1.0]",
    ),
    click.option("--top-k", type=int, help="Sample among the k likeliest tokens."),
    click.option(
        "--top-p",
        type=float,
        help="Sample among the likeliest tokens that together have probability p.",
    ),
    click.option(
        "--min-p", type=float, help="Leave out tokens less likely than p times the likeliest."
    ),
    click.option(
        "--repetition-penalty", type=float, help="Above 1: tokens seen so far become less likely."
    ),
    click.option(
        "--presence-penalty",
        type=float,
        help="Subtracted from the logit of every token that is in the new text.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        help="Subtracted from a token's logit for each time it occurred.",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        callback=_biases,
        help="Added to the logit of a token id. Repeatable.",
    ),
    click.option("--seed", type=int, help="The same seed gives the same text."),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help="End before this text or special token. Repeatable.",
    ),
    click.option(
        "--speculate",
        type=int,
        metavar="N",
        help="Guess N tokens at a time, from the text so far or by --draft, and check them in one"
        " pass. Faster where guesses are right. The text stays the same or, sampled with --draft,"
        " its distribution does.",
    ),
    click.option(
        "--exact",
        is_flag=True,
        default=None,
        help="Every number has the same bits whatever else is read. Prompts are read one by one,"
        " and texts too where steps are not native.",
    ),
    click.option(
        "--truncate",
        type=click.Choice(["refuse", "left"]),
        help="When the context is full: refuse or end, or forget the oldest tokens."
        "  [default: refuse]",
    ),
)


def sampling_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags; their parameters are fields of `GenerationConfig`, None if not given."""
    for option in reversed(_FLAGS):
        verb = option(verb)
    return verb


def draft_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--draft`; its parameter is `draft: str | None`, a MODEL."""
    return click.option(
        "--draft",
        metavar="MODEL",
        help="With --speculate: a smaller model of the same vocabulary that guesses.",
    )(verb)


def with_seed(config: "GenerationConfig") -> "GenerationConfig":
    """Sampling with a seed that can be told: one is drawn if there is none."""
    if config.samples and config.seed is None:
        return config.replace(seed=secrets.randbits(32))
    return config


def with_sampling(
    config: "GenerationConfig", model: "Model", options: Mapping[str, Any]
) -> "GenerationConfig":
    """The config with the model's own sampling options, which are printed on stderr.

    Args:
        config: made of the flags.
        model: the model.
        options: the flags; those that are not None win.
    """
    given = [name for name, value in options.items() if value is not None]
    full = model.with_sampling(config, given)
    if full != config:
        own = (f"{key}={value:g}" for key, value in model.sampling.items() if key not in given)
        print(f"generation_config.json: {', '.join(own)}; flags override it", file=sys.stderr)
    return full


def generation_config(**options: Any) -> "GenerationConfig":
    """A config from the flags that were given; the other fields keep the library's defaults."""
    from workhorse.generate import GenerationConfig

    given = {name: value for name, value in options.items() if value is not None}
    return GenerationConfig(**given)
