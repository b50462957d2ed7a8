"""`workhorse merge`: merge the weights of several models into one."""

from pathlib import Path

import click

from workhorse.cli.loading import PATH, json_option
from workhorse.cli.output import print_result, warn
from workhorse.errors import counted


@click.command("merge")
@click.argument("recipe", type=PATH)
@click.option("--out", type=PATH, required=True, help="New folder for the merged model.")
@click.option(
    "--to",
    type=click.Choice(["hf", "workhorse"]),
    default="hf",
    show_default=True,
    help="Format of the result: a Hugging Face directory, or Workhorse's own format.",
)
@json_option
def command(*, recipe: Path, out: Path, to: str, as_json: bool) -> None:
    """Merge the models in RECIPE, a YAML file, and write the result.

    RECIPE has the keys `models` (a list of `model` and `weight`), `method` (`kind` and options),
    and for some methods `base`; see docs/merging.md.
    """
    from workhorse.config.base import read_yaml
    from workhorse.model.merge import MergeRecipe, merge

    settings = MergeRecipe.from_dict(read_yaml(recipe, "merge recipe"))
    result = merge(settings, out, to, notify=warn)  # pyright: ignore[reportArgumentType]
    text = (
        f"{result.path}: {counted(len(result.models), 'model')} merged by {result.method}, "
        f"{result.parameters:,} parameters, {result.dtype}"
    )
    print_result(result.to_dict(), as_json, text=text)
