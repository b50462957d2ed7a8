"""`workhorse data`: prepare a recipe's data, or inspect its training rows."""

import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.loading import PATH, json_option, recipe_of_run
from workhorse.cli.output import aligned, for_terminal, print_result, progress, warn

if TYPE_CHECKING:
    from workhorse.data import Batch, Dataset, RowView
    from workhorse.tokenizers import Tokenizer
    from workhorse.train import Recipe

out_option = click.option(
    "--out",
    type=PATH,
    help="Run directory that stores the data, unless the recipe sets data.cache_dir."
    "  [default: runs/NAME]",
)


@click.group("data")
def command() -> None:
    """Prepare a recipe's data, or inspect its training rows."""


@command.command("prepare")
@click.argument("recipe", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[section.key=value ...]")
@out_option
@json_option
def prepare_command(
    recipe: Path, overrides: tuple[str, ...], out: Path | None, as_json: bool
) -> None:
    """Train RECIPE's tokenizer and write its token shards; reuse existing ones.

    RECIPE is a YAML file, or a run directory to use its recipe and data. `train` uses the prepared
    data. An interrupted preparation resumes where it stopped.
    """
    from workhorse.data import describe

    _, _, dataset = _prepared(recipe, overrides, out)
    result = describe(dataset)
    print_result(result, as_json, text=_counts(result))


@command.command("inspect")
@click.argument("recipe", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[section.key=value ...]")
@out_option
@click.option(
    "--split",
    type=click.Choice(["train", "validation"]),
    default="train",
    show_default=True,
    help="Split to show.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Training step, or validation batch, to show.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Number of rows to show.",
)
@json_option
def inspect_command(
    *,
    recipe: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    split: str,
    step: int,
    rows: int,
    as_json: bool,
) -> None:
    """Show the training data of RECIPE: counts, then decoded rows.

    For conversations, the bytes do not include the chat template.

    RECIPE is a YAML file, or a run directory to use its recipe and data. If the data is not
    prepared yet, `data prepare` runs first: the tokenizer is trained, and the tokenizer and the
    tokens are written into the run directory.
    """
    from workhorse.data import Batches, describe, view_rows

    settings, tokenizer, dataset = _prepared(recipe, overrides, out)
    sizes = {
        "seq_len": settings.train.seq_len,
        "batch_size": settings.train.batch_size,
        "packing": settings.data.packing,
        "too_long": settings.data.too_long,
    }
    training = Batches(dataset.train, **sizes, seed=settings.train.seed)
    batch = training[step] if split == "train" else _validation_batch(dataset, step, sizes)
    views = view_rows(batch, tokenizer, training.source_names)[:rows]
    result: dict[str, Any] = {
        **describe(dataset),
        **sizes,
        "rows_per_epoch": training.rows_per_epoch,
        "split": split,
        "step": step,
        "rows": [asdict(view) for view in views],
    }
    print_result(result, as_json, text=f"{_counts(result)}\n\n{_page(result, views)}")


def _prepared(
    path: Path, overrides: tuple[str, ...], out: Path | None
) -> "tuple[Recipe, Tokenizer, Dataset]":
    from workhorse.checkpoints import RunDirectory
    from workhorse.data import prepare, prepare_tokenizer
    from workhorse.train import Recipe, override_recipe, with_init
    from workhorse.train.recipe.depth import read_recipe

    if path.is_dir():
        path, out = recipe_of_run(path), out or path
    recipe = Recipe.from_dict(with_init(override_recipe(read_recipe(path), overrides, warn)))
    folder = RunDirectory(out or Path("runs") / recipe.name).data_folder
    with progress("training the tokenizer", unit="bytes") as report:
        tokenizer = prepare_tokenizer(
            recipe.tokenizer, recipe.data, folder, progress=report, notify=warn
        )
    with progress("preparing data", unit="bytes") as report:
        dataset = prepare(recipe.data, tokenizer, folder, progress=report, notify=warn)
    return recipe, tokenizer, dataset


def _validation_batch(dataset: "Dataset", index: int, sizes: dict[str, Any]) -> "Batch":
    from workhorse.data import ValidationBatches
    from workhorse.errors import WorkhorseError

    if dataset.validation is None:
        raise WorkhorseError("the recipe's data has no validation split; show --split train")
    batches = ValidationBatches(dataset.validation, **sizes)
    if index >= len(batches):
        raise WorkhorseError(
            f"--step {index} is past the last validation batch; choose 0 to {len(batches) - 1}"
        )
    return batches[index]


def _counts(result: dict[str, Any]) -> str:
    """Format the counts of documents, bytes and tokens of each split and source as a table."""
    table: list[tuple[str, ...]] = [
        ("", "documents", "bytes", "tokens", "bytes/token", "unknown", "weight")
    ]
    for split, sources in result["splits"].items():
        for source, counts in sources.items():
            cells = (f"{counts[key]:,}" for key in ("documents", "bytes", "tokens"))
            weight = f"{counts['weight']:g}" if split == "train" else ""
            ratio = f"{counts['bytes_per_token']:.2f}"
            unknown = f"{counts['unknown']:,}"
            table.append((f"{split} {source}", *cells, ratio, unknown, weight))
    kept = f"{result['folder']} ({result['dtype']}, vocabulary of {result['vocab_size']:,})"
    return "\n".join([*aligned(table), f"in {kept}"])


def _page(result: dict[str, Any], views: tuple["RowView", ...]) -> str:
    epochs = ", ".join(f"{source} {rows:,}" for source, rows in result["rows_per_epoch"].items())
    lines = [
        f"packing {result['packing']}: rows of {result['seq_len']} tokens, "
        f"{result['batch_size']} per step; rows per epoch: {epochs}",
    ]
    for row, view in enumerate(views):
        notes = f"{view.padding} padding, {view.ignored} without a target"
        where = f"{result['split']} step {result['step']} row {row}"
        kind = f"{view.source}, {view.answer}" if view.answer else view.source
        lines += ["", f"── {where}: {kind}, {notes}"]
        for segment in view.segments:
            document = "" if segment.document is None else f"document {segment.document}, "
            lines.append(f"   [{document}{segment.tokens} tokens]")
            if segment.pieces is None:
                lines.append(f"{segment.text}⟶{segment.last_target!r}")
            else:
                lines.append(_learned(segment.pieces))
    return "\n".join(lines)


def _learned(pieces: tuple[tuple[str, float], ...]) -> str:
    """Show the tokens that are learned: green in a terminal, between ⟦ and ⟧ in a pipe or file.

    Weights other than 0 and 1 are printed after their tokens.
    """
    spans = []
    for weight, group in groupby(pieces, key=lambda piece: piece[1]):
        text = for_terminal("".join(piece for piece, _ in group))
        if not weight:
            spans.append(text)
            continue
        text = text if weight == 1 else f"{text}×{weight:g}"
        styled = click.style(text, fg="green", bold=True)
        spans.append(styled if sys.stdout.isatty() else f"⟦{text}⟧")
    return "".join(spans)
