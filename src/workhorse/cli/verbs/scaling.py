"""`workhorse scaling`: fit scaling laws to finished runs, and predict the loss of other runs."""

from pathlib import Path
from typing import Any

import click

from workhorse.cli.loading import PATH, json_option
from workhorse.cli.output import print_result, status


@click.command("scaling")
@click.argument("runs", type=PATH, nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--predict",
    type=PATH,
    multiple=True,
    metavar="RECIPE",
    help="Recipe, depth-N or run directory to predict the loss of. Repeatable.",
)
@json_option
def command(*, runs: tuple[Path, ...], predict: tuple[Path, ...], as_json: bool) -> None:
    """Fit scaling laws to finished runs on the same text, and predict the loss of other runs.

    Two laws predict the loss from parameters and tokens (arXiv 2203.15556 and 2001.08361). A third
    law predicts it from FLOPs; it is valid for runs that split their FLOPs between parameters and
    tokens in the same way. The 95 % intervals assume that the formula of the law is right.
    """
    from workhorse.scaling import fit_laws, recipe_at

    with status() as show:
        show("fitting laws")
        found = fit_laws(runs, [recipe_at(path) for path in predict])
    print_result(found, as_json, text="\n".join(_lines(found)))


def _lines(found: dict[str, Any]) -> list[str]:
    lines = ["parameters      tokens       FLOPs    loss"]
    lines += [_row(one) for one in found["runs"]]
    for law in found["laws"]:
        lines += ["", f"{law['name']}: loss = {law['written']}"]
        lines += [
            f"  {name:8}{one['value']:>11.4g}   {one['low']:.4g} to {one['high']:.4g}"
            for name, one in law["constants"].items()
        ]
        lines.append(f"  error of a run {law['error']:.2%}")
        lines += [
            f"  {one['name']}: {one['loss']:.4f}, {one['low']:.4f} to {one['high']:.4f}"
            for one in law["predictions"]
        ]
        if best := law["optimum"]:
            lines.append(
                f"  optimal for {best['flops']:.3g} FLOPs: {best['parameters']:,.0f}"
                f" parameters and {best['tokens']:,.0f} tokens"
                f" ({best['tokens'] / best['parameters']:.1f} tokens per parameter)"
            )
    lines += ["", *(f"{name}: {why}" for name, why in found["left_out"].items())]
    return lines


def _row(one: dict[str, Any]) -> str:
    return (
        f"{one['parameters']:>10,.0f}  {one['tokens']:>10,.0f}  {one['flops']:>10.3g}  "
        f"{one['loss']:.4f}  {one['name']}"
    )
