"""`workhorse evaluate`: how well a model predicts text, or how it scores on tasks."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.loading import (
    DECODING,
    MOST_ROWS,
    Running,
    announce,
    json_option,
    model_options,
    open_model,
)
from workhorse.cli.output import counted, print_result, progress

if TYPE_CHECKING:
    from workhorse.data import Document
    from workhorse.model.model import Model

OF_TEXT = ("data", "context", "stride", "compare_gzip")
OF_TASKS = ("include_path", "fewshot", "limit", "apply_chat_template")
"""Flags that apply to only one of the two uses."""
PER_TASK = ("versions", "n-shot")


@click.command("evaluate")
@partial(model_options, kernels=(*DECODING, "flex"))
@click.option(
    "--data",
    metavar="FILE_OR_DIR",
    help="A text, .jsonl or .parquet file; a folder of texts; - for stdin; or stdlib, the held-out"
    " part of the built-in corpus.  [default: the validation split of the run]",
)
@click.option(
    "--context",
    type=int,
    help="Tokens of a window, to see how the loss depends on them; beyond the trained"
    " length, how positions extrapolate.  [default: the model's longest]",
)
@click.option(
    "--stride",
    type=int,
    help="Tokens that each window of the context predicts; with fewer, each sees more"
    " of what came before, and it takes longer.  [default: the context]",
)
@click.option(
    "--compare-gzip",
    is_flag=True,
    help="Also the figures of gzip -9 and xz -9 on the same bytes.",
)
@click.option(
    "--tasks",
    metavar="NAME,...",
    help="Score the model on tasks of the lm-evaluation-harness, which needs the extra eval:"
    " names, groups, patterns, or YAML files.",
)
@click.option(
    "--include-path",
    metavar="DIR",
    help="With --tasks: a folder of more tasks, each a YAML file.",
)
@click.option(
    "--fewshot",
    type=int,
    help="With --tasks: examples before each question.  [default: as the task says]",
)
@click.option(
    "--limit",
    type=float,
    help="With --tasks: at most this many questions of each; below 1, that share of them.",
)
@click.option(
    "--apply-chat-template",
    is_flag=True,
    help="With --tasks: put the questions through the model's chat template.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, MOST_ROWS),
    help="Windows or questions at once.  [default: by the device]",
)
@json_option
def command(
    *,
    model: str,
    running: Running,
    as_json: bool,
    batch_size: int | None,
    tasks: str | None,
    **options: Any,
) -> None:
    """Measure how well MODEL predicts text, or score it on tasks.

    MODEL is a run directory, a Hugging Face directory or hub id, a GGUF file, a folder that
    `convert` wrote, or a preset's name (random weights). On text it measures loss, perplexity and
    bits per byte, every token predicted once.
    """
    from workhorse.native.allocator import keep_freed_memory

    _check_pairs(options, tasks is not None)
    opened = partial(open_model, model, running)
    of_tasks = {name: options[name] for name in OF_TASKS}
    of_text = {name: options[name] for name in OF_TEXT}
    if tasks is not None:
        result = _score(opened, tasks.split(","), batch_size=batch_size, **of_tasks)
        print_result(result, as_json, text="" if as_json else _table(result))
    else:
        loaded = opened()
        with keep_freed_memory(loaded.decoder.device):
            result = _measure(loaded, batch_size=batch_size, **of_text)
        print_result(result, as_json, text=_page(result))
        announce(loaded)


def _check_pairs(options: Mapping[str, Any], with_tasks: bool) -> None:
    """Refuse a flag that would have no effect."""
    unread, needed = (OF_TEXT, "--data") if with_tasks else (OF_TASKS, "--tasks")
    for name in unread:
        if options[name] is not None and options[name] is not False:
            flag = f"--{name.replace('_', '-')}"
            conflict = "cannot go with --tasks" if flag == "--data" else f"belongs to {needed}"
            raise click.UsageError(f"{flag} {conflict}; leave it out")


def _measure(
    model: "Model",
    *,
    data: str | None,
    context: int | None,
    stride: int | None,
    compare_gzip: bool,
    batch_size: int | None,
) -> dict[str, Any]:
    """The figures of a text."""
    from workhorse.evaluate import compressed_bits_per_byte, evaluate

    total = sum(len(document.text.encode()) for document in _documents(model, data))
    with progress("evaluating", unit="bytes") as report:
        result: dict[str, Any] = evaluate(
            model.decoder,
            model.text,
            _documents(model, data),
            start=model.start,
            context=context,
            stride=stride,
            batch_size=batch_size,
            progress=lambda done: report(done, total),
        ).to_dict()
    if compare_gzip:
        texts = (document.text for document in _documents(model, data))
        result["compressors"] = compressed_bits_per_byte(texts)
    return result


def _score(
    opened: Callable[[], "Model"],
    names: Sequence[str],
    *,
    include_path: str | None,
    fewshot: int | None,
    limit: float | None,
    apply_chat_template: bool,
    batch_size: int | None,
) -> dict[str, Any]:
    """The harness's results; the tasks are looked up before the model is loaded."""
    from workhorse.evaluate import load_tasks

    tasks = load_tasks(names, include_path)
    from workhorse.evaluate.harness_model import HarnessModel

    loaded = opened()
    model = HarnessModel(loaded, progress=partial(progress, unit="requests"), batch_size=batch_size)
    result = tasks.run(model, limit=limit, fewshot=fewshot, chat=apply_chat_template)
    announce(loaded)
    return result


