"""The options of a generation as a table: bounds, default, help, and where each is offered.

Each attribute of `Options` is a row, and its docstring is the help. `GenerationConfig` has these
fields. The flags of `generate` and `chat`, the fields of the server's APIs, the form of its page,
the options of `generation_config.json` and the keys that separate samplers are made from the rows.
`--help` reads this file, so it imports neither torch nor pydantic.
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_type_hints

if TYPE_CHECKING:  # a type checker then knows the arguments of `GenerationConfig`
    from workhorse.config.base import Config as Fields
else:
    Fields = object

COLDEST = 1e-6
MOST_TIMES = 1e6
LARGEST_SHIFT = 1e9
LARGEST_POWER = 10.0
"""Bounds of options. Within these, finite logits stay finite for all combinations of options."""
MOST_ROWS = 8192
"""Maximum number of completions generated at once for one prompt."""

Decoding = Literal["sampling", "greedy", "beam_search"]
"""A way of decoding; see `GenerationConfig`."""
BY_TOKEN: tuple[Decoding, ...] = ("sampling", "greedy")
BOTH = ("generate", "chat")


class Bound(NamedTuple):
    """A condition on the value of an option."""

    holds: Callable[[float], bool]
    otherwise: str
    """The end of the error message, after the option's name and value."""


def between(least: float, most: float) -> Bound:
    """Return the condition that a value is in a range."""
    return Bound(
        lambda value: least <= value <= most, f"is out of range; choose {least:g} to {most:g}"
    )


SHIFT = between(-LARGEST_SHIFT, LARGEST_SHIFT)
NOT_NEGATIVE = Bound(lambda n: n >= 0, "is negative; choose 0 or more, or omit it")
AT_LEAST_1 = Bound(lambda n: n >= 1, "is less than 1; choose 1 or more")


class Served(NamedTuple):
    """An option as a number in requests to the server, and in the form of its page."""

    least: float
    most: float | None
    hint: str
    """Explanation of its values in the form."""
    extension: bool = True
    """True if OpenAI's API does not have it."""
    is_above: bool = False
    """True if the value must be above `least`."""


@dataclass(frozen=True)
class Option:
    """A row of the table, without type, default and help."""

    read_by: tuple[Decoding, ...] = (*BY_TOKEN, "beam_search")
    """The ways of decoding that use it. With others, a value that is not the default raises an
    error."""
    bounds: tuple[Bound, ...] = ()
    verbs: tuple[str, ...] = ()
    """The verbs that have a flag for it."""
    metavar: str | None = None
    """Name of the flag's value in `--help`; None: its type."""
    also: tuple[str, ...] = ()
    """Other names of the flag."""
    served: Served | None = None
    stored: Literal["always", "do_sample"] | None = None
    """When `generation_config.json` sets it: always, or with `do_sample`, as in transformers; None:
    never."""
    chooses: bool = True
    """True if its value changes which token is chosen from given logits and a random number, or the
    log-probabilities. Requests that differ in such an option have different samplers."""


