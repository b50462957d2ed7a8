"""`metrics.jsonl`: the events of a run, one JSON object per line, and experiment trackers.

Every line has `kind` and `step` (the number of steps done when the line was written). The kinds:

- `start`, at the start and at every resumption: `parameters` and `active_parameters` (per token)
  without an adapter, `trained_parameters` with one, `steps`, `minutes` (if `train.minutes` gave the
  steps), `flops_per_token`, `peak_flops` (per second, of the fastest matmul in the dtype of
  training), `micro_batch_size` (in use), `device`, versions, `settings` (overrides of the command
  line), `time` (seconds since 1970)
- `change`, for a setting that changed when the run was resumed: `setting` (its name), `before`,
  `now`
- `step`:
  - `loss` (the cross-entropy, nats per token), `z_loss` and `balance_loss` (the weighted losses
    added to it, if there are any), `grad_norm`
  - `learning_rate` (the schedule's factor times the optimizer's rate), with Muon also
    `adamw.learning_rate`
  - `tokens` (predictions so far), `skipped_steps` (so far), `seconds` (in the training loop so far,
    including validation and checkpoints)
  - `tokens_per_second` and `peak_fraction`, both since the previous line. The peak is `peak_flops`,
    or the best rate of training itself if that is higher. `warming_up` is true if the interval is
    only the session's first step, which waits for compilers; a longer first interval does not
    include that step.
  - with several processes `pass_seconds`: for each rank, its seconds in passes per step, since the
    previous line
  - `memory` (peak bytes of rank 0), and means of objective and rollouts; see docs/finetuning.md
  - for a model with mixtures `expert_load_max` and `expert_load_entropy`: lists with one value per
    mixture, the balance of this step's batch (see `Balancer.figures`)
- `validation`: `loss`, `bits_per_byte` (null if the number of bytes is not known) and
  `unknown_rate` (see `Validation`), `tokens`, `whole` (true for the whole split, false for a
  subset), and means of the objective
- `samples`, `rollouts`: a list of `prompt` and `text`, in rollouts also `reward` and `answer`
- `checkpoint`: `path`, once the checkpoint is complete
- `skipped_step`: `loss` and `grad_norm`; at least one is not finite and therefore null
- `back`, at the checkpoint that the run returned to after a loss spike: `jumped` (the step of the
  spike), `rows` (number of skipped rows), `message` (the same in words)
- `end`: `reason` ("finished" or the name of a signal), `time`, `tokens` and `seconds` (as in
  `step`, after the last validation), `peak_memory` (bytes of each process; on a CPU its whole
  memory, 0 if the system does not report it). A session that was killed has no such event.
"""

import importlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, Field, InstanceOf, TypeAdapter, ValidationError

from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import open_plain, parse_json
from workhorse.files.writing import write_atomically, writing

Event = dict[str, Any]
"""One line of `metrics.jsonl`."""
Listener = Callable[[Event], None]


def notice(on_event: Listener, line: str) -> None:
    """Send a line of text to the listener of a run."""
    on_event({"kind": "notice", "message": line})


class MetricsFile:
    """The metrics of one run, in its run directory.

    Args:
        path: the path of the file.
        step: the step after which the run continues. Later lines and an incomplete line are
            dropped: they come from a process that died, and their steps will be repeated. `change`
            and `back` events of the step itself are dropped too, because no checkpoint contains
            them yet, and validations and samples from before the first step.

    Raises:
        WorkhorseError: the file is not a metrics file.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        self._path = path
        repeated = ("change", "back") if step else ("change", "back", "validation", "samples")
        self._kept = [
            line
            for line, event in _events(path)
            if event["step"] < step + (event["kind"] not in repeated)
        ]
        self._file: IO[str] | None = None

    def open(self) -> None:
        """Drop lines after the resumed step and open the file for writing."""
        write_atomically(self._path, "".join(self._kept))
        self._file = self._path.open("a", encoding="utf-8", newline="\n")

    def write(self, event: Event) -> None:
        """Append a line."""
        assert self._file is not None, "open comes first"
        self._file.write(json.dumps({key: _finite(value) for key, value in event.items()}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until the lines are on disk."""
        assert self._file is not None, "open comes first"
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[Event]:
    """Return the events of a metrics file in order; an incomplete last line is skipped.

    Raises:
        WorkhorseError: the file cannot be read, or a line was not written by a run.
    """
    events = [event for _, event in _events(path)]
    for number, event in enumerate(events, start=1):
        if wrong := _wrong_key(event):
            raise WorkhorseError(
                f"{path}:{number} has a {event['kind']} event whose {wrong} is missing or has the "
                f"wrong type; {_remedy(path)}"
            )
    return events


