"""`metrics.jsonl`: the events of a run, one JSON object per line, and experiment trackers.

Every line has `kind` and `step` (steps done when it was written):

- `start`, at the beginning and at every resumption: `parameters`, `active_parameters` (that work on
  a token), `steps`, `minutes` (if `train.minutes` gave the steps), `flops_per_token` and
  `peak_flops` (a second, of the quickest matrix product in the training's type; where training is
  quicker, `peak_fraction` is of its own best), `micro_batch_size` (in use), `device`, versions,
  `settings` (of the command line, over the recipe's), `time` (seconds since 1970)
- `change`: of a setting, when the run was resumed: `setting` (its name), `before`, `now`
- `step`: `loss` (the cross-entropy, nats per token), `z_loss` and `balance_loss` (what is added to
  it, weighted, where it is), `learning_rate` (the schedule's factor times the optimizer's),
  `grad_norm`, `tokens` (predictions so far), `tokens_per_second` and `peak_fraction` (since the
  line before; `warming_up` is true where that is the session's first step alone, which waits for
  compilers; a longer first interval leaves that step out), `skipped_steps` (so far), `seconds` (in
  the training loop so far, validation and checkpoints included); of several processes
  `pass_seconds` (that each passed its rows in, a step, since the line before); of a model with
  mixtures `expert_load_max` and `expert_load_entropy`, lists of a number for each mixture: how this
  step's batch was spread (see `Balancer.figures`)
- `validation`: `loss`, `bits_per_byte` (or null; see `Validation`), `unknown_rate` (likewise),
  `tokens`, `whole` (the split, or a part)
- `samples`: `samples`, a list of `prompt` and `text`
- `checkpoint`: `path`, once it is whole
- `skipped_step`: `loss` and `grad_norm`, of which one is not finite and so null
- `back`, at the checkpoint that the run went back to: `jumped` (the step at which the loss did),
  `rows` (left out) and `message` (both in words)
- `end`: `reason`, "finished" or the signal's name, `time`, `seconds` (as of `step`, after the last
  validation) and `peak_memory` (bytes of each process;
  on a CPU all that it held, 0 where the system does not say); a session that was killed has none
"""

import importlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import open_plain, parse_json
from workhorse.files.writing import write_atomically, writing

Event = dict[str, Any]
"""One line of the file."""


class MetricsFile:
    """The metrics of one run, in its run directory.

    Args:
        path: of the file.
        step: the step after which the run continues. Later lines, and an incomplete one, were
            written by a process that died, and are dropped: their steps will be done again. So are
            changes at the step itself and returns to it, which no checkpoint holds yet.

    Raises:
        WorkhorseError: the file is not one of metrics.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        self._path = path
        self._kept = [
            line
            for line, event in _events(path)
            if event["step"] < step + (event["kind"] not in ("change", "back"))
        ]
        self._file: IO[str] | None = None

    def open(self) -> None:
        """Drop the later lines and open the file for writing; until then it is unchanged."""
        write_atomically(self._path, "".join(self._kept))
        self._file = self._path.open("a", encoding="utf-8", newline="\n")

    def write(self, event: Event) -> None:
        """Append a line."""
        assert self._file is not None, "open comes first"
        self._file.write(json.dumps({key: _finite(value) for key, value in event.items()}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        assert self._file is not None, "open comes first"
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[Event]:
    """The whole lines of a metrics file, in order."""
    return [event for _, event in _events(path)]


def _events(path: Path) -> list[tuple[str, Event]]:
    """Each whole line with its event; the last line may be incomplete.

    Raises:
        WorkhorseError: the file cannot be read, or was not written by a run.
    """
    if not path.exists():
        return []
    found = []
    with open_plain(path) as file:
        for number, raw in enumerate(file, start=1):
            if raw.endswith(b"\n"):
                found.append((raw.decode("utf-8", "replace"), _event(raw, f"{path}:{number}")))
    return found


def _event(line: bytes, where: str) -> Event:
    remedy = f"it is damaged; remove the line, or put the file back ({where.rpartition(':')[0]})"
    try:
        event = parse_json(line, where)
    except WorkhorseError as error:
        raise WorkhorseError(f"{error}; {remedy}") from None
    if not isinstance(event.get("step"), int) or not isinstance(event.get("kind"), str):
        raise WorkhorseError(f"{where} has no kind and step; {remedy}")
    return event


def _finite(value: Any) -> Any:
    """JSON has no word for infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


TrackerName = Literal["tensorboard", "wandb", "trackio"]
Tracker = Callable[[Event], None]
PACKAGES: dict[TrackerName, tuple[str, str]] = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}
"""The module to import, and the package that it belongs to."""


def check_tracker(name: TrackerName) -> None:
    """Raise WorkhorseError if the package of a tracker is not installed."""
    _module(*PACKAGES[name])


def open_tracker(name: TrackerName, run: str, config: dict[str, Any], folder: Path) -> Tracker:
    """A function that takes events.

    Args:
        name: of the service.
        run: name of the run.
        config: the recipe.
        folder: the run directory; TensorBoard's files go to `tensorboard/` in it.

    Raises:
        WorkhorseError: its package is not installed.
    """
    if name == "tensorboard":
        return _tensorboard(folder)
    module = _module(*PACKAGES[name])
    # Both take these calls; trackio's are modelled on wandb's.
    place = {"dir": str(folder)} if name == "wandb" else {}
    module.init(project="workhorse", name=run, config=config, **place)

    def track(event: Event) -> None:
        values = scalars(event)
        if values:
            module.log(values, step=event["step"])
        if event["kind"] == "end":
            module.finish()

    return track


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event, named `KIND/NAME`, and `KIND/NAME/0` … those of a list."""
    if event["kind"] not in ("step", "validation"):
        return {}
    kind = "train" if event["kind"] == "step" else "validation"
    found: dict[str, float] = {}
    for key, value in event.items():
        if isinstance(value, list):
            found |= {f"{kind}/{key}/{place}": number for place, number in enumerate(value)}
        elif key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{kind}/{key}"] = value
    return found


def _tensorboard(folder: Path) -> Tracker:
    writer = _module(*PACKAGES["tensorboard"]).SummaryWriter(folder / "tensorboard")

    def track(event: Event) -> None:
        for tag, value in scalars(event).items():
            writer.add_scalar(tag, value, event["step"])
        for index, sample in enumerate(event.get("samples", ())):
            writer.add_text(f"sample/{index}", sample["prompt"] + sample["text"], event["step"])
        if event["kind"] == "end":
            writer.close()

    return track


def _module(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise WorkhorseError(
            f"the tracker {package} is not installed; pip install {package}, "
            "or take it out of train.trackers"
        ) from None
