"""Resuming a run: choosing the checkpoint and checking the changes of its recipe.

The configs declare which settings may change, see `workhorse.config.base`. Any other change raises
an error, with the command that starts a new run with the change.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from workhorse.checkpoints import Checkpoint, RunDirectory
from workhorse.config.base import Config, OnResume, rule_of
from workhorse.config.overrides import differences, written
from workhorse.data.sources import file_changes
from workhorse.errors import WorkhorseError
from workhorse.nn import DecoderConfig
from workhorse.parallel.processes import environment
from workhorse.train.recipe.recipe import Recipe, written_over
from workhorse.train.report.metrics import read_metrics
from workhorse.train.rewards import PythonRewardConfig

Settings = Sequence[tuple[str, Any]]
"""Settings as pairs of dotted name and plain value."""

FROM_THE_BEGINNING = ("train.seed", "tokenizer", "init")
"""Settings that determine the initial weights or the tokens. After a change of such a setting a run
cannot start from existing weights."""


def fresh(run: RunDirectory, recipe: Recipe, changed: Sequence[str]) -> bool:
    """Return True if a new run with these changed settings cannot start from the run's weights."""
    if recipe.adapter is not None or any(name.startswith(FROM_THE_BEGINNING) for name in changed):
        return True
    if not any(name.startswith("model") for name in changed):
        return False
    try:
        trained = run.config  # not the recipe, which may have been edited since
        return _shapes(trained) != _shapes(recipe.decoder_config(trained.vocab_size))
    except WorkhorseError:
        return True


def from_weights(run: RunDirectory, settings: Settings) -> Settings:
    """Extend settings so that a new run starts from the weights and tokenizer of `run`."""
    tokenizer = {"kind": "file", "path": str(run.tokenizer_folder)}
    # Both a preset and `init` would set the architecture, so the preset is removed.
    model = [("model", {})] if "preset" in run.recipe()["model"] else []
    return [*model, *settings, ("tokenizer", tokenizer), ("init", str(run.path))]


def command(run: RunDirectory, settings: Settings) -> str:
    """Return the command that trains a run's recipe with changed settings in a new folder."""
    words = ["workhorse", "train", str(run.path)]
    words += [f"{name}={written(value)}" for name, value in settings]
    return shlex.join([*words, "--out", _free_name(run), *environment.workers()])


def spare(recipe: Recipe, name: str, value: Any) -> Any:
    """Return a setting's value; for a section, without the keys that have their default value."""
    section: Any = recipe
    for part in name.split("."):
        section = getattr(section, part, None)
    if not isinstance(section, Config):
        return value
    kind = {"kind": value["kind"]} if "kind" in value else {}
    return kind | section.model_dump(mode="json", exclude_defaults=True)


def _shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    decoder = config.build(device="meta")
    return {name: weight.shape for name, weight in decoder.named_parameters()}


def _free_name(run: RunDirectory) -> str:
    number = 2
    while (path := run.path.with_name(f"{run.path.name}-{number}")).exists():
        number += 1
    return str(path)


Newest = Callable[[Callable[[str], None]], Checkpoint | None]
SHOWN = 40
"""Maximum number of characters of a value in a message."""


@dataclass(frozen=True)
class Change:
    """A setting whose value in a recipe differs from its value in the run to resume."""

    setting: str
    """Dotted name of the setting, or of the whole section if its `kind` has changed."""
    before: Any
    now: Any
    rule: OnResume

    def __str__(self) -> str:
        name, before, now = self.setting, self.before, self.now
        kinds = [value.get("kind") if isinstance(value, dict) else None for value in (before, now)]
        if None not in kinds and kinds[0] != kinds[1]:
            name, (before, now) = f"{name}.kind", kinds
        line = f"{name} changes from {_show(before)} to {_show(now)}"
        rounded = self.rule is OnResume.ROUNDED
        return f"{line}; results will be rounded differently" if rounded else line


@dataclass(frozen=True)
class Resumption:
    """The point where a run continues, and the changes of its recipe since the checkpoint."""

    step: int = 0
    """Number of steps done; 0 without a checkpoint."""
    rows: int = 0
    """Number of rows of the data that have been read."""
    state: dict[str, Any] = field(default_factory=dict)
    """State of the checkpoint; empty without a checkpoint."""
    changes: list[Change] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    """The checkpoint to continue from; None without a checkpoint, or if only its state was read."""

    def micro_batch_size(self, batch_size: int) -> int | Literal["auto"]:
        """Return the run's micro-batch size, or `auto` if the batch size has changed since."""
        tried_on = self.state.get("recipe", {}).get("train", {}).get("batch_size", batch_size)
        return self.state["micro_batch_size"] if tried_on == batch_size else "auto"


