"""Every option and argument of every verb, as listed by click, with unexpected values."""

import random
from collections.abc import Iterator

import click

from tests.campaigns.inputs.attempt import Attempt, turned
from tests.campaigns.inputs.workplace import SOUND
from workhorse.cli.main import VERBS, command

LONG = "x" * 100_000
TEXTS = (
    "",
    " ",
    "-",
    "--",
    "abc",
    "\u202e\U0001f600e\u0301\ufeff",
    "a\nb\tc\x1b[31m",
    "a\udcff",
    LONG,
)
NUMBERS = (
    *("-1", "0", "1", "-0", "2.5", "1e3", "0x10", "\u0661", "1_000", "+3"),
    *("1e400", "1e39", "-1e39", "1e-40", "1e-320", "-1000", "1000", "nan", "inf", "-inf"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 30),
    "9" * 5000,
)
PATHS = (
    *("folder", "pipe", "/dev/null", "/dev/zero", "/dev/full", "missing/deep/file", "empty"),
    *("binary", "link", "a/" * 3000, "n" * 300, "~nobody/x", "text.txt/x", "run", "hf/config.json"),
)
SETTINGS = ("=", "x=", "=x", "5=1e39", "5=nan", "-1=1", "99999=1", "5=1=2", "x=[", "a.b.c=1")
VALUES = (*TEXTS, *NUMBERS, *PATHS, *SETTINGS)
"""Values for every option that takes a value, and for every argument."""

LINES = {
    "train": [
        {"recipe": "recipe.yaml", "--out": "out"},
        {"recipe": "recipe.yaml", "--out": "run", "--resume": None},
        {"recipe": "recipe.yaml", "--dry-run": None},
    ],
    "generate": [
        {"model": "run", "--prompt": "ab", "--max-new-tokens": "2"},
        {"model": "run", "--prompt": "ab", "--max-new-tokens": "2", "--beams": "2"},
        {"model": "run", "--prompt": "ab", "--max-new-tokens": "2", "--speculate": "2"},
        {"model": "run", "--prompt": "ab", "--max-new-tokens": "2", "--temperature": "0"},
    ],
    "chat": [{"model": "run", "--max-new-tokens": "2"}],
    "evaluate": [
        {"model": "run", "--data": "text.txt"},
        {"model": "run", "--tasks": "task.yaml", "--limit": "1"},
    ],
    "compare": [
        {"study": "study.yaml", "--out": "out"},
        {"study": "study.yaml", "--out": "out", "--dry-run": None},
    ],
    "plan": [
        {"source": "recipe.yaml", "--page": "out"},
        {"source": "gpt2", "--device": "h100", "--context": "64"},
    ],
    "report": [{"runs": "run", "--out": "out"}],
    "scaling": [{"runs": "run", "--predict": "recipe.yaml"}],
    "data prepare": [{"recipe": "recipe.yaml", "--out": "out"}],
    "data inspect": [{"recipe": "recipe.yaml", "--out": "out"}],
    "tokenizer train": [
        {"files": "text.txt", "--vocab-size": "280", "--out": "out"},
        {"files": "text.txt", "--algorithm": "unigram", "--vocab-size": "80", "--out": "out"},
    ],
    "tokenizer report": [{"tokenizer": "bpe", "files": "text.txt"}],
    "tokenizer encode": [{"tokenizer": "bpe", "text": "some"}],
    "tokenizer decode": [{"tokenizer": "bpe", "ids": "5"}],
    "models list": [{}, {"text": "llama"}],
    "models show": [{"model": "gpt2"}, {"model": "run"}],
    "recipe": [{"key": "train"}],
    "convert": [
        {"source": "run", "target": "out", "--to": "hf"},
        {"source": "run", "target": "out", "--to": "workhorse"},
        {"source": "hf", "target": "out", "--to": "gguf"},
    ],
}
"""Valid command lines of each verb: arguments by their names in the code, and options."""

STDIN = "hello\n"
EVERYWHERE = ("out", "home/.cache")


def commands() -> dict[str, click.Command]:
    """The verbs and their subcommands, by the words on the command line."""
    context = click.Context(command)
    found: dict[str, click.Command] = {}
    for verb in VERBS:
        one = command.get_command(context, verb)
        assert one is not None
        if isinstance(one, click.Group):
            found |= {f"{verb} {name}": inner for name, inner in one.commands.items()}
        else:
            found[verb] = one
    return found


