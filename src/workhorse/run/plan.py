"""The plan of a run: all that is known before a tensor of its model exists."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workhorse import __version__
from workhorse.checkpoints import Checkpoint, RunDirectory
from workhorse.checkpoints.adapted import Base
from workhorse.data import Batches, Dataset, prepare, prepare_tokenizer
from workhorse.devices.names import use_threads
from workhorse.memory.capacity import check_training, fit_micro_batch
from workhorse.memory.step_memory import PlannedStep
from workhorse.nn import DecoderConfig
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.world import World
from workhorse.run.init_from import check_tokens
from workhorse.run.resume import Resumption, check_same_run
from workhorse.tokenizers import Tokenizer
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.report.metrics import Listener, notice


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run. Every checkpoint stores it, and a resumed run must have the same.

    Attributes:
        config: config of the whole decoder.
        tokenizer: fingerprint of the tokenizer.
        data: fingerprint of the tokens and of the files that they come from.
        objective: fingerprints of the models that the objective learns from, by name.
        reward: SHA-256 of the file of the reward function; None without one. It may change.
        reference: SHA-256 of the reference in the run directory; see `reference_digest`.
        base: the base of the adapter that is trained; None without an adapter.
    """

    config: DecoderConfig
    tokenizer: str
    data: str
    objective: dict[str, str]
    reward: str | None
    reference: str | None = None
    base: Base | None = None

    def state(self) -> dict[str, Any]:
        """Return the identity as plain data, with the versions of the software."""
        return {
            "config": self.config.to_dict(),
            "tokenizer": self.tokenizer,
            "data": self.data,
            **self.objective,
            "reward": self.reward,
            "reference": self.reference,
            **({} if self.base is None else {"base": asdict(self.base)}),
            "versions": {"workhorse": __version__, "torch": torch.__version__},
        }


@dataclass(frozen=True)
class RunPlan:
    """All that is known about a run before a tensor of its model exists.

    Attributes:
        recipe: the recipe, as the run directory stores it.
        micro_batch_size: rows of a pass of this run; None: all rows of a rank.
        run: the run directory.
        device: the device to train on.
        world: the processes of the run.
        at: the point where the run continues; step 0 for a new run.
        tokenizer: the tokenizer.
        dataset: the data as tokens.
        batches: the training batches, or the prompts of rollouts.
        identity: the identity of the run, as far as it is known without its model.
        on_event: function that is called with every event.
        minutes: `train.minutes` if steps were timed for it; the recipe then has a number of steps.
    """

    recipe: Recipe
    micro_batch_size: int | None
    run: RunDirectory
    device: torch.device
    world: World
    at: Resumption
    tokenizer: Tokenizer
    dataset: Dataset
    batches: Batches
    identity: RunIdentity
    on_event: Listener
    minutes: float | None = None

    @property
    def train(self) -> TrainConfig:
        """The training settings of the recipe, with the micro-batch size of this run."""
        return self.recipe.train.replace(micro_batch_size=self.micro_batch_size)

    @property
    def config(self) -> DecoderConfig:
        """Config of the whole decoder."""
        return self.identity.config

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint to continue from; None without one."""
        return self.at.checkpoint

    @property
    def notify(self) -> Callable[[str], None]:
        """Function that reports one line; it does not keep the plan, and so no checkpoint."""
        return partial(notice, self.on_event)


def plan_run(
    recipe: Recipe,
    run: RunDirectory,
    *,
    at: Resumption,
    device: torch.device,
    world: World,
    on_event: Listener,
) -> RunPlan:
    """Make the plan of a run, and check that tokenizer, data and memory fit the recipe.

    A new run writes its tokenizer and the shards of its tokens into the run directory, and nothing
    else.

    Raises:
        WorkhorseError: the data cannot be read, training does not fit into memory, or the run is
            not the one of the checkpoint.
    """
    train, notify = recipe.train, partial(notice, on_event)
    if train.threads:
        use_threads(train.threads)
    with world.first_before_others():
        tokenizer = tokenizer_of(recipe, run, notify)
        _check_tokens(recipe, tokenizer, at)
        dataset = dataset_of(recipe, tokenizer, run, on_event)
    batches = batches_of(recipe, dataset, at, notify)
    config = recipe.decoder_config(tokenizer.vocab_size)
    identity = RunIdentity(
        config,
        tokenizer.fingerprint,
        dataset.fingerprint,
        train.objective.identity(),
        train.rollouts.reward.fingerprint() if train.rollouts and train.rollouts.reward else None,
    )
    if at.checkpoint is not None:
        identity = replace(identity, reference=reference_digest(train, run.reference_folder))
        check_same_run(run, recipe, at, identity.state())
    if train.rollouts is None:
        train.objective.check_rows(batches.rows(at.step, 0, 1))
    size = fitted_to_memory(recipe, config, device, at, world).micro_batch_size
    assert size != "auto"
    return RunPlan(
        recipe, size, run, device, world, at, tokenizer, dataset, batches, identity, on_event
    )


def tokenizer_of(recipe: Recipe, run: RunDirectory, notify: Callable[[str], None]) -> Tokenizer:
    """Return the run's tokenizer; it is trained on the training data if there is none yet."""
    if not run.tokenizer_folder.exists():
        if recipe.tokenizer.kind not in ("bytes", "file"):
            notify("training the tokenizer")
        made = prepare_tokenizer(recipe.tokenizer, recipe.data, run.data_folder, notify=notify)
        run.save_tokenizer(made)
    return run.tokenizer()


