'''The command `workhorse`: finds the verb (subcommand), runs it, and returns an exit code.

Each verb has a file in `verbs/`, which defines `command`, and a line in `VERBS`. The file imports
click and `workhorse.cli.*` at its top, and the rest of the library inside its functions, so that
`--help` does not import torch. A complete verb:

    """`workhorse count`: count the tokens of a file."""

    from pathlib import Path

    import click

    from workhorse.cli.loading import PATH, json_option
    from workhorse.cli.output import print_result, progress


    @click.command("count")
    @click.argument("file", type=PATH)
    @click.option("--limit", type=int, default=0, show_default=True, help="Most tokens.")
    @json_option
    def command(file: Path, limit: int, as_json: bool) -> None:
        """Count the tokens of FILE."""
        from workhorse.tokenizers import count_tokens

        with progress("counting", unit="bytes") as report:  # to stderr: report(done, total)
            result = count_tokens(file, limit=limit, progress=report)
        print_result(result, as_json, text=f"{result['tokens']:,} tokens")  # to stdout

A verb with subcommands makes `command` a `click.Group` (`@click.group("data")`, then
`@command.command("prepare")`). The library raises `WorkhorseError` for mistakes that a user can
correct; a verb neither catches it nor prints errors. If a signal stops a verb early, the verb saves
its work, prints its result and calls `click.get_current_context().exit(ExitCode.STOPPED)`.
'''

import errno
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import click

import workhorse
from workhorse.cli.output import ExitCode, give_up_stdout, one_line, settle_streams
from workhorse.devices.waiting import share_cores
from workhorse.errors import WorkhorseError

VERBS = {
    "train": "Train a model from a recipe, or resume a run.",
    "generate": "Continue a prompt with a model.",
    "chat": "Chat with a model in the terminal.",
    "serve": "Serve a model over HTTP with OpenAI's API.",
    "evaluate": "Measure a model's loss on text, or score it on tasks.",
    "inspect": "Write a page that explains a model's forward pass over a prompt.",
    "plan": "Estimate a model's memory, FLOPs, time and cost.",
    "report": "Write the report page of a run, or of several runs side by side.",
    "compare": "Compare designs by training them, with confidence intervals.",
    "scaling": "Fit scaling laws to runs and predict the loss of larger ones.",
    "data": "Prepare a recipe's data, or inspect its training rows.",
    "recipe": "Show the reference of all recipe keys.",
    "tokenizer": "Train, measure or inspect a tokenizer.",
    "models": "List the presets, or show a model's config and size.",
    "convert": "Convert a model to Hugging Face, GGUF or Workhorse format.",
    "merge": "Merge the weights of several models into one.",
}
"""The verbs and their descriptions in `--help`. The module of a verb is `workhorse.cli.verbs.VERB`;
it is imported when the verb is used."""

BUGS = {None, errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTTY, errno.ESPIPE}
"""Values of `OSError.errno` that a user cannot correct; for these, the traceback is printed."""