def plan_resumption(run: RunDirectory, recipe: Recipe, newest: Newest | None = None) -> Resumption:
    """Find where a run continues, and compare its recipe with the recipe to continue with.

    Writes nothing.

    Args:
        run: the run.
        recipe: the recipe to continue with.
        newest: function that loads the newest intact checkpoint; None to read only its state.

    Raises:
        WorkhorseError: no saved checkpoint can be used, a setting must not change, the data is
            different, or more steps are done than the recipe has.
    """
    skipped: list[str] = []
    checkpoint = None
    if newest is None:
        step, state = run.store().newest_state(skipped.append) or (0, {})
    else:
        checkpoint = newest(skipped.append)
        step, state = (checkpoint.step, checkpoint.state) if checkpoint else (0, {})
    if not state:
        _check_nothing_saved(run, skipped)
    before = Recipe.from_dict(state.get("recipe") or run.recipe())
    changes = [*changes_of(before, recipe), *_other_reward(recipe, state)]
    _check_allowed(run, recipe, changes)
    steps = recipe.train.steps
    if steps is not None and steps < step:
        damaged = f" ({'; '.join(skipped)})" if skipped else ""
        raise WorkhorseError(
            f"{run.path} has done {step} steps{damaged}, more than train.steps={steps}; "
            f"set train.steps={step} or more, or start a new run with another --out"
        )
    if state:
        _check_files(run, recipe, step, state["data"])
    rows = state.get("counters", {}).get("rows", step * before.train.batch_size)
    notices = [*skipped, *map(str, changes), *_rates(before, recipe, step)]
    notices += _other_rate(before, recipe)
    if step == steps:
        notices.append(
            f"{run.path} is finished: all train.steps={step} are done; to continue, set more, for "
            f"example train.steps={2 * step}"
        )
    return Resumption(step, rows, state, changes, notices, checkpoint)


class LossSpikeError(WorkhorseError):
    """A loss spike, but no checkpoint to return to, or the limit of returns is reached."""


class Progress(Protocol):
    """Progress of a run; see `Counters` in `workhorse.train.loop`."""

    step: int
    rows: int
    times_back: int


def before_jump(newest: Newest, recipe: Recipe, jumped: Progress) -> Resumption:
    """Return the point where a run continues after a loss spike.

    The run returns to a checkpoint, but skips all rows that were read until the spike. `jumped` is
    the progress of the run at the spike.

    Raises:
        LossSpikeError: no checkpoint has been saved, or the run has already returned
            `train.loss_spikes.most` times.
    """
    assert recipe.train.loss_spikes is not None
    remedy = "with a lower learning rate or a longer warm-up"
    if jumped.times_back == recipe.train.loss_spikes.most:
        raise LossSpikeError(
            f"loss spike at step {jumped.step}, after returning to a checkpoint "
            f"{jumped.times_back} times (train.loss_spikes.most); resume from the last checkpoint "
            f"with --resume {remedy}"
        )
    checkpoint = newest(lambda line: None)
    if checkpoint is None:
        raise LossSpikeError(
            f"loss spike at step {jumped.step}, but no checkpoint has been saved to return to; "
            f"restart {remedy}, or save more often (train.checkpoint_every)"
        )
    counters = {**checkpoint.state["counters"], "times_back": jumped.times_back + 1}
    state = {**checkpoint.state, "counters": counters}
    checkpoint = replace(checkpoint, state=state)
    return Resumption(checkpoint.step, jumped.rows, state, checkpoint=checkpoint)


def resumed_recipe(fields: dict[str, Any], run: RunDirectory) -> dict[str, Any]:
    """Fill in architecture and tokenizer of a recipe with `init` that resumes a run.

    They are copied from the run's own recipe, because the model in `init` may no longer exist.
    """
    own = run.recipe()
    if not isinstance(fields.get("init"), str) or fields["init"] != own.get("init"):
        return fields
    return written_over(fields, own.get("model") or {}, own.get("tokenizer"))


def check_same_run(run: RunDirectory, recipe: Recipe, at: Resumption, now: dict[str, Any]) -> None:
    """Check that model, tokenizer, teacher, reference and data are the same as in the checkpoint.

    Raises:
        WorkhorseError: the model's config, the tokenizer, the teacher's weights, the files of the
            reference or the data differ.
    """
    for what in ("config", "tokenizer", *recipe.train.objective.models, "reference"):
        both = at.state.get(what), now[what]
        if None not in both and both[0] != both[1]:  # older checkpoints do not have all
            names = {"config": "model's config", "reference": f"content of {run.reference_folder}"}
            thing = names.get(what, what)
            raise WorkhorseError(
                f"the {thing} differs from the one that the checkpoint of step {at.step} was "
                "trained with; restore it, or start a new run with another --out"
            )
    if at.state["data"] != now["data"]:
        changed = file_changes(recipe.data, run.data_folder, at.state["data"])
        raise _other_text(run, recipe, at.step, str(changed or ""))


def changes_of(before: Recipe, now: Recipe) -> Iterator[Change]:
    """Yield every setting that differs between two recipes, in the order of their keys."""
    exact = before.parallel.is_exact and now.parallel.is_exact
    for path, old, new in differences(before.to_dict(), now.to_dict()):
        rule = rule_of(now, path)
        if exact and path in (("parallel", "data"), ("parallel", "shard")):
            rule = OnResume.NO_EFFECT
        yield Change(".".join(path), old, new, rule)


