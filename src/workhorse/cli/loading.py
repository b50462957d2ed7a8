"""Arguments and flags that verbs share: MODEL, RECIPE, and how a model is loaded."""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from workhorse.cli.output import status, warn

if TYPE_CHECKING:
    from workhorse.execute.body import Execution
    from workhorse.model.load import Quantization
    from workhorse.model.model import Model
    from workhorse.nn.attention.kernels import KernelName


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


@dataclass(frozen=True)
class Running:
    """How a model runs: the flags of `model_options`."""

    device: str
    dtype: str
    threads: int
    kernel: "KernelName"
    quantize: "Quantization"
    execution: "Execution"


DECODING = ("auto", "eager", "sdpa")
"""Kernels that can decode with a cache."""


def model_options(
    verb: Callable[..., Any], *, kernels: Sequence[str] = DECODING
) -> Callable[..., Any]:
    """The argument MODEL and the flags of every verb that runs one.

    The parameters are `model: str` and `running: Running`, which `open_model` takes. `kernels`
    lists those that the verb can use.
    """

    @functools.wraps(verb)
    def gathered(**options: Any) -> Any:
        names = Running.__dataclass_fields__
        running = Running(**{name: options.pop(name) for name in names})
        return verb(running=running, **options)

    options: tuple[Callable[..., Any], ...] = (
        click.option(
            "--quantize",
            type=click.Choice(["none", "int8", "int4"]),
            default="none",
            show_default=True,
            help="Hold the weights of linear layers in 8 or 4 bits.",
        ),
        click.option(
            "--execution",
            type=click.Choice(["auto", "reference", "native", "compiled"]),
            default="auto",
            show_default=True,
            help="By what the model runs; compiled takes tens of seconds the first time.",
        ),
        click.option(
            "--kernel",
            type=click.Choice(kernels),
            default="auto",
            show_default=True,
            help="How attention is computed.",
        ),
        runtime_options,
        click.argument("model"),
    )
    return functools.reduce(lambda command, option: option(command), options, gathered)


def open_model(model: str, running: Running, *, with_text: bool = True) -> "Model":
    """Load MODEL according to the flags; random weights are announced on stderr.

    Args:
        model: the argument.
        running: how it runs.
        with_text: refuse a model without a tokenizer; a draft needs none.
    """
    from workhorse.devices.names import use_threads
    from workhorse.model.load import NO_TOKENIZER, load

    if running.threads:
        use_threads(running.threads)
    remarks: list[str] = []
    with status() as show:
        show(f"loading {model}")
        loaded = load(
            model,
            device=running.device,
            dtype=running.dtype,
            kernel=running.kernel,
            quantize=running.quantize,
            execution=running.execution,
            tell=remarks.append,
        )
    if with_text:
        _ = loaded.text  # which raises: that token ids will do is true in Python alone
    for remark in remarks:
        if not remark.endswith(NO_TOKENIZER):  # a draft needs none
            warn(remark)
    return loaded


def announce(model: "Model") -> None:
    """Say on stderr by what a model runs."""
    print(model.announcement, file=sys.stderr)


def recipe_of_run(folder: Path) -> Path:
    """The recipe of a run directory.

    Raises:
        WorkhorseError: the folder holds no run.
    """
    from workhorse.checkpoints import RunDirectory
    from workhorse.errors import WorkhorseError

    run = RunDirectory(folder)
    if not run.exists:
        raise WorkhorseError(
            f"{folder} is not a run: it has no {run.recipe_file.name}; give a recipe file"
        )
    return run.recipe_file