class Options(Fields):
    """The options of a generation; see `GenerationConfig`."""

    max_new_tokens: Annotated[int, Option(bounds=(AT_LEAST_1,), verbs=BOTH, chooses=False)] = 128
    """Maximum number of new tokens, at least 1."""
    temperature: Annotated[
        float,
        Option(
            read_by=BY_TOKEN,
            bounds=(
                Bound(lambda t: t >= 0, "is negative; choose 0 (greedy) or more"),
                Bound(
                    lambda t: t == 0 or t >= COLDEST,
                    f"is too small to divide by; choose 0 (greedy), or {COLDEST:g} or more",
                ),
            ),
            verbs=BOTH,
            served=Served(0, 2, "0: the likeliest token", extension=False),
            stored="do_sample",
        ),
    ] = 1.0
    """Divisor of the logits, at least 1e-6; 0 takes the likeliest token (greedy)."""
    top_k: Annotated[
        int | None,
        Option(
            read_by=("sampling",),
            bounds=(Bound(lambda k: k >= 1, "is less than 1; choose 1 or more, or omit it"),),
            verbs=BOTH,
            served=Served(0, None, "0: all tokens"),
            stored="do_sample",
        ),
    ] = None
    """Sample only from the k likeliest tokens."""
    top_p: Annotated[
        float,
        Option(
            read_by=("sampling",),
            bounds=(Bound(lambda p: 0 < p <= 1, "is not a probability; choose 0 < top_p <= 1"),),
            verbs=BOTH,
            served=Served(0, 1, "0 to 1", extension=False),
            stored="do_sample",
        ),
    ] = 1.0
    """Sample only from the likeliest tokens that together have this probability (nucleus)."""
    min_p: Annotated[
        float,
        Option(
            read_by=("sampling",),
            bounds=(Bound(lambda p: 0 <= p <= 1, "is not a fraction; choose 0 <= min_p <= 1"),),
            verbs=BOTH,
            served=Served(0, 1, "0 to 1"),
            stored="do_sample",
        ),
    ] = 0.0
    """Sample only from tokens with at least this fraction of the likeliest token's probability."""
    repetition_penalty: Annotated[
        float,
        Option(
            read_by=BY_TOKEN,
            bounds=(
                Bound(lambda penalty: penalty > 0, "is not positive; choose more than 0"),
                between(1 / MOST_TIMES, MOST_TIMES),
            ),
            verbs=BOTH,
            served=Served(0, MOST_TIMES, "1: none", is_above=True),
            stored="always",
        ),
    ] = 1.0
    """Values above 1 make tokens in the prompt or the completion less likely; 1e-6 to 1e6."""
    presence_penalty: Annotated[
        float,
        Option(
            read_by=BY_TOKEN,
            bounds=(SHIFT,),
            verbs=BOTH,
            served=Served(-2, 2, "-2 to 2", extension=False),
        ),
    ] = 0.0
    """Value subtracted once from the logit of each token in the completion; -1e9 to 1e9."""
    frequency_penalty: Annotated[
        float,
        Option(
            read_by=BY_TOKEN,
            bounds=(SHIFT,),
            verbs=BOTH,
            served=Served(-2, 2, "-2 to 2", extension=False),
        ),
    ] = 0.0
    """Value subtracted from a token's logit for each occurrence in the completion; -1e9 to 1e9."""
    logit_bias: Annotated[dict[int, float], Option(verbs=BOTH, metavar="ID=VALUE")] = {}  # noqa: RUF012 - pydantic copies it
    """Value to add to the logit, by token id; -1e9 to 1e9."""
    seed: Annotated[int | None, Option(read_by=BY_TOKEN, verbs=BOTH, chooses=False)] = None
    """Seed of the random generator, 0 to 2^63 - 1; by default a random one."""
    n_samples: Annotated[
        int,
        Option(
            read_by=("sampling",),
            bounds=(AT_LEAST_1, between(1, MOST_ROWS)),
            verbs=("generate",),
            also=("--samples",),
            chooses=False,
        ),
    ] = 1
    """Number of completions per prompt, generated at once, up to 8192. Completion j is
    the one that `n_samples=1` gives with `seed + j`."""
    stop: Annotated[
        tuple[str, ...], Option(read_by=BY_TOKEN, verbs=BOTH, metavar="TEXT", chooses=False)
    ] = ()
    """Strings before which a completion ends. A `Model` also stops at a special token of that
    name."""
    stop_tokens: Annotated[tuple[int, ...] | None, Option(chooses=False)] = None
    """Token ids that end a completion. None: the tokenizer's eos; empty: no token ends it."""
    shown_tokens: Annotated[tuple[int, ...], Option(read_by=BY_TOKEN, chooses=False)] = ()
    """Special tokens whose names belong to the text, such as those around a tool call."""
    logprobs: Annotated[
        int | None, Option(read_by=BY_TOKEN, bounds=(NOT_NEGATIVE,), verbs=("generate",))
    ] = None
    """Log-probabilities of each token, and of the n likeliest at its position; n may be 0."""
    processed_logprobs: Annotated[bool, Option(verbs=("generate",))] = False
    """True for log-probabilities of the distribution from which a token is drawn: after processors,
    bias, penalties, temperature and filters. With `temperature=0`: after processors, bias and
    penalties, before the likeliest token is taken. False: the model's own distribution."""
    prompt_logprobs: Annotated[
        int | None,
        Option(read_by=BY_TOKEN, bounds=(NOT_NEGATIVE,), verbs=("generate",), chooses=False),
    ] = None
    """The model's own log-probabilities of each token of the prompt except the first, as with
    `logprobs`. The prefix cache is then not used."""
    truncate: Annotated[Literal["refuse", "left"], Option(verbs=BOTH, chooses=False)] = "refuse"
    """Behaviour when the context is full: with `refuse`, a prompt that does not fit raises an
    error, and a completion ends; with `left`, the oldest tokens are dropped."""
    speculate: Annotated[
        int,
        Option(
            read_by=BY_TOKEN,
            bounds=(Bound(lambda n: n >= 0, "is negative; choose 0 (no guesses) or more"),),
            verbs=BOTH,
            metavar="N",
            chooses=False,
        ),
    ] = 0
    """Number of tokens guessed at a time (speculative decoding), by a draft model or from the
    sequence. The model verifies them in one pass, so guesses change the speed but never the
    distribution of completions. 0: no guesses."""
    exact: Annotated[bool, Option(verbs=BOTH, chooses=False)] = False
    """True to make results bitwise independent of other requests and of the prefix cache. If the
    decoder is not invariant (`Backend.is_invariant`), this is slower: prompts are never batched,
    and decode steps are batched only if this changes no bit (native operators). It then cannot be
    combined with `speculate`."""
    beams: Annotated[
        int,
        Option(
            bounds=(
                Bound(lambda n: n >= 1, "is less than 1; choose 1 (no beam search) or more"),
                between(1, MOST_ROWS),
            ),
            verbs=("generate",),
            chooses=False,
        ),
    ] = 1
    """Number of hypotheses of beam search, up to 8192; 1: no beam search."""
    length_penalty: Annotated[
        float,
        Option(
            read_by=("beam_search",),
            bounds=(between(-LARGEST_POWER, LARGEST_POWER),),
            verbs=("generate",),
            chooses=False,
        ),
    ] = 1.0
    """Beam search divides the summed log-probability by `length ** length_penalty`; -10 to 10."""
    early_stopping: Annotated[
        bool, Option(read_by=("beam_search",), verbs=("generate",), chooses=False)
    ] = False
    """True to end beam search with the first `beams` finished hypotheses, even if better could
    follow."""


class Row(NamedTuple):
    """A row of the table."""

    type: Any
    default: Any
    help: str
    """The first sentence of the docstring."""
    option: Option


@cache
def table() -> dict[str, Row]:
    """Return the rows of `Options` by the name of the option."""
    helps = docstrings(Options)
    hints = get_type_hints(Options, include_extras=True)
    return {
        name: Row(hint.__origin__, getattr(Options, name), helps[name], hint.__metadata__[0])
        for name, hint in hints.items()
    }


def docstrings(kind: type) -> dict[str, str]:
    """Return the first sentences of the docstrings of a class's attributes."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for row, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name):
            if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                continue
            text = " ".join(str(below.value.value).split())
            found[row.target.id] = text.partition(". ")[0].removesuffix(".") + "."
    return found


@cache
def served() -> dict[str, Served]:
    """Return the options that requests to the server can have as numbers."""
    rows = {name: row.option.served for name, row in table().items()}
    return {name: served for name, served in rows.items() if served is not None}


def stored(*when: Literal["always", "do_sample"]) -> tuple[str, ...]:
    """Return the names of the options that `generation_config.json` sets in these cases."""
    return tuple(name for name, row in table().items() if row.option.stored in when)
