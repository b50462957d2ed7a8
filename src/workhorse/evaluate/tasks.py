"""Tasks of EleutherAI's lm-evaluation-harness: found by name, checked, loaded and run.

Importing the harness and indexing its tasks takes tens of seconds. Names are therefore first
searched in its files, which takes two seconds.

The harness's parsers of YAML and JSON are recursive C code, which crashes the process on deeply
nested input or on a file that is not a task. Task files are therefore checked first.

The harness is an optional package and slow to import, so it is imported inside functions.
"""

import difflib
import logging
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy
import torch

from workhorse.errors import WorkhorseError, shown, to_install
from workhorse.files.text_formats import parse_yaml, read_text

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from workhorse.evaluate.harness_model import HarnessModel

NAMED = re.compile(r"^\s*(?:task|group|tag)\s*:\s*[\"']?([\w.-]+)", re.MULTILINE)
PATTERN = frozenset("*?[")
LISTED = 3
"""Maximum number of similar names that an error suggests."""
MOST = 2**31
"""A number of documents that no task has."""


def check_names(names: Sequence[str], include_path: str | Path | None = None) -> None:
    """Raise an error for a name that occurs in no task file.

    This check is fast but incomplete: a name that occurs in a task file need not be a task. If the
    harness is not installed, nothing is checked.

    Args:
        names: names of tasks. Patterns and YAML files are not checked here.
        include_path: a folder of additional tasks.

    Raises:
        WorkhorseError: a name is unknown; the message suggests similar names.
    """
    harness = find_spec("lm_eval")
    if harness is None or harness.origin is None:
        return
    folders = [Path(include_path)] if include_path is not None else []
    folders.append(Path(harness.origin).parent / "tasks")
    missing = {name for name in names if not PATTERN & set(name) and not is_file(name)}
    known: set[str] = set()
    for text in _contents(folders):
        missing = {name for name in missing if name not in text}
        if not missing:
            return
        known.update(NAMED.findall(text))
    for name in names:
        if name in missing:
            raise unknown(name, known)


def is_file(name: str) -> bool:
    """Return True if a name is the path of a YAML file."""
    return Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def unknown(name: str, known: Iterable[str]) -> WorkhorseError:
    """Return the error for an unknown task; it suggests tasks with similar names."""
    near = difflib.get_close_matches(name, sorted(known), n=LISTED, cutoff=0.6)
    remedy = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else "lm-eval ls tasks lists them"
    )
    return WorkhorseError(f"there is no task {shown(name)}; {remedy}")


