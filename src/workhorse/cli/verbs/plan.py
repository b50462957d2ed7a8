"""`workhorse plan`: what a model and its training need, before either is allocated."""

from pathlib import Path
from typing import Any

import click

from workhorse.cli.loading import PATH, json_option
from workhorse.cli.output import print_result, status, warn
from workhorse.files.writing import check_place

MOST_DEVICES = 10**6


@click.command("plan")
@click.argument("source")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--device", help="A device by name, such as h100.  [default: this machine]")
@click.option(
    "--devices",
    type=click.IntRange(min=1, max=MOST_DEVICES),
    help="How many.  [default: as many as settings of parallel make]",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory of each device.  [default: what it has, or what is free here]",
)
@click.option(
    "--utilization",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Part of a device's peak that training reaches.  [default: simulated, or 0.4]",
)
@click.option(
    "--price", type=click.FloatRange(min=0), help="Of a device for an hour, to give the cost."
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="FLOPS",
    help="What to spend best.  [default: the arithmetic of the planned training]",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help="Tokens of a text that is served.  [default: the model's longest]",
)
@click.option("--measure", is_flag=True, help="Measure this machine's peak, to give the time.")
@click.option("--page", type=PATH, help="Also write a page with pictures, which needs no network.")
@json_option
def command(
    *,
    source: str,
    overrides: tuple[str, ...],
    page: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what SOURCE needs to be trained and served: arithmetic, memory, time, cost.

    SOURCE is a recipe, `depth-N` for one of the dial, a run directory, a preset, a Hugging Face
    directory or hub id, or a GGUF file. Nothing of the model is allocated. Settings after it are
    those of `train`; those of `parallel` divide the work among devices: data, shard, tensor,
    pipeline, expert, context. --devices shards the weights if none of them is given; otherwise
    each is kept, and data fills up.
    """
    from workhorse.plan import plan
    from workhorse.plan.page import lines

    if page is not None:
        check_place(page)  # a large plan takes minutes
    with status() as show:
        found = plan(source, overrides, **options, tell=warn, show=show)
    print_result(found, as_json, text="\n".join(lines(found)))
    if page is not None:
        from workhorse.plan.page import write_page

        write_page(page, found)
        click.echo(f"page {page}", err=True)
