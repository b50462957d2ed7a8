"""`workhorse serve`: an HTTP server with OpenAI's API."""

import json
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.flags import flags_of
from workhorse.cli.loading import PATH, Running, json_option, model_options
from workhorse.cli.output import ExitCode, print_result, warn
from workhorse.serve.settings import EngineSettings

if TYPE_CHECKING:
    from workhorse.serve.messages import ModelFacts

KEY_VARIABLE = "WORKHORSE_API_KEY"


@click.command("serve")
@partial(model_options, with_adapter=False)
@click.option(
    "--adapter",
    "adapters",
    metavar="[NAME=]PATH",
    multiple=True,
    help="Apply an adapter: a PEFT directory, or a run that trained one on MODEL. With a NAME,"
    " requests may choose it as their model. May be given several times.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any."
)
@click.option("--name", help="Name of the model for clients.  [default: the last part of MODEL]")
@click.option(
    "--api-key-file",
    type=PATH,
    metavar="FILE",
    help="API keys, one per line. One key can also be given in the environment variable"
    f" {KEY_VARIABLE}.",
)
@flags_of(EngineSettings)
@click.option(
    "--queue",
    type=click.IntRange(0, 100_000),
    help="Requests that may wait; further ones get status 429.  [default: --max-sequences]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that a request may take.",
)
@click.option("--check", is_flag=True, help="Only say what fits into memory, by the files' sizes.")
@json_option
def command(
    *,
    model: str,
    running: Running,
    adapters: tuple[str, ...],
    host: str,
    port: int,
    name: str | None,
    api_key_file: Path | None,
    queue: int | None,
    timeout: float,
    check: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve MODEL over HTTP with OpenAI's API, for programs and for browsers.

    Ctrl-C or SIGTERM ends it after the requests in flight. MODEL is a run directory, a Hugging Face
    directory or hub id, a GGUF file, a folder that `convert` wrote, or a preset's name (random
    weights).
    """
    import asyncio

    from workhorse.errors import WorkhorseError, to_install

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if not find_spec(name)]
    if missing:
        raise WorkhorseError(f"serve needs {missing[0]}: {to_install('serve')}")
    from workhorse.serve.gate import Limits, is_loopback
    from workhorse.serve.run import check_keys, listen, parsed_adapters, read_keys, serve

    keys = [] if api_key_file is None else read_keys(api_key_file)
    if given := os.environ.get(KEY_VARIABLE):
        keys.append(given)
    check_keys(keys, host)
    name = name or Path(model).absolute().name
    plain, named = parsed_adapters(adapters, name)
    given = {option: value for option, value in options.items() if value is not None}
    settings = EngineSettings(
        model, adapters=named, **asdict(running) | {"adapter": plain}, **given
    )
    if check:
        from workhorse.serve.memory import fit

        found = fit(settings)
        print_result(found._asdict(), as_json, text=found.sentence)
        return
    most = settings.max_sequences
    places = most + (most if queue is None else queue)
    bound = listen(host, port)
    address = f"http://{_shown_host(host)}:{bound.getsockname()[1]}"

    def ready(facts: "ModelFacts") -> None:
        for remark in facts.remarks:
            warn(remark)
        if not facts.trained_to_chat:
            warn(f"{facts.name} was not trained to chat; chats become a plain dialogue")
        print(facts.announcement, file=sys.stderr)
        if named:
            print(f"adapters: {', '.join(named)}", file=sys.stderr)
        independent = "do not depend" if facts.is_exact else "may depend, by rounding,"
        print(
            f"context {facts.context:,} tokens, cache {facts.cache_tokens:,} tokens, "
            f"{most} completions at a time; answers {independent} on other requests",
            file=sys.stderr,
        )
        if as_json:
            print(json.dumps({"url": f"{address}/v1", "model": name}), flush=True)
        else:
            print(f"serving {name} at {address}/v1, and in a browser at {address}", flush=True)

    number = asyncio.run(
        serve(
            settings,
            bound,
            name=name,
            keys=keys,
            limits=Limits(places=places, seconds=timeout),
            loopback=is_loopback(host),
            say=lambda line: print(f"workhorse serve: {line}", file=sys.stderr),
            on_ready=ready,
        )
    )
    click.get_current_context().exit(ExitCode.after(signal.Signals(number).name))


def _shown_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
