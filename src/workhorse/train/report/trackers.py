"""Metrics for experiment trackers: each optional, imported when it is used."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from workhorse.errors import WorkhorseError
from workhorse.train.report.metrics import Event

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