def _documents(model: "Model", data: str | None) -> Iterator["Document"]:
    """The documents that `--data` names, read from the start."""
    from workhorse.data import read_documents, source_of
    from workhorse.errors import WorkhorseError

    if data is not None:
        source = source_of(data)  # all of a file or folder, the held-out modules of the stdlib
        yield from read_documents(source, "validation" if source.has_validation else "train")
        return
    if model.data is None:
        raise WorkhorseError(f"{model.name} has no data of its own; give --data FILE_OR_DIR")
    if not any(source.has_validation for source in model.data.sources.values()):
        raise WorkhorseError(
            f"{model.name} has no validation split; give --data FILE_OR_DIR, texts to evaluate on"
        )
    for source in model.data.sources.values():
        yield from read_documents(source, "validation")


def _page(result: dict[str, Any]) -> str:
    lines = [
        f"loss            {result['loss']:.4f} nats per token",
        f"perplexity      {result['perplexity']:.2f}",
        f"bits per byte   {result['bits_per_byte']:.4f}",
    ]
    for name, bits in result.get("compressors", {}).items():
        lines.append(f"  {name} -9".ljust(16) + f"{bits:.4f}")
    lines.append(
        f"over {counted(result['tokens'], 'token')}, {counted(result['bytes'], 'byte')},"
        f" {counted(result['documents'], 'document')}"
    )
    if result["unpredicted"]:
        lines.append(
            f"nothing stands before {counted(result['unpredicted'], 'first token')}: not in the"
            " loss, and log2(vocabulary) bits each"
        )
    if result["unknown"]:
        lines.append(
            f"the tokenizer does not know {counted(result['unknown'], 'token')}, so the figures"
            " flatter it"
        )
    return "\n".join(lines)


def _table(result: Mapping[str, Any]) -> str:
    """The scores of tasks and groups, a line for each metric."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    table = Table("task", "version", "shots", "filter", "metric", "value", "± error")
    for name, scores in result["results"].items():
        first = [scores.get("alias", name), *(str(result[k].get(name, "")) for k in PER_TASK)]
        for key, value in scores.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = scores.get(f"{metric}_stderr,{chosen}")
            table.add_row(*first, chosen, metric, *map(_number, (value, error)))
            first = [""] * len(first)
    text = StringIO()
    Console(file=text, width=max(100, shutil.get_terminal_size().columns)).print(table)
    cut = result["config"]["shortened_requests"]
    if cut:
        text.write(f"the context was too short for {counted(cut, 'request')}, cut at the start\n")
    return text.getvalue().rstrip()


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else ""  # the harness has "N/A" for no error
