"""The model of a run with its initial weights, and the step that trains it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from workhorse.checkpoints import (
    Checkpoint,
    Places,
    empty_decoder,
    load_weights,
    mapped_weights,
    weights_of,
)
from workhorse.checkpoints.adapted import AdapterConfig, Base, copy_adapter
from workhorse.checkpoints.stored import open_base, open_stored
from workhorse.devices.names import training_dtype
from workhorse.execute.scoring import ScoringBody, scoring_body
from workhorse.memory.capacity import check_training, fit_micro_batch
from workhorse.memory.step_memory import PlannedStep
from workhorse.nn import Decoder, DecoderConfig
from workhorse.optim.master_weights import round_weights
from workhorse.parallel.division.teams import Teams, make_teams
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.world import World
from workhorse.run.init_from import new_tokens, start_optimizer, start_weights
from workhorse.run.resume import Resumption
from workhorse.tokenizers import Tokenizer
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import build_step, training_operators
from workhorse.train.step.step import TrainingStep

Call = TypeVar("Call", bound=Callable[..., object])


class Built(NamedTuple):
    """A model, and the step that trains it."""

    reference: Decoder
    """The decoder with its original modules; training replaces modules in a copy. On the device
    `meta` if ranks hold only parts of the weights."""
    step: TrainingStep
    teams: Teams
    base: Base | None = None
    """The base of the adapter that is trained, or None."""

    def weights(self) -> dict[str, Tensor]:
        """The weights that a checkpoint holds: all, or only the trained ones with an adapter."""
        masters, decoder = self.step.optimizer.masters, self.step.objective.decoder
        return masters.trained(decoder) if self.base else masters.weights(decoder)

    @property
    def constants(self) -> dict[str, Any]:
        """Values that a checkpoint adds to the constants of a run."""
        return {} if self.base is None else {"base": asdict(self.base)}


@dataclass(frozen=True)
class Start:
    """Builds the model of a run with its initial weights, as often as it is needed.

    The weights come from `checkpoint`, else from the recipe's `init`, else they are random.
    """

    recipe: Recipe
    config: DecoderConfig
    """Config of the whole decoder."""
    tokenizer: Tokenizer
    device: torch.device
    world: World
    checkpoint: Checkpoint | None
    notify: Callable[[str], None]

    def build(self) -> Built:
        """Build the decoder with its initial weights, and the step that trains it."""
        train, parallel = self.recipe.train, self.recipe.parallel
        teams = make_teams(self.world, parallel, self.config.vocab_size)
        build = partial(
            build_step,
            config=train,
            device=self.device,
            parallel=parallel,
            world=self.world,
        )
        if self.recipe.adapter is not None:
            decoder, base = self._adapted(self.recipe.adapter)
            return Built(decoder, build(decoder), teams, base)
        build = partial(build, teams=teams, whole=self.config)
        if self.world.lockstep:  # only this rank's parts of the weights are allocated
            decoder = teams.build(self.config, train.kernel, "meta")
            step = build(decoder)
            places = step.optimizer.masters.places
            init = self._set_weights(step.objective.decoder, places)
        else:
            decoder, init = self._whole()
            step = build(decoder)
        if init is not None:
            start_optimizer(str(self.recipe.init), init, step.optimizer, train.optimizer.kind)
        return Built(decoder, step, teams)

    def frozen(self, stored: Path | None = None) -> Decoder:
        """Build the whole decoder with its initial weights in the dtype of training, and freeze it.

        Args:
            stored: a model folder; its weights replace the initial ones, except with an adapter.
        """
        adapter = self.recipe.adapter
        decoder = self._whole(stored)[0] if adapter is None else self._adapted(adapter)[0]
        decoder.requires_grad_(requires_grad=False)
        if training_dtype(self.recipe.train.dtype, self.device) == torch.bfloat16:
            round_weights(decoder)
        return decoder

    def scoring_body(self, decoder: Decoder) -> ScoringBody:
        """Return a body that scores as the training step would; see `workhorse.execute.scoring`.

        Args:
            decoder: a whole decoder in the dtype of training.
        """
        train = self.recipe.train
        dtype = training_dtype(train.dtype, self.device)
        exact = train.rollouts is not None and train.rollouts.exact
        return scoring_body(
            decoder,
            training_operators(self.device, dtype, train.execution, exact=exact),
            precision=train.matmul_precision,
            exact=exact,
            compiled=train.execution == "compiled",
            fp8=train.fp8,
        )

    def _whole(self, stored: Path | None = None) -> tuple[Decoder, Checkpoint | None]:
        """Build the whole decoder; see `_set_weights`."""
        kernel = self.recipe.train.kernel
        decoder = empty_decoder(self.config, kernel, self.device, torch.float32)
        return decoder, self._set_weights(decoder, weights_of, stored)

    def _adapted(self, adapter: AdapterConfig) -> tuple[Decoder, Base]:
        """Build the frozen base of a recipe, with an adapter that is new or from a checkpoint."""
        train, device = self.recipe.train, self.device
        if self.checkpoint is None:
            init = str(self.recipe.init)
            new = new_tokens(init, open_stored(init), self.tokenizer, self.notify)
            base, weights = open_base(init, self.config, new=new)
        else:
            base, weights = open_base(config=self.config, **self.checkpoint.state["base"])
        dtype = training_dtype(train.dtype, device)
        decoder = adapter.trainable(
            self.config, train.kernel, device, dtype, weights.items(), seed=train.seed
        )
        if self.checkpoint is not None:
            copy_adapter(decoder, self.checkpoint.model)
        return decoder, base

    def _set_weights(
        self, decoder: Decoder, places: Places, stored: Path | None = None
    ) -> Checkpoint | None:
        """Set the weights of a decoder, or of a part of it, through its `places`.

        Args:
            decoder: the decoder, or this rank's part of it.
            places: the destinations of the weights.
            stored: a model folder; its weights replace the initial ones.

        Returns:
            The checkpoint of `init` if its optimizer state must be loaded too, or None.
        """
        if stored is not None:
            model = open_stored(stored).load_decoder(places=mapped_weights)
            load_weights(decoder, weights_of(model), places)
        elif self.checkpoint is not None:
            load_weights(decoder, self.checkpoint.model, places)
        elif self.recipe.init is not None:
            return start_weights(
                self.recipe.init,
                decoder,
                self.notify,
                whole=self.config,
                tokenizer=self.tokenizer,
                places=places,
                with_optimizer=self.recipe.init_optimizer,
            )
        else:
            into = places(decoder)
            for name, values in self.config.draw(decoder.device):
                into[name].copy_(values)
        return None


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


def with_whole_weights(step: TrainingStep, world: World, call: Call | None) -> Call | None:
    """Wrap a function so that weights outside the layers are gathered before it is called.

    The function calls parts of the model directly, so FSDP's hooks on the whole model do not run.
    """
    if call is None or not world.lockstep:
        return call
    from workhorse.parallel.division.sharding import gathered  # importing takes a second

    return gathered(step.objective)(call)