def _check_tokens(recipe: Recipe, tokenizer: Tokenizer, at: Resumption) -> None:
    """Check that the models that a run starts or learns from have the same tokens."""
    if recipe.init is not None and at.checkpoint is None:
        check_tokens(
            recipe.init,
            tokenizer,
            setting="init",
            remedy="remove tokenizer, or set 'tokenizer={{kind: file, path: {folder}}}'",
        )
    for name, model in recipe.train.objective.models.items():
        remedy = f"choose a {name} with the same tokenizer"
        check_tokens(model, tokenizer, setting=name, remedy=remedy)


def dataset_of(
    recipe: Recipe, tokenizer: Tokenizer, run: RunDirectory, on_event: Listener
) -> Dataset:
    """Return the recipe's data as tokens; data is tokenized only if the run has no tokens yet."""
    return prepare(
        recipe.data,
        tokenizer,
        run.data_folder,
        progress=lambda done, total: on_event({"kind": "data", "done": done, "total": total}),
        notify=partial(notice, on_event),
    )


def batches_of(
    recipe: Recipe, dataset: Dataset, at: Resumption, notify: Callable[[str], None]
) -> Batches:
    """Return the training batches, offset so that the next step gets the first unread row."""
    config = recipe.train
    each = config.rollouts.completions if config.rollouts else 1
    batches = Batches(
        dataset.train,
        seq_len=config.seq_len,
        batch_size=config.batch_size // each,
        seed=config.seed,
        packing=recipe.data.packing,
        too_long=recipe.data.too_long,
        offset=(at.rows - at.step * config.batch_size) // each,
    )
    for line in batches.left_out:
        notify(line)
    return batches


def fitted_to_memory(
    recipe: Recipe, config: DecoderConfig, device: torch.device, at: Resumption, world: World
) -> TrainConfig:
    """Replace `micro_batch_size: auto` by a size, from the checkpoint if there is one.

    All ranks use the size of the rank with the least memory.

    Raises:
        WorkhorseError: training does not fit into memory.
    """
    train = recipe.train
    if train.micro_batch_size == "auto" and at.checkpoint is not None:
        train = train.replace(micro_batch_size=at.micro_batch_size(train.batch_size))
    step = PlannedStep.of_recipe(recipe, config, device)
    step = fit_micro_batch(replace(step, train=train))
    if isinstance(size := step.train.micro_batch_size, int):
        step = step.with_train(micro_batch_size=-world.most(-size))
    if environment.rank_here() == 0:  # for all ranks of this machine, before any allocates memory
        check_training(step)
    world.wait()
    return step.train


def reference_digest(train: TrainConfig, folder: Path) -> str | None:
    """Return the SHA-256 of the files in the folder of a run's reference; None if it has none."""
    if train.objective.reference is None or not folder.is_dir():
        return None
    whole = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".npy", ".json", ".safetensors"):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            whole.update(f"{path.name} {digest.hexdigest()}\n".encode())
    return whole.hexdigest()
