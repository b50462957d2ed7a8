"""`workhorse chat`: chat with a model, in the terminal or through a pipe."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.loading import Running, announce, json_option, model_options, open_model
from workhorse.cli.output import for_terminal, next_command, print_result, warn
from workhorse.cli.sampling import (
    draft_options,
    generation_config,
    prompt_seconds,
    sampling_options,
    speed,
    warn_of_unknown,
    with_sampling,
)
from workhorse.errors import WorkhorseError

if TYPE_CHECKING:
    from workhorse.generate.conversation import Conversation

HELP = """\
/reset     start a new conversation
/help      show this help
/quit      end the chat (also /exit or Ctrl-D)
Ctrl-C stops a reply. Anything else is a message to the model."""


@click.command("chat")
@model_options
@click.option("--system", default="", metavar="TEXT", help="A system message.")
@click.option(
    "--template",
    default="default",
    metavar="NAME",
    help="The chat template, if the tokenizer has several.  [default: default]",
)
@sampling_options("chat")
@draft_options
@json_option
def command(
    *,
    model: str,
    running: Running,
    system: str,
    template: str,
    draft: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Chat with MODEL: one line is one message, /help lists the commands, Ctrl-D ends the chat.

    With --json each reply is a line of JSON. MODEL is a run directory, a Hugging Face directory or
    hub id, a GGUF file, a folder that `convert` wrote, or a preset's name (random weights).
    """
    config = generation_config(**options).with_seed()
    if config.samples:
        print(f"seed {config.seed}", file=sys.stderr)
    loaded = open_model(model, running, exact=config.exact)
    config = with_sampling(config, loaded, options)
    guesser = None
    if draft is not None:
        guesser = open_model(draft, running, with_text=False)
    conversation = loaded.chat(config, system=system, template=template, draft=guesser)
    if not loaded.trained_to_chat:
        warn(
            f"{loaded.name} was not trained to chat; the prompt is a plain dialogue with 'User:' "
            "and 'Assistant:'"
        )
    announce(loaded)
    for line in _lines(as_json):
        if line in ("/quit", "/exit"):
            break
        if line == "/reset":
            conversation = loaded.chat(config, system=system, template=template, draft=guesser)
        elif line == "/help":
            print(HELP, file=sys.stderr)
        elif line:
            warn_of_unknown(loaded, [line])
            _answer(conversation, line, as_json)
    if sys.stdin.isatty():
        words = ("inspect", model, "--chat", "--prompt", "TEXT", "--out", "page.html")
        print(next_command(*words), file=sys.stderr)


def _lines(as_json: bool) -> Iterator[str]:
    """Yield the lines that the user types, or the lines of stdin if it is not a terminal."""
    if not sys.stdin.isatty():
        yield from (line.removeprefix("\ufeff").strip() for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):  # adds line editing and history, if available
        import readline  # noqa: F401
    while True:
        try:
            yield input("" if as_json else "> ").strip()
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D ends the chat)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


def _answer(conversation: "Conversation", line: str, as_json: bool) -> None:
    """Reply to a message of the user, and warn if old messages no longer fit the context.

    On a terminal, an error is printed and does not end the chat.
    """
    known = conversation.forgotten
    try:
        _reply(conversation, line, as_json)
    except WorkhorseError as error:
        if not sys.stdin.isatty():
            raise
        print(f"workhorse: {error}", file=sys.stderr)  # the next message may fit the context
    if conversation.forgotten > known:
        warn(
            f"the context is full; the model no longer sees the first {conversation.forgotten} "
            "messages"
        )


def _reply(conversation: "Conversation", line: str, as_json: bool) -> None:
    """Print the reply to a message while it is generated, or its result as JSON at the end.

    On a terminal, Ctrl-C stops the reply but not the chat.
    """
    started = time.perf_counter()
    deltas, reason = [], None
    try:
        for delta in conversation.reply(line):
            deltas.append(delta)
            if not as_json:
                print(for_terminal(delta.text), end="", flush=True)
        reason = deltas[-1].finish_reason
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        reason = "interrupted"
    result = {
        "text": "".join(delta.text for delta in deltas),
        "tokens": len(deltas),
        "finish_reason": reason,
        **speed([len(deltas)], time.perf_counter() - started, prompt_seconds(deltas)),
    }
    print_result(result, as_json, text="")