def _check_nothing_saved(run: RunDirectory, skipped: list[str]) -> None:
    """Raise WorkhorseError if starting at step 0 would lose saved work."""
    store = run.store()
    if skipped:
        remedy = "start a new run with another --out"
        if (step := store.newest_weights()) is not None:
            line = command(run, from_weights(run, []))
            remedy = f"start a new run from the weights of step {step}, which are intact: {line}"
        reasons = "; ".join(line.removeprefix("skipping ") for line in skipped)
        raise WorkhorseError(
            f"no checkpoint of {run.path} is intact ({reasons}); restore the files from a backup, "
            f"or {remedy}"
        )
    events = read_metrics(run.metrics_file)
    if saved := [event["step"] for event in events if event["kind"] == "checkpoint"]:
        raise WorkhorseError(
            f"{run.metrics_file} lists a checkpoint of step {max(saved)}, but {store.folder} has "
            "none; restore the checkpoints, or start a new run with another --out"
        )


def _check_allowed(run: RunDirectory, recipe: Recipe, changes: list[Change]) -> None:
    """Raise WorkhorseError for changes that need a new run, with the command that starts it."""
    refused = [change for change in changes if change.rule is OnResume.NEW_RUN]
    if not refused:
        return
    names = ", ".join(change.setting for change in refused[1:])
    others = f" (and {names})" if names else ""
    own = shlex.join(["workhorse", "train", str(run.path), "--resume"])
    raise WorkhorseError(
        f"{refused[0]}{others}, which needs a new run; resume it unchanged with {own}, "
        "or " + _begin(run, recipe, [change.setting for change in refused])
    )


def _begin(run: RunDirectory, recipe: Recipe, refused: list[str]) -> str:
    """Return the remedy for changes that need a new run: the command that starts it."""
    asked = [
        (change.setting, spare(recipe, change.setting, change.now))
        for change in changes_of(Recipe.from_dict(run.recipe()), recipe)
        if change.setting not in ("init", "init_optimizer") or change.setting in refused
    ]
    if fresh(run, recipe, refused):
        return f"start a new run: {command(run, asked)}"
    line = f"start a new run from its weights: {command(run, from_weights(run, asked))}"
    if "train.optimizer" in refused:
        return line
    return f"{line} (add init_optimizer=true to load its optimizer state too)"


def _check_files(run: RunDirectory, recipe: Recipe, step: int, fingerprint: str) -> None:
    """Raise WorkhorseError if names and sizes of the files show that the data is different."""
    changed = file_changes(recipe.data, run.data_folder, fingerprint)
    if changed is not None and changed.text_changed:
        raise _other_text(run, recipe, step, str(changed))


def _other_text(run: RunDirectory, recipe: Recipe, step: int, files: str) -> WorkhorseError:
    which = f" ({files})" if files else ""
    return WorkhorseError(
        f"the data differs from the data that the checkpoint of step {step} was trained "
        f"with{which}; restore it, or {_begin(run, recipe, ['data'])}"
    )


def _other_reward(recipe: Recipe, state: dict[str, Any]) -> list[Change]:
    """Return the change of the file with the reward function, which may be a correction."""
    reward = recipe.train.rollouts.reward if recipe.train.rollouts else None
    before = state.get("reward")
    if before is None or not isinstance(reward, PythonRewardConfig):
        return []
    hashes = [f"SHA-256 {one[:16]}" for one in (before, reward.fingerprint())]
    if hashes[0] == hashes[1]:
        return []
    return [Change(str(reward.path), *hashes, rule=OnResume.CONTINUES)]


def _rates(before: Recipe, now: Recipe, step: int) -> list[str]:
    """Return a notice if the learning rate changes abruptly where the run resumes."""
    old, new = before.train, now.train
    if step == 0 or step >= new.length:
        return []
    last = old.schedule.factor(step - 1, old.length)
    following = new.schedule.factor(step, new.length)
    peak, other_peak = old.optimizer.learning_rate, new.optimizer.learning_rate
    was, becomes = f"{last * peak:.3g}", f"{following * other_peak:.3g}"
    as_planned = step < old.length and old.schedule.factor(step, old.length) == following
    if was == becomes or (as_planned and peak == other_peak):
        return []
    line = f"the learning rate changes from {was} at step {step} to {becomes} at step {step + 1}"
    if following <= last or peak != other_peak:
        return [line]
    rates = [
        f"train.optimizer.{rate.setting}={last * rate.value:.3g}" for rate in old.optimizer.rates()
    ]
    return [f"{line}; to keep it, set train.schedule=constant {' '.join(rates)}"]


def _other_rate(before: Recipe, now: Recipe) -> list[str]:
    """Return a notice if the first learning rate of an optimizer changes, but no other one."""
    old, new = before.train.optimizer.rates(), now.train.optimizer.rates()
    if len(old) != len(new) or old[0] == new[0] or old[1:] != new[1:]:
        return []
    return [
        f"train.optimizer.{new[0].setting} applies only to {new[0].weights}; {rate.weights} keep "
        f"train.optimizer.{rate.setting}={rate.value:g}"
        for rate in new[1:]
    ]


def _show(value: Any) -> str:
    text = "null" if value is None else repr(value)  # null as in a recipe
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
