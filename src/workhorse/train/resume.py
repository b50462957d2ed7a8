"""What may change between two sittings of a run, and what may not."""

from typing import Any

from workhorse.checkpoints import Checkpoint
from workhorse.errors import WorkhorseError
from workhorse.train.recipe import Recipe

FREE = {
    "name",
    "description",
    "train.steps",
    "train.max_bad_steps",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
    "train.samples",
    "train.checkpoint_every",
    "train.keep",
    "train.trackers",
    "data.cache_dir",
}
"""Settings that a resumed run takes from the new recipe. With other `steps`, the learning rate goes
on along the new schedule."""
ROUNDING = {
    "train.micro_batch_size",
    "train.device",
    "train.kernel",
    "train.threads",
    "train.compile",
    "train.activation_checkpointing",
}
"""Settings that a resumed run takes too, and that change how results are rounded."""


SHOWN = 40
"""Characters of a value that a message shows."""


def check_changes(before: Recipe, now: Recipe) -> list[str]:
    """Compare a run's recipe with the one it is resumed with.

    Returns:
        A line for each setting that changes and may.

    Raises:
        WorkhorseError: naming the settings that may not change.
    """
    changes = _differences(before.to_dict(), now.to_dict())
    refused = [change for change in changes if not _is_one_of(change, FREE | ROUNDING)]
    if refused:
        name = refused[0]
        others = f" (so do {', '.join(refused[1:])})" if refused[1:] else ""
        old, new = changes[name]
        raise WorkhorseError(
            f"{name} changes from {_show(old)} to {_show(new)}{others}, which would make it "
            "another run; put it back, or begin a run with another --out"
        )
    return [
        f"{name} changes from {_show(old)} to {_show(new)}"
        + ("; results will be rounded differently" if _is_one_of(name, ROUNDING) else "")
        for name, (old, new) in changes.items()
    ]


def check_same_run(checkpoint: Checkpoint, constants: dict[str, Any]) -> None:
    """Compare what a checkpoint was trained with and what the run has now.

    Raises:
        WorkhorseError: the model's config, the tokenizer or the data are others.
    """
    for what in ("config", "tokenizer", "data"):
        if checkpoint.state[what] != constants[what]:
            thing = {"config": "model's config"}.get(what, what)
            raise WorkhorseError(
                f"the {thing} is not what the checkpoint of step {checkpoint.step} was trained "
                "with; put it back, or begin a run with another --out"
            )


def _differences(before: Any, now: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted names of the values that differ, with both values."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return {} if before == now else {path: (before, now)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in now if key not in before)]:
        inner = f"{path}.{key}" if path else str(key)
        found |= _differences(before.get(key), now.get(key), inner)
    return found


def _is_one_of(name: str, settings: set[str]) -> bool:
    return any(name == setting or name.startswith(setting + ".") for setting in settings)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
