"""How verbs take a MODEL: the argument, the flags beside it, and loading it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.options import runtime_options
from workhorse.cli.output import warn

if TYPE_CHECKING:
    from workhorse.load_model import Model
    from workhorse.nn.kernels import KernelName


def model_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The argument MODEL and the flags of every verb that runs one.

    The parameters are `model: str`, `kernel: KernelName`, and those of `runtime_options`: what
    `open_model` takes.
    """
    verb = click.option(
        "--kernel",
        type=click.Choice(["auto", "eager", "sdpa", "flex"]),
        default="auto",
        show_default=True,
        help="How attention is computed.",
    )(verb)
    return click.argument("model")(runtime_options(verb))


def open_model(
    model: str, *, device: str, dtype: str, threads: int, kernel: "KernelName"
) -> "Model":
    """Load MODEL as the flags say; random weights are announced on stderr."""
    import torch

    from workhorse.load_model import load

    if threads:
        torch.set_num_threads(threads)
    return load(
        model,
        device=device,
        dtype=dtype,
        kernel=kernel,
        tell=warn,
    )
