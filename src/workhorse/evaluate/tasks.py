"""Tasks of EleutherAI's lm-evaluation-harness: found by name, checked, loaded and run.

Importing the harness and indexing its tasks takes tens of seconds; finding that a name is in none
of its files takes two.

The harness's parsers of YAML and JSON are recursive C code, which crashes the process on deeply
nested input or on a file that is not a task.

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
"""Most near names that an error suggests."""


def check_names(names: Sequence[str], include_path: str | Path | None = None) -> None:
    """Refuse a name that is in no file of tasks; one that is may still not be a task.

    Without the harness nothing is refused.

    Args:
        names: names of tasks; patterns and YAML files among them are left to the harness.
        include_path: a folder of more tasks.

    Raises:
        WorkhorseError: there is such a name; the error suggests the nearest ones.
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
    """Whether a name is that of a YAML file."""
    return Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def unknown(name: str, known: Iterable[str]) -> WorkhorseError:
    """The error for an unknown name: of thousands of tasks, it suggests those of a similar name."""
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
"""Most bytes of a file that describes a task."""
SOURCES = ("dataset_path", "include", "class", "custom_dataset")
"""Keys that say where a task's questions come from; it has one of them."""


def check_file(path: Path) -> None:
    """Refuse a file that is not a task, or whose local questions are not JSON objects.

    Raises:
        WorkhorseError: says what is wrong and where.
    """
    # A function of the task's author is named by a tag; nothing is called here.
    text = read_text(path, limit=LARGEST).replace("!function ", "")
    try:
        task = parse_yaml(text)
    except WorkhorseError as error:
        raise WorkhorseError(f"{path}: {error}") from None
    if not isinstance(task, dict) or not (task.get("task") or task.get("group")):
        raise WorkhorseError(f"{path} is not a task; write a mapping with task: or group: NAME")
    if "group" not in task and not any(task.get(key) for key in SOURCES):
        raise WorkhorseError(f"{path} has no dataset_path; say where the questions are")
    for name in _texts(task.get("dataset_kwargs")):
        if name.endswith((".json", ".jsonl")) and Path(name).is_file():
            _check_questions(Path(name))


def _check_questions(path: Path) -> None:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.lstrip().startswith(b"["):
                return  # a list of them
            if line.strip() and not line.lstrip().startswith(b"{"):
                start = shown(line[:40].decode(errors="replace"))
                raise WorkhorseError(f"{path}:{number} is not a JSON object but {start}; fix it")


def _texts(value: Any) -> Iterator[str]:
    """Every string in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


SEEDS = {"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234}
"""The harness's own seeds, for the same shuffles and examples."""
QUIET = ("lm_eval", "datasets", "huggingface_hub")
"""Packages that log much while loading tasks, of no use to whoever asked for a score."""


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks and their data: `tasks`, `groups` and `group_map`, as in the harness."""

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
        """Score a model on the tasks, once.

        Args:
            model: the model that answers.
            limit: most documents of each task; below 1, a share of them.
            fewshot: examples before each question, unless the task insists on none; the task's own
                number by default.
            chat: put questions through the model's chat template.
            samples: keep every document with its requests and answers.

        Returns:
            The harness's results: `results` by task and metric, `versions`, `n-shot`, `configs` …;
            and in `config` the model and the settings.

        Raises:
            WorkhorseError: as `HarnessModel`; a `limit` or `fewshot` below 0; or more examples than
                a task has.
        """
        from lm_eval.evaluator import evaluate

        if limit is not None and limit <= 0:
            raise WorkhorseError(f"limit={limit:g} leaves nothing; choose more than 0")
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
                limit=cast(Any, limit),  # declared as whole, though shares are read
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                log_samples=samples,
            )
        asked = {"limit": limit, "batch_size": model.batch_size, "chat": chat, **SEEDS}
        return {**found, "config": {**model.get_model_info(), **asked}}


def load_tasks(names: Sequence[str], include_path: str | Path | None = None) -> Tasks:
    """Find tasks by name and load their data.

    Some tasks shuffle when they are loaded, so the generators of Python, numpy and torch are seeded
    here, as the harness seeds them.

    Args:
        names: tasks, groups or tags of the harness or of the folder; patterns such as `mmlu_*`; or
            YAML files of tasks.
        include_path: a folder of more tasks, which come before the harness's of the same name.

    Raises:
        WorkhorseError: the harness is not installed, a name is unknown, or a task cannot be loaded,
            for example because its data cannot be fetched.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise WorkhorseError(f"{include_path} is not a folder; give one that holds YAML tasks")
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
    """The index of tasks; of the folder alone if that has them, because the harness's is long."""
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
    """The tasks and groups of one name, as the harness gives them."""
    try:
        found: Mapping[str, Any] = manager.load([name])
    except ConnectionError as error:
        raise WorkhorseError(
            f"task {name!r} needs data that is not on this machine: {_line(error)}; connect to the "
            "network, or give a task from local files with --include-path"
        ) from None
    except Exception as error:  # a task is a program: whatever it raises is its author's to mend
        raise WorkhorseError(
            f"task {name!r} cannot be loaded: {_line(error)}; correct the task"
        ) from None
    for task in found["tasks"].values():
        _check(task)
    return found


def _check(task: Any) -> None:
    """Refuse tasks that the harness would refuse later and at greater length."""
    name = task.config.task
    if getattr(task, "UNSAFE_CODE", False):
        raise WorkhorseError(
            f"task {name!r} runs code that the model wrote; in a sandbox, give lm_eval's "
            "simple_evaluate a HarnessModel and confirm_run_unsafe_code=True"
        )
    if getattr(task, "MULTIMODAL", False):
        raise WorkhorseError(f"task {name!r} has more than text; choose one of text alone")


def _check_examples(task: Any, count: int) -> None:
    """Refuse more examples before a question than the task has beside it."""
    beside = task.fewshot_cfg.split == task.config.test_split
    question = next(iter(task.eval_docs), None) if beside else None
    try:
        task.sampler.sample(count, eval_doc=question)
    except (ValueError, AssertionError):
        raise WorkhorseError(
            f"task {task.config.task!r} has fewer than {count} examples to put before a question; "
            "choose a smaller number (fewshot)"
        ) from None


def _line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it or its data are nested too deeply"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences packages that log much, but for errors, and progress bars of short work.

    It also keeps `datasets` from reporting its use to the hub, which it does even for local files.
    """
    import datasets.config

    shows_bars = not datasets.are_progress_bars_disabled()
    tells = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
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
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = tells
        if shows_bars:
            datasets.enable_progress_bars()
