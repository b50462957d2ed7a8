"""Flags that verbs share, so that each means the same everywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource


class _Path(click.Path):
    """A path; an empty one is refused, for it would stand for the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("a path is empty; write . for the current folder", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path()
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one line of JSON."
)
"""Every verb has it; the parameter is `as_json`."""


MOST_ROWS = 65_536
"""More than fits into the memory of any machine at once."""


def runtime_options(verb: Callable[..., Any], *, default: str | bool = True) -> Callable[..., Any]:
    """`--device`, `--dtype` and `--threads`, for every verb that runs a model.

    The parameters are `device: str`, `dtype: str` and `threads: int` (0: as many as torch finds).
    `default` is shown in the help as what applies if a flag is not given; True: the value itself.
    """
    for option in (
        click.option(
            "--threads",
            type=click.IntRange(min=0),
            default=0,
            show_default=default,
            help="CPU threads; 0 lets torch decide.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            show_default=default,
            help="Precision of the computation.",
        ),
        click.option(
            "--device",
            default="auto",
            show_default=default,
            help="auto, cpu, cuda, cuda:N or mps.",
        ),
    ):
        verb = option(verb)
    return verb


def train_settings(**flags: Any) -> list[str]:
    """Flags that are on the command line, even with a default value, as settings of `train`."""
    source = click.get_current_context().get_parameter_source
    return [
        f"train.{name}={value}"
        for name, value in flags.items()
        if source(name) is ParameterSource.COMMANDLINE
    ]