def _events(path: Path) -> list[tuple[str, Event]]:
    """Return each complete line with its event; an incomplete last line is skipped."""
    if not path.exists():
        return []
    found = []
    with open_plain(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                event = parse_json(line, f"{path}:{number}")
            except WorkhorseError as error:
                raise WorkhorseError(f"{error}; {_remedy(path)}") from None
            if not isinstance(event.get("step"), int) or not isinstance(event.get("kind"), str):
                raise WorkhorseError(f"{path}:{number} has no kind and step; {_remedy(path)}")
            found.append((line.decode("utf-8", "replace"), event))
    return found


def _remedy(path: Path) -> str:
    return f"it is damaged; remove the line, or restore the file ({path})"


_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_String = InstanceOf[str]  # may have lone surrogates, unlike pydantic's `str`


class _Sample(BaseModel):
    prompt: _String
    text: _String
    reward: _Number | None = None


NUMBER, STRING, SAMPLES = TypeAdapter(_Number), TypeAdapter(_String), TypeAdapter(list[_Sample])
OPTIONAL, PEAKS = TypeAdapter(_Number), TypeAdapter(list[_Number])
"""Types of keys that may be missing."""
FIGURE = TypeAdapter(_Number | bool | None | list[_Number | None])
TYPES: dict[str, dict[str, TypeAdapter[Any]]] = {
    "start": {
        **dict.fromkeys(("parameters", "steps"), NUMBER),
        **dict.fromkeys(("active_parameters", "trained_parameters", "minutes", "time"), OPTIONAL),
        "peak_flops": FIGURE,
    },
    "step": dict.fromkeys(("tokens", "seconds", "tokens_per_second"), NUMBER),
    **{kind: {kind: SAMPLES} for kind in ("samples", "rollouts")},
    **{"change": {"setting": STRING}, "back": {"message": STRING}},
    "end": {
        **{"reason": STRING, "peak_memory": PEAKS},
        **dict.fromkeys(("time", "seconds", "tokens"), OPTIONAL),
    },
}
"""Types of the keys that a report shows, by kind of event. All other keys of `step` and
`validation` events are figures."""


def _wrong_key(event: Event) -> str | None:
    """Return a key of an event that is missing or has the wrong type; None if there is none."""
    figures = event.keys() - {"kind"} if event["kind"] in ("step", "validation") else ()
    for key, type in (dict.fromkeys(figures, FIGURE) | TYPES.get(event["kind"], {})).items():
        try:
            if key in event or type not in (OPTIONAL, PEAKS):
                type.validate_python(event.get(key))
        except ValidationError:
            return key
    return None


def _finite(value: Any) -> Any:
    """Replace non-finite floats by None, because JSON cannot represent them."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


TrackerName = Literal["tensorboard", "wandb", "trackio"]
Tracker = Callable[[Event], None]
PACKAGES: dict[TrackerName, tuple[str, str]] = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}
"""For each tracker, the module to import and the package that contains it."""


def check_tracker(name: TrackerName) -> None:
    """Raise WorkhorseError if the package of a tracker is not installed."""
    _module(*PACKAGES[name])


def open_tracker(name: TrackerName, run: str, config: dict[str, Any], folder: Path) -> Tracker:
    """Open an experiment tracker and return a function that sends it an event.

    TensorBoard's files are written to `tensorboard/` in `folder`, the run directory. `config` is
    the recipe.

    Raises:
        WorkhorseError: the package of the tracker is not installed.
    """
    if name == "tensorboard":
        return _tensorboard(folder)
    module = _module(*PACKAGES[name])
    # trackio has the same API as wandb.
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
    """Return the numbers of a `step` or `validation` event, for experiment trackers.

    Their names are `train/KEY` or `validation/KEY`, followed by `/INDEX` for elements of a list.
    """
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
            "or remove it from train.trackers"
        ) from None
