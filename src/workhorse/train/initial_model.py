"""The model of a run with its initial weights, and the step that trains it."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from workhorse.checkpoints import (
    Checkpoint,
    Places,
    empty_decoder,
    load_weights,
    weights_of,
)
from workhorse.checkpoints.adapted import AdapterConfig, Base, copy_adapter, open_base
from workhorse.devices.names import training_dtype
from workhorse.devices.transfer import copy_tensors
from workhorse.memory.capacity import check_training, fit_micro_batch
from workhorse.nn import Decoder, DecoderConfig
from workhorse.parallel.division.teams import Teams, make_teams
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.world import World
from workhorse.tokenizers import Tokenizer
from workhorse.train.init_from import start_optimizer, start_weights
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.resume import Resumption
from workhorse.train.step.build import build_step
from workhorse.train.step.step import TrainingStep

GiveWeights = Callable[[Decoder, Places], Checkpoint | None]
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


def build_model(
    recipe: Recipe,
    config: DecoderConfig,
    device: torch.device,
    world: World,
    give_weights: GiveWeights,
    *,
    checkpoint: Checkpoint | None,
) -> Built:
    """Build the decoder with its initial weights, and the step that trains it."""
    train, parallel, divided = recipe.train, recipe.parallel, world.lockstep
    if recipe.adapter is not None:
        decoder, base = _adapted(recipe, recipe.adapter, config, device, checkpoint)
        return Built(
            decoder,
            build_step(decoder, train, device, parallel=parallel, world=world),
            make_teams(world, parallel, config.vocab_size),
            base,
        )
    teams = make_teams(world, parallel, config.vocab_size)
    if divided:
        decoder, other = teams.build(config, train.kernel, "meta"), None
    else:
        decoder = empty_decoder(config, train.kernel, device, torch.float32)
        other = give_weights(decoder, weights_of)
    step = build_step(
        decoder, train, device, parallel=parallel, world=world, teams=teams, whole=config
    )
    if divided:  # only this rank's parts of the weights are allocated
        other = give_weights(step.objective.decoder, step.optimizer.masters.places)
    if other is not None:
        start_optimizer(str(recipe.init), other, step.optimizer, train.optimizer.kind)
    return Built(decoder, step, teams)


def _adapted(
    recipe: Recipe,
    adapter: AdapterConfig,
    config: DecoderConfig,
    device: torch.device,
    checkpoint: Checkpoint | None,
) -> tuple[Decoder, Base]:
    """Build the frozen base of a recipe, with an adapter that is new or from a checkpoint."""
    trained_on = None if checkpoint is None else Base(**checkpoint.state["base"])
    base, source = open_base(trained_on.init if trained_on else str(recipe.init), config)
    if trained_on is not None:
        trained_on.check(base.sha256)
    dtype = training_dtype(recipe.train.dtype, device)
    decoder, places = adapter.empty(config, recipe.train.kernel, device, dtype)
    copy_tensors(places, weights_of(source), "base")
    adapter.adapt(decoder, recipe.train.seed, torch.float32)
    if checkpoint is not None:
        copy_adapter(decoder, checkpoint.model)
    return decoder, base


def give_weights(
    recipe: Recipe,
    config: DecoderConfig,
    checkpoint: Checkpoint | None,
    decoder: Decoder,
    places: Places,
    *,
    tokenizer: Tokenizer,
    notify: Callable[[str], None],
) -> Checkpoint | None:
    """Set a decoder's weights: from a checkpoint, from the recipe's `init`, or random ones.

    `config` describes the whole model; `decoder` may be a part of it. `places` returns the
    tensors of the decoder that weights are copied to.

    Returns:
        The checkpoint of `init` if its optimizer state must be loaded too, or None.
    """
    if checkpoint is not None:
        load_weights(decoder, checkpoint.model, places)
        return None
    if recipe.init is not None:
        return start_weights(
            recipe.init,
            decoder,
            notify,
            whole=config,
            tokenizer=tokenizer,
            places=places,
            with_optimizer=recipe.init_optimizer,
        )
    into = places(decoder)
    for name, values in config.draw(decoder.device):
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
    of_recipe: dict[str, Any] = {
        "packed": recipe.data.packed,
        "parallel": recipe.parallel,
        "adapter": recipe.adapter,
    }
    train = fit_micro_batch(config, train, device, **of_recipe)
    if isinstance(size := train.micro_batch_size, int):
        train = train.replace(micro_batch_size=-world.most(-size))
    if environment.rank_here() == 0:  # for all ranks of this machine, before any allocates memory
        check_training(config, train, device, **of_recipe)
    world.wait()
    return train


def with_whole_weights(step: TrainingStep, world: World, call: Call | None) -> Call | None:
    """Wrap a function so that weights outside the layers are gathered before it is called.

    The function calls parts of the model directly, so FSDP's hooks on the whole model do not run.
    """
    if call is None or not world.lockstep:
        return call
    from workhorse.parallel.division.sharding import gathered  # importing takes a second

    return gathered(step.objective)(call)
