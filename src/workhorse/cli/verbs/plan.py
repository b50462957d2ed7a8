"""`workhorse plan`: estimate memory, FLOPs, time and cost of a model, without allocating it."""

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
@click.option(
    "--device",
    metavar="NAME[,NAME]...",
    help="A device by name, such as h100. With several, a table compares them.  [default: this"
    " machine]",
)
@click.option(
    "--devices",
    type=click.IntRange(min=1, max=MOST_DEVICES),
    help="Number of devices.  [default: the product of the settings of parallel]",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory of each device.  [default: the device's memory, or this machine's free memory]",
)
@click.option(
    "--utilization",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Fraction of a device's peak FLOP/s that training reaches, recomputation included."
    "  [default: simulated or 0.4 for one device; none for several]",
)
@click.option(
    "--price",
    "prices",
    type=click.FloatRange(min=0),
    multiple=True,
    help="Price of a device per hour, to show the cost; give one for each device, in their order.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="FLOPS",
    help="FLOPs for which to show the optimal number of parameters and tokens.  [default: the FLOPs"
    " of the planned training]",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help="Tokens per sequence in serving.  [default: the model's maximum]",
)
@click.option(
    "--measure", is_flag=True, help="Measure this machine's peak FLOP/s, to estimate the time."
)
@click.option("--page", type=PATH, help="Also write a self-contained HTML page with charts.")
@json_option
def command(
    *,
    source: str,
    overrides: tuple[str, ...],
    page: Path | None,
    device: str | None,
    prices: tuple[float, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Estimate the requirements of SOURCE for training and serving: FLOPs, memory, time, cost.

    SOURCE is a recipe, `depth-N` (a built-in recipe with N layers), a run directory, a preset, a
    Hugging Face directory or hub id, or a GGUF file. The model is not allocated. Settings after
    SOURCE are the same as for `train`. The settings of `parallel` divide the work among devices:
    data, shard, tensor, pipeline, expert, context. With --devices and without settings of
    `parallel`, the weights are sharded among all devices. With both, `parallel.data` is changed so
    that all devices are used.
    """
    from workhorse.plan import plan_devices
    from workhorse.plan.page import lines, table

    names = [None] if device is None else device.split(",")
    if page is not None:
        if len(names) > 1:
            raise click.UsageError(f"--page shows one device, not {device}; give one")
        check_place(page)  # fails before the plan is computed, which can take minutes
    with status() as show:
        plans = plan_devices(source, overrides, names, prices, notify=warn, show=show, **options)
    several = len(plans) > 1
    found = {"source": source, "devices": plans} if several else plans[names[0]]
    print_result(found, as_json, text="\n".join(table(plans) if several else lines(found)))
    if page is not None:
        from workhorse.plan.page import write_page

        write_page(page, found)
        click.echo(f"page {page}", err=True)
