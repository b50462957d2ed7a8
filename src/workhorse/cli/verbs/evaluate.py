"""`workhorse evaluate`: measure a model's loss on text, or score it on tasks or questions."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
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
from workhorse.cli.output import for_terminal, print_result, progress, warn
from workhorse.errors import WorkhorseError, counted

if TYPE_CHECKING:
    from workhorse.data import Document, SourceConfig
    from workhorse.model.model import Model

OF_TEXT = ("data", "context", "stride", "compare_gzip")
"""Flags that apply to the loss on text, without `--tasks` and `--reward`."""
OF_TASKS = ("include_path", "fewshot", "limit", "apply_chat_template")
"""Flags that apply with `--tasks`."""
OF_REWARD = ("data", "limit", "beside")
"""Flags that apply with `--reward`."""
SHOWN_QUESTIONS = 3
"""Number of questions whose answers are printed below the scores."""
SHOWN_CHARS = 160
"""Maximum number of characters of such an answer."""
PER_TASK = ("versions", "n-shot")
"""Keys of the lm-evaluation-harness's result with one value per task, shown in the table."""


@click.command("evaluate")
@partial(model_options, kernels=(*DECODING, "flex"))
@click.option(
    "--data",
    metavar="FILE_OR_DIR",
    help="A text, .jsonl or .parquet file; a folder of text files; - for stdin; or stdlib, the"
    " held-out split of the built-in corpus. With --reward: conversations, or stdlib."
    "  [default: the validation split of the run]",
)
@click.option(
    "--context",
    type=int,
    help="Tokens per window. More than the trained length measures length extrapolation."
    "  [default: the model's maximum]",
)
@click.option(
    "--stride",
    type=int,
    help="Tokens predicted per window. With a smaller stride each token has more context, and"
    " evaluation takes longer.  [default: the context]",
)
@click.option(
    "--compare-gzip",
    is_flag=True,
    help="Also show the bits per byte of gzip -9 and xz -9 on the same text.",
)
@click.option(
    "--tasks",
    metavar="NAME,...",
    help="Score the model on tasks of the lm-evaluation-harness (needs the extra eval): names,"
    " groups, patterns, or YAML files.",
)
@click.option(
    "--include-path",
    metavar="DIR",
    help="With --tasks: a folder of additional tasks, each a YAML file.",
)
@click.option(
    "--fewshot",
    type=int,
    help="With --tasks: number of examples before each question.  [default: the task's own]",
)
@click.option(
    "--limit",
    type=float,
    help="With --tasks or --reward: maximum number of questions; below 1: the fraction to ask.",
)
@click.option(
    "--apply-chat-template",
    is_flag=True,
    help="With --tasks: format the questions with the model's chat template.",
)
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="FILE.py[:FUNCTION]",
    help="Score answers to questions with a Python function of prompts, completions and known"
    " answers. Repeatable.  [default function: reward]",
)
@click.option(
    "--beside",
    multiple=True,
    metavar="MODEL",
    help="With --reward: another model that answers the same questions, without --adapter."
    " Repeatable.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, MOST_ROWS),
    help="Windows or questions per batch.  [default: depends on the device]",
)
@json_option
def command(
    *,
    model: str,
    running: Running,
    as_json: bool,
    batch_size: int | None,
    tasks: str | None,
    rewards: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure the loss of MODEL on text, or score it on tasks or on questions.

    MODEL is a run directory, a Hugging Face directory or hub id, a GGUF file, a folder that
    `convert` wrote, or a preset's name (random weights). Text gives loss, perplexity and bits per
    byte; every token is predicted once.
    """
    from workhorse.native.allocator import keep_freed_memory

    if tasks is not None and rewards:
        raise click.UsageError("--reward conflicts with --tasks; remove it")
    _check_flags(options, "--tasks" if tasks is not None else "--reward" if rewards else "--data")
    opened = partial(open_model, model, running)
    of_tasks, of_text, of_reward = (
        {name: options[name] for name in names} for names in (OF_TASKS, OF_TEXT, OF_REWARD)
    )
    if tasks is not None:
        result = _score(opened, tasks.split(","), batch_size=batch_size, **of_tasks)
        print_result(result, as_json, text="" if as_json else _table(result))
    elif rewards:
        result = _answers(model, running, rewards, batch_size=batch_size, **of_reward)
        print_result(result, as_json, text="" if as_json else _answers_page(result))
    else:
        loaded = opened()
        with keep_freed_memory(loaded.decoder.device):
            result = _measure(loaded, batch_size=batch_size, **of_text)
        print_result(result, as_json, text=_page(result))
        announce(loaded)


def _check_flags(options: Mapping[str, Any], mode: str) -> None:
    """Raise an error for a flag that has no effect with `mode`, a key of `flags_of`."""
    flags_of = {"--data": OF_TEXT, "--tasks": OF_TASKS, "--reward": OF_REWARD}
    for name, value in options.items():
        is_given = value not in (None, ()) and value is not False  # 0 is given, too
        if name not in flags_of[mode] and is_given:
            flag = f"--{name.replace('_', '-')}"
            needed = " or ".join(other for other, names in flags_of.items() if name in names)
            conflict = f"conflicts with {mode}" if flag == "--data" else f"only applies to {needed}"
            raise click.UsageError(f"{flag} {conflict}; remove it")


def _measure(
    model: "Model",
    *,
    data: str | None,
    context: int | None,
    stride: int | None,
    compare_gzip: bool,
    batch_size: int | None,
) -> dict[str, Any]:
    """Measure a model's loss on text, and return the result of the verb."""
    from workhorse.evaluate import compressed_bits_per_byte, evaluate

    if data is None and model.data is not None and model.data.has_conversations:
        warn(
            "the loss counts all tokens of the conversations; validation in training counts only "
            "the learned ones, and --reward scores answers"
        )
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
    """Score a model on tasks of the lm-evaluation-harness, and return the harness's result.

    The names of the tasks are checked before `opened` loads the model.
    """
    from workhorse.evaluate import load_tasks

    tasks = load_tasks(names, include_path)
    from workhorse.evaluate.harness_model import HarnessModel

    loaded = opened()
    model = HarnessModel(loaded, progress=partial(progress, unit="requests"), batch_size=batch_size)
    result = tasks.run(model, limit=limit, fewshot=fewshot, chat=apply_chat_template)
    announce(loaded)
    return result


def _answers(
    name: str,
    running: Running,
    rewards: Sequence[str],
    *,
    data: str | None,
    limit: float | None,
    beside: Sequence[str],
    batch_size: int | None,
) -> dict[str, Any]:
    """Let models answer the same questions, and return scores and answers by model.

    The questions are those of the first model if `data` is None.
    """
    from workhorse.evaluate.answers import answer_questions, fractions, questions_of
    from workhorse.train.rewards import PythonReward, PythonRewardConfig

    title = f"{name} + {running.adapter}" if running.adapter else name
    models = {title: (name, running)}
    for other in beside:
        models.setdefault(other, (other, replace(running, adapter=None)))
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        scores = {}
        for reward in rewards:
            path, _, function = reward.partition(":")
            config = PythonRewardConfig(path=Path(path), function=function or "reward")
            scores[reward] = stack.enter_context(closing(PythonReward(config)))
            scores[reward].check()  # before a model is loaded and answers
        questions = None
        for model_title, (path, how) in models.items():
            model = open_model(path, how)
            questions = questions or questions_of(_documents(model, data, _conversations), limit)
            answers = answer_questions(model, questions, scores, batch_size=batch_size or 32)
            result[model_title] = {"scores": fractions(answers), "answers": [*map(asdict, answers)]}
            announce(model)
    return result


def _conversations(name: str) -> "SourceConfig":
    """Return the config for conversations given on the command line: a file, or `stdlib`."""
    from workhorse.data.config import ConversationsConfig

    source = ConversationsConfig(path=Path(name))
    return source if source.of_stdlib else source.replace(validation_fraction=0)


def _documents(
    model: "Model", data: str | None, of_name: "Callable[[str], SourceConfig] | None" = None
) -> Iterator["Document"]:
    """Yield the documents of `--data`, or of the run's validation split if it is not given.

    Each call starts with the first document. `of_name` makes the source of `--data`; None: as text.
    """
    from workhorse.data import read_documents, source_of

    if data is not None:
        # A file or folder in full, or the held-out part of the standard library.
        source = (of_name or source_of)(data)
        yield from read_documents(source, "validation" if source.has_validation else "train")
        return
    if model.data is None:
        raise WorkhorseError(f"{model.name} is not a run that has data; give --data FILE_OR_DIR")
    if not any(source.has_validation for source in model.data.sources.values()):
        raise WorkhorseError(
            f"{model.name} has no validation split; give the text with --data FILE_OR_DIR"
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
            f"{counted(result['unpredicted'], 'first token')} without context: not in the loss,"
            " and counted as log2(vocabulary) bits each"
        )
    if result["unknown"]:
        lines.append(
            f"{counted(result['unknown'], 'unknown token')}: the tokenizer does not know the"
            " characters, so the figures are too low"
        )
    return "\n".join(lines)


def _answers_page(result: Mapping[str, Any]) -> str:
    """Format the scores of each model as a line, then their first answers side by side."""
    width = max(map(len, result))
    lines = [
        f"{name:{width}}"
        + "".join(
            f"  {key.rpartition(':')[-1]} {score:.3f}" for key, score in model["scores"].items()
        )
        for name, model in result.items()
    ]
    answers = {name: model["answers"] for name, model in result.items()}
    for row, first in enumerate(next(iter(answers.values()))[:SHOWN_QUESTIONS]):
        lines += ["", f"{first['question']['text']} {first['question']['known']}"]
        for name in answers:
            lines.append(f"{name:{width}}  {shorten(answers[name][row]['text'], SHOWN_CHARS)}")
    return "\n".join(map(for_terminal, lines))


def _table(result: Mapping[str, Any]) -> str:
    """Format the harness's scores of tasks and groups as a table, with one line per metric."""
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
        text.write(f"{counted(cut, 'request')} longer than the context, cut at the start\n")
    return text.getvalue().rstrip()


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else ""  # the harness writes "N/A" if unknown