class VerbGroup(click.Group):
    """The group of all verbs in `VERBS`. The module of a verb is imported when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        verb: click.Command = importlib.import_module(f"workhorse.cli.verbs.{cmd_name}").command
        read_ascii_numbers(verb)
        return verb

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS:
            from workhorse.errors import nearest

            raise click.UsageError(f"unknown verb {args[0]!r}; {nearest(args[0], VERBS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    "workhorse",
    cls=VerbGroup,
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every verb has its own --help, and --json for a machine-readable result.",
)
@click.version_option(workhorse.__version__, message="workhorse %(version)s")
def command() -> None:
    """Train, fine-tune, evaluate, compare and run decoder-only transformers."""


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code (see `ExitCode`).

    All exceptions are printed on stderr instead of raised.
    """
    try:
        check_folder()
        with command.make_context("workhorse", as_text(arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("workhorse: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader has closed our output
        give_up_stdout()
        return ExitCode.DONE
    except Exception as error:
        give_up_stdout()
        line = mistake(error, arguments)
        print(line or traceback.format_exc().rstrip(), file=sys.stderr)
        return ExitCode.USAGE if line else ExitCode.FAILURE
    return ExitCode.DONE


def check_folder() -> None:
    """Check that the current folder exists; if it was removed, PyTorch would abort the process.

    Raises:
        WorkhorseError: the current folder does not exist.
    """
    try:
        os.getcwd()
    except OSError:
        raise WorkhorseError("the current folder does not exist; change to another") from None


def as_text(arguments: Sequence[str]) -> list[str]:
    """Decode command-line arguments as UTF-8, independent of the locale.

    Raises:
        WorkhorseError: an argument is not UTF-8.
    """
    texts = []
    for argument in arguments:
        try:
            texts.append(argument if argument.isascii() else os.fsencode(argument).decode())
        except ValueError:
            raise WorkhorseError(f"{argument!r} is not UTF-8; pass it as UTF-8") from None
    return texts


def read_ascii_numbers(command: click.Command) -> None:
    """Change a verb in place, so that its numeric options accept only ASCII digits.

    Python's `int` and `float` also accept the digits of other alphabets, and `1_000`.
    """
    if isinstance(command, click.Group):
        for one in command.commands.values():
            read_ascii_numbers(one)
    for parameter in command.params:
        kind = parameter.type
        if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
            parameter.type = copy(kind)  # click shares one instance between all options
            vars(parameter.type)["convert"] = partial(_ascii_number, type(kind).convert, kind)


def _ascii_number(
    convert: Callable[..., Any], kind: click.ParamType, value: Any, *where: Any
) -> Any:
    if isinstance(value, str) and (not value.isascii() or "_" in value):
        kind.fail(f"{value!r} is not a valid {kind.name}.", *where)
    return convert(kind, value, *where)


NUMBERS = {"integer": "a whole number", "float": "a number"}
VALID = re.compile(r"a valid (integer|float)( range)?")
"""Finds click's names for number types in its messages; `NUMBERS` has plainer names."""


def mistake(error: Exception, arguments: Sequence[str] = ()) -> str:
    """The one-line message for an error that the user can correct; empty for a bug in Workhorse."""
    where = "workhorse"
    match error:
        case click.exceptions.NoArgsIsHelpError():
            return error.format_message()  # the complete help text
        case click.UsageError():
            where = error.ctx.command_path if error.ctx else _verb_in(arguments)
            said = error.format_message().rstrip(".")
            said = VALID.sub(lambda kind: NUMBERS[kind[1]], said)
            if isinstance(error, click.NoSuchOption) and (flags := _begun(error)):
                said = f"no such option {error.option_name}; did you mean {' or '.join(flags)}?"
            reason = f"{said} (see {where} --help)"
        case click.ClickException():
            reason = error.format_message()
        case WorkhorseError():
            reason = str(error)
        case OSError() if error.errno not in BUGS:
            subject = f"{error.filename}: " if error.filename is not None else ""
            remedy = "; check the path" if error.errno == errno.ENOENT else ""
            reason = f"{subject}{error.strerror}{remedy}"
        case UnicodeError():
            reason = _encoding(error)
        case RuntimeError() if "Storage size calculation overflowed" in str(error):
            reason = "a tensor would have more than 2^63 bytes; choose smaller sizes"
        case _ if out_of_memory(error):
            reason = "there is not enough memory; reduce the batch size, the context or the model"
        case _:
            return ""
    return one_line(f"{where}: {reason}")


def _verb_in(arguments: Sequence[str]) -> str:
    """The command and the verb in `arguments`: errors of click's parser do not contain the verb."""
    return " ".join(["workhorse", *(word for word in arguments[:1] if word in VERBS)])


def _begun(error: click.NoSuchOption) -> list[str]:
    """Suggestions for an unknown flag: the flags that begin with it."""
    parameters = error.ctx.command.get_params(error.ctx) if error.ctx else []
    flags = [flag for parameter in parameters for flag in parameter.opts]
    return [flag for flag in flags if flag.startswith(error.option_name)]


def _encoding(error: UnicodeError) -> str:
    match error:
        case UnicodeDecodeError():  # from stdin; errors in files are reported with their path
            return f"the input is not {error.encoding}: bad byte at offset {error.start}"
        case UnicodeEncodeError():  # from a path
            return (
                f"the locale's encoding {error.encoding} cannot express the file name; "
                "set PYTHONUTF8=1"
            )
        case _:  # from stdin, by a codec that does not report the byte
            return f"the input cannot be read: {error}; set PYTHONIOENCODING=utf-8"


def out_of_memory(error: Exception) -> bool:
    """True if the error means that Python or torch ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    said = ("can't allocate memory", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in said)


def run() -> None:
    """Entry point of the console script `workhorse`: run `main` on the process's arguments."""
    share_cores()  # must run before torch is imported
    settle_streams()
    if "_WORKHORSE_COMPLETE" in os.environ:  # a shell requests completions
        command.main(prog_name="workhorse")
    sys.exit(main(sys.argv[1:]))