def _contents(folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        for file in folder.rglob("*.y*ml"):
            yield file.read_text("utf-8", errors="replace")


LARGEST = 1 << 20
"""Maximum size of a task file, in bytes."""
SOURCES = ("dataset_path", "include", "class", "custom_dataset")
"""Keys for the source of a task's questions; a task needs at least one."""


def check_file(path: Path) -> None:
    """Check that a YAML file is a task and that its local JSON files contain objects.

    Raises:
        WorkhorseError: the file or one of its data files is invalid.
    """
    # The tag !function names a Python function of the task. It is removed, not called.
    text = read_text(path, limit=LARGEST).replace("!function ", "")
    try:
        task = parse_yaml(text)
    except WorkhorseError as error:
        raise WorkhorseError(f"{path}: {error}") from None
    if not isinstance(task, dict) or not (task.get("task") or task.get("group")):
        raise WorkhorseError(f"{path} is not a task; write a mapping with task: or group: NAME")
    if "group" not in task and not any(task.get(key) for key in SOURCES):
        raise WorkhorseError(f"{path} has no dataset_path; set it to the source of the questions")
    for name in _texts(task.get("dataset_kwargs")):
        if name.endswith((".json", ".jsonl")) and Path(name).is_file():
            _check_questions(Path(name))


def _check_questions(path: Path) -> None:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.lstrip().startswith(b"["):
                return  # a JSON list of objects
            if line.strip() and not line.lstrip().startswith(b"{"):
                start = shown(line[:40].decode(errors="replace"))
                raise WorkhorseError(
                    f"{path}:{number} is not a JSON object but {start}; write one object per line"
                )


def _texts(value: Any) -> Iterator[str]:
    """Yield every string in nested lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


SEEDS = {"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234}
"""The harness's default seeds, which give the same shuffled data and few-shot examples."""
QUIET = ("lm_eval", "datasets", "huggingface_hub")
"""Packages whose log messages during the loading of tasks are suppressed, except errors."""


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks and their data.

    Attributes:
        loaded: a mapping with the keys `tasks`, `groups` and `group_map`, as the harness loads it.
    """

    loaded: Mapping[str, Any]

    def run(
        self,
        model: "HarnessModel",
        *,
        limit: float | None = None,
        fewshot: int | None = None,
        chat: bool = False,
        samples: bool = False,
    ) -> dict[str, Any]:
        """Score a model on the tasks. Call it only once, because it changes the loaded tasks.

        Args:
            model: the model to score.
            limit: the maximum number of documents of each task; below 1, a fraction of all.
            fewshot: the number of examples before each question; by default the task's own number.
                A task whose own number is 0 always gets 0.
            chat: True to format questions with the model's chat template.
            samples: True to include every document with its requests and completions.

        Returns:
            The harness's results: `results` by task and metric, `versions`, `n-shot`, `configs` …;
            `config` contains the model and the settings.

        Raises:
            WorkhorseError: as in `HarnessModel`, or `limit` is not positive, `fewshot` is negative,
                or a task has fewer examples than `fewshot`.
        """
        from lm_eval.evaluator import evaluate

        if limit is not None and limit <= 0:
            raise WorkhorseError(f"limit={limit:g} is not positive; choose more than 0")
        if fewshot is not None and fewshot < 0:
            raise WorkhorseError(f"fewshot={fewshot} is negative; choose 0 or more examples")
        if chat:
            model.check_chat()
        for task in self.loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            examples = (own or 0) if fewshot is None or own == 0 else fewshot
            _check_examples(task, examples)
            task.set_config("num_fewshot", examples)
            task.set_fewshot_seed(SEEDS["fewshot_seed"])
        with _quiet():
            found: Any = evaluate(
                model,
                cast(Any, self.loaded),
                # Annotated as int, but fractions are supported. Above MOST, `islice` fails.
                limit=cast(Any, None if limit is None else min(limit, MOST)),
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                log_samples=samples,
            )
        asked = {"limit": limit, "batch_size": model.batch_size, "chat": chat, **SEEDS}
        return {**found, "config": {**model.get_model_info(), **asked}}


def load_tasks(names: Sequence[str], include_path: str | Path | None = None) -> Tasks:
    """Find tasks by name and load their data.

    Some tasks shuffle data when they are loaded, so this function seeds the random generators of
    Python, numpy and torch as the harness does.

    Args:
        names: tasks, groups or tags of the harness or of `include_path`; patterns such as
            `mmlu_*`; or YAML files of tasks.
        include_path: a folder of additional tasks. They override tasks of the harness with the same
            name.

    Raises:
        WorkhorseError: the harness is not installed, a name is unknown, or a task cannot be loaded,
            for example because its data cannot be fetched.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise WorkhorseError(f"{include_path} is not a folder; give one with YAML files of tasks")
    check_names(names, include_path)
    for name in filter(is_file, names):
        check_file(Path(name))
    _check_installed()
    random.seed(SEEDS["random_seed"])
    numpy.random.seed(SEEDS["numpy_seed"])
    torch.manual_seed(SEEDS["torch_seed"])
    with _quiet():
        manager = _manager(names, include_path)
        found = [one for name in names for one in _matching(manager, name)]
        parts = [_load(manager, name) for name in dict.fromkeys(found)]
    kinds = ("tasks", "groups", "group_map")
    return Tasks({kind: {k: v for part in parts for k, v in part[kind].items()} for kind in kinds})


def _check_installed() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise WorkhorseError(
            f"tasks need the package lm-eval ({error}); {to_install('eval')}"
        ) from None


def _manager(names: Sequence[str], include_path: str | Path | None) -> "TaskManager":
    """Index tasks; only those in `include_path` if it has all of `names`, which is faster."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own
    return TaskManager(include_path=include_path)


def _matching(manager: "TaskManager", name: str) -> list[str]:
    if is_file(name):
        return [name]
    found = manager.match_tasks([name])
    if not found:
        raise unknown(name, manager.all_tasks)
    return found


def _load(manager: "TaskManager", name: str) -> Mapping[str, Any]:
    """Load the tasks and groups of one name."""
    try:
        found: Mapping[str, Any] = manager.load([name])
    except ConnectionError as error:
        raise WorkhorseError(
            f"task {name!r} needs data that is not on this machine: {_line(error)}; connect to the "
            "network, or give a task from local files with --include-path"
        ) from None
    except Exception as error:  # a task is a program and can raise anything
        raise WorkhorseError(
            f"task {name!r} cannot be loaded: {_line(error)}; correct the task"
        ) from None
    for task in found["tasks"].values():
        _check(task)
    return found


def _check(task: Any) -> None:
    """Raise a short error for tasks that the harness would reject later."""
    name = task.config.task
    if getattr(task, "UNSAFE_CODE", False):
        raise WorkhorseError(
            f"task {name!r} runs code that the model wrote; in a sandbox, call lm_eval's "
            "simple_evaluate with a HarnessModel and confirm_run_unsafe_code=True"
        )
    if getattr(task, "MULTIMODAL", False):
        raise WorkhorseError(f"task {name!r} is multimodal; choose a text-only task")


def _check_examples(task: Any, count: int) -> None:
    """Check that the task has enough examples in addition to the question."""
    beside = task.fewshot_cfg.split == task.config.test_split
    question = next(iter(task.eval_docs), None) if beside else None
    try:
        task.sampler.sample(count, eval_doc=question)
    except (ValueError, AssertionError):
        raise WorkhorseError(
            f"task {task.config.task!r} has fewer than {count} examples to put before a question; "
            "lower fewshot"
        ) from None


def _line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it or its data are nested too deeply"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars, and log messages of the packages in `QUIET` except errors.

    `datasets` also stops reporting its use to the Hugging Face hub, which it does even for local
    files.
    """
    import datasets.config

    shows_bars = not datasets.are_progress_bars_disabled()
    reports = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    loggers = [logging.getLogger(name) for name in QUIET]
    levels = [logger.level for logger in loggers]
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = reports
        if shows_bars:
            datasets.enable_progress_bars()
