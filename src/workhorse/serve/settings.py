"""The settings of a server's engine. `workhorse serve` has an option for each row with a `Flag`.

`--help` reads this file, so it imports neither torch nor pydantic.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

Exact = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Flag:
    """An option of the verb for a setting; the docstring of the setting is its help."""

    least: float | None = None
    """Minimum of a number."""
    most: float | None = None
    """Maximum of a number."""
    metavar: str | None = None
    """Name of the value in `--help`; None: its type."""


@dataclass(frozen=True)
class EngineSettings:
    """How the model is loaded, and the limits of its engine."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kernel: str = "auto"
    quantize: str = "none"
    execution: str = "auto"
    adapter: str | None = None
    """Path of an adapter that the model has for all requests."""
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    """Paths of adapters that requests may choose, by name."""
    threads: int = 0
    max_sequences: Annotated[int, Flag(1, 1024)] = 16
    """Completions that are generated at a time."""
    cache_tokens: Annotated[int | None, Flag(1)] = None
    """Tokens in the cache, over all completions; by default as many as fit into half of the free
    memory, up to `max_sequences` full contexts."""
    prompt_share: Annotated[float, Flag(0.01, 1000)] = 0.4
    """Fraction by which prompts may lengthen a step while other completions are generated."""
    exact: Annotated[Exact, Flag()] = "auto"
    """Whether answers are independent of other requests, bit by bit; `auto`: if that costs little,
    because native steps compute the model. With `always`, other models process prompts and the
    sequences of a step one by one."""
    speculate: Annotated[int, Flag(0, 64, "N")] = 0
    """Maximum number of tokens guessed at a time, from repetitions in the text so far; they are
    verified in one pass, so answers stay the same."""
    template: Annotated[str, Flag(metavar="NAME")] = "default"
    """Name of the chat template, if the tokenizer has several."""
