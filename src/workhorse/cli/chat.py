"""`workhorse chat`: talk with a model, in the terminal or through a pipe."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.loading import Running, compile_option, model_options, open_model
from workhorse.cli.options import json_option
from workhorse.cli.output import print_result
from workhorse.cli.sampling import draft_options, generation_config, sampling_options
from workhorse.errors import WorkhorseError

if TYPE_CHECKING:
    from workhorse.generate.conversation import ChatFormat, Conversation
    from workhorse.load_model import Model


@click.command("chat")
@model_options
@click.option("--system", default="", metavar="TEXT", help="What the model is told beforehand.")
@sampling_options
@draft_options
@compile_option
@json_option
def command(
    *,
    model: str,
    running: Running,
    compiled: bool,
    system: str,
    draft: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Talk with MODEL: one line is one message, /reset begins anew, /exit or the end of input ends.

    With --json each reply is a line of JSON. MODEL is a run directory, a Hugging Face directory or
    hub id, a GGUF file, what else `convert` wrote, or a preset's name (random weights).
    """
    from workhorse.generate.conversation import Conversation

    config = generation_config(**options)
    loaded = open_model(model, running, compiled=compiled)
    guesser = None
    if draft is not None:
        guesser = loaded.guesser(open_model(draft, running, compiled=compiled))
    form = _format(loaded)

    def begin() -> Conversation:
        return Conversation(loaded.decoder, loaded.text, form, config, system=system, draft=guesser)

    conversation = begin()
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            conversation = begin()
        elif line:
            try:
                _reply(conversation, line, as_json)
            except WorkhorseError as error:
                if not sys.stdin.isatty():
                    raise
                print(f"workhorse: {error}", file=sys.stderr)  # the next message may fit


def _format(model: "Model") -> "ChatFormat":
    from workhorse.generate.conversation import TemplateFormat, TranscriptFormat
    from workhorse.tokenizers import ChatTemplate

    if model.trained_to_chat:
        return TemplateFormat(ChatTemplate.of(model.text), model.text)
    print(
        f"warning: {model.name} was never trained to chat; it continues a written dialogue of "
        "'User:' and 'Assistant:'",
        file=sys.stderr,
    )
    return TranscriptFormat(model.text, model.prefix)


def _lines() -> Iterator[str]:
    """What the user types, or what comes through the pipe."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return


def _reply(conversation: "Conversation", line: str, as_json: bool) -> None:
    """Show the reply as it comes, or as one line of JSON."""
    started = time.perf_counter()
    deltas = []
    for delta in conversation.reply(line):
        deltas.append(delta)
        if not as_json:
            print(delta.text, end="", flush=True)
    result = {
        "text": "".join(delta.text for delta in deltas),
        "tokens": len(deltas),
        "finish_reason": deltas[-1].finish_reason,
        "tokens_per_second": len(deltas) / (time.perf_counter() - started),
    }
    print_result(result, as_json, text="")