def spelled(words: str, line: dict[str, str | None]) -> list[str]:
    """A command line. Options are joined with their values, which may start with a dash."""
    options = [
        name if value is None else f"{name}={value}"
        for name, value in line.items()
        if name.startswith("--")
    ]
    names = [p.name or "" for p in commands()[words].params if isinstance(p, click.Argument)]
    arguments = [line[name] or "" for name in names if name in line]
    return [*words.split(), *options, "--", *arguments]


def attempts(turn: int = 0) -> Iterator[Attempt]:
    yield from _each(turn)
    yield from _flags()
    yield from _pairs(400, turn)
    yield from _words()


def _writes(line: dict[str, str | None]) -> tuple[str, ...]:
    """Paths that a command line may create or change: its output, and its run."""
    given = (line.get(name) for name in ("--out", "--page", "target"))
    named = (next(filter(None, given), "out")).strip("/").partition("/")[0]
    output = () if named in SOUND else (named,)
    return (*EVERYWHERE, *output, *(["run"] if "--resume" in line else []))


def _takers(one: click.Command) -> list[str]:
    """Names of the parameters that take a value: options with dashes, arguments without."""
    found = []
    for parameter in one.params:
        if isinstance(parameter, click.Argument):
            found.append(parameter.name or "")
        elif isinstance(parameter, click.Option) and not parameter.is_flag:
            found.append(max(parameter.opts, key=len))
    return found


OF_EACH, OF_LATER = 14, 4
"""Number of values that an option gets in the first line of a verb, and in each later line."""


def _each(turn: int) -> Iterator[Attempt]:
    """Values for each parameter of each verb; from the second line on, only numbers."""
    count = 0
    for words, one in commands().items():
        for number, line in enumerate(LINES[words]):
            for name in _takers(one):
                if number and not name.startswith("--"):
                    continue
                count += 1
                values = (
                    turned(NUMBERS, OF_LATER, turn + count)
                    if number
                    else turned(VALUES, OF_EACH, turn + count)
                )
                for value in values:
                    wrong = {**line, name: value}
                    shown = value if len(value) < 40 else f"{value[:8]}*{len(value)}"
                    yield Attempt(
                        f"options/{words}/{number}/{name}={shown!r}",
                        spelled(words, wrong),
                        STDIN,
                        writes=_writes(wrong),
                    )


def _flags() -> Iterator[Attempt]:
    """Each flag added to each line once, twice, and with a value that it does not take."""
    for words, one in commands().items():
        for number, line in enumerate(LINES[words]):
            for option in one.params:
                if not (isinstance(option, click.Option) and option.is_flag):
                    continue
                flag = max(option.opts, key=len)
                for more in ([flag], [flag, flag], [f"{flag}=1"], [flag, "stray"]):
                    arguments = spelled(words, line)
                    place = arguments.index("--")
                    yield Attempt(
                        f"flags/{words}/{number}/{' '.join(more)}",
                        [*arguments[:place], *more, *arguments[place:]],
                        STDIN,
                        writes=_writes({**line, **dict.fromkeys(more)}),
                    )


def _pairs(count: int, turn: int) -> Iterator[Attempt]:
    """Two wrong values at once, the same ones in every run."""
    chance = random.Random(turn)
    everything = commands()
    for number in range(count):
        words = chance.choice(sorted(everything))
        line = chance.choice(LINES[words])
        takers = [name for name in _takers(everything[words]) if name.startswith("--")]
        wrong = dict(line)
        for name in chance.sample(takers, min(2, len(takers))):
            wrong[name] = chance.choice(VALUES)
        yield Attempt(f"pairs/{number}", spelled(words, wrong), STDIN, writes=_writes(wrong))


def _words() -> Iterator[Attempt]:
    """Words that are not verbs, and lines without a required parameter."""
    for value in VALUES:
        yield Attempt(f"words/{value[:40]!r}", [value], STDIN)
    for words, one in commands().items():
        yield Attempt(f"words/{words} without arguments", words.split(), STDIN)
        for number, line in enumerate(LINES[words]):
            for missing in line:
                short = {name: value for name, value in line.items() if name != missing}
                yield Attempt(
                    f"words/{words}/{number} without {missing}",
                    spelled(words, short),
                    STDIN,
                    writes=(*_writes(line), "runs"),
                )
        for option in one.params:
            if isinstance(option, click.Option):
                yield Attempt(
                    f"words/{words} {option.opts[0]} at the end",
                    [*words.split(), option.opts[0]],
                    STDIN,
                )
