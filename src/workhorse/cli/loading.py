"""Arguments and options shared by several verbs (subcommands): paths, `--json`, MODEL, device."""

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
    """Type of path arguments. Empty strings are errors, since `Path("")` is the current folder."""

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
"""The option `--json`, which every verb has. The verb's function gets its value as `as_json`."""


MOST_ROWS = 65_536
"""Maximum of `--batch-size`. No machine has enough memory for a larger batch."""


def runtime_options(verb: Callable[..., Any], *, default: str | bool = True) -> Callable[..., Any]:
    """Add the options `--device`, `--dtype` and `--threads` to a verb that runs a model.

    The verb's function gets `device: str`, `dtype: str` and `threads: int` (0: torch's default).
    `default` is the default that the help shows for each option; True: the actual one.
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
    """Convert the flags given on the command line to recipe settings `train.NAME=VALUE`."""
    source = click.get_current_context().get_parameter_source
    return [
        f"train.{name}={value}"
        for name, value in flags.items()
        if source(name) is ParameterSource.COMMANDLINE
    ]


@dataclass(frozen=True)
class Running:
    """How to execute a model: the values of the options that `model_options` adds."""

    device: str
    dtype: str
    threads: int
    kernel: "KernelName"
    quantize: "Quantization"
    execution: "Execution"
    adapter: Path | None = None


adapter_option = click.option(
    "--adapter",
    type=PATH,
    help="Apply an adapter: a PEFT directory, or a run that trained one on MODEL.",
)
DECODING = ("auto", "eager", "sdpa")
"""Attention kernels that can decode with a KV cache."""


def model_options(
    verb: Callable[..., Any], *, kernels: Sequence[str] = DECODING, with_adapter: bool = True
) -> Callable[..., Any]:
    """Add the argument MODEL, and options for how to execute it, to a verb that runs a model.

    The verb's function gets `model: str` and `running: Running`, which it passes to `open_model`.
    `with_adapter` is False if the verb has its own option `--adapter`.
    """

    @functools.wraps(verb)
    def gathered(**options: Any) -> Any:
        names = Running.__dataclass_fields__
        running = Running(**{name: options.pop(name) for name in names if name in options})
        return verb(running=running, **options)

    options: tuple[Callable[..., Any], ...] = (
        click.option(
            "--quantize",
            type=click.Choice(["none", "int8", "int4"]),
            default="none",
            show_default=True,
            help="Store the weights of linear layers in 8 or 4 bits.",
        ),
        *([adapter_option] if with_adapter else []),
        click.option(
            "--execution",
            type=click.Choice(["auto", "reference", "native", "compiled"]),
            default="auto",
            show_default=True,
            help="How the model is executed; compiled takes tens of seconds the first time.",
        ),
        click.option(
            "--kernel",
            type=click.Choice(kernels),
            default="auto",
            show_default=True,
            help="Attention kernel.",
        ),
        runtime_options,
        click.argument("model"),
    )
    return functools.reduce(lambda command, option: option(command), options, gathered)


def open_model(
    model: str,
    running: Running,
    *,
    with_text: bool = True,
    with_ids: bool = False,
    exact: bool = False,
) -> "Model":
    """Load the model for a verb, and print the loader's warnings on stderr.

    An adapter is merged into weights that are not quantised, so it does not slow decoding down.
    `with_text` is False for draft models, which need no tokenizer and get no adapter. `with_ids` is
    True if the verb got token ids, so that the model needs no tokenizer. `exact` is True to compute
    logits that are bitwise independent of the batch, if possible.
    """
    from workhorse.devices.names import use_threads
    from workhorse.model.load import NO_TOKENIZER, load
    from workhorse.transforms.adapters import adapters_of, why_not_merged

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
            adapter=running.adapter if with_text else None,
            execution=running.execution,
            exact=exact,
            notify=remarks.append,
        )
        if adapters_of(loaded.reference) and not why_not_merged(loaded.reference):
            loaded = loaded.merged(running.kernel).with_execution(running.execution, exact=exact)
    if with_text and not with_ids:
        _ = loaded.text  # raises an error without a tokenizer
    for remark in remarks:
        if not remark.endswith(NO_TOKENIZER):  # a draft model does not need a tokenizer
            warn(remark)
    return loaded


def announce(model: "Model") -> None:
    """Print on stderr how a loaded model is executed."""
    print(model.announcement, file=sys.stderr)


def recipe_of_run(folder: Path) -> Path:
    """The path of the recipe file in a run directory.

    Raises:
        WorkhorseError: the folder is not a run directory.
    """
    from workhorse.checkpoints import RunDirectory
    from workhorse.errors import WorkhorseError

    run = RunDirectory(folder)
    if not run.exists:
        raise WorkhorseError(
            f"{folder} is not a run: it has no {run.recipe_file.name}; give a recipe file"
        )
    return run.recipe_file
