"""How verbs take a MODEL: the argument, its flags, and loading it; or a run's RECIPE."""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.options import runtime_options
from workhorse.cli.output import status, warn

if TYPE_CHECKING:
    from workhorse.execute.body import Execution
    from workhorse.model.load import Quantization
    from workhorse.model.model import Model
    from workhorse.nn.attention.kernels import KernelName


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
