"""The model of a run with its initial weights, and the step that trains it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

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
from workhorse.nn import Decoder
from workhorse.optim.master_weights import round_weights
from workhorse.parallel.division.teams import Teams, make_teams
from workhorse.parallel.processes.world import World
from workhorse.run.init_from import new_tokens, start_optimizer, start_weights
from workhorse.run.plan import RunPlan
from workhorse.train.step.build import build_step, training_operators
from workhorse.train.step.step import TrainingStep

Call = TypeVar("Call", bound=Callable[..., object])


class RunModel(NamedTuple):
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


def build_model(plan: RunPlan) -> RunModel:
    """Build the decoder of a run with its initial weights, and the step that trains it.

    The weights come from the checkpoint, else from the recipe's `init`, else they are random.
    """
    recipe, train, world, config = plan.recipe, plan.train, plan.world, plan.config
    teams = make_teams(world, recipe.parallel, config.vocab_size)
    build = partial(
        build_step, config=train, device=plan.device, parallel=recipe.parallel, world=world
    )
    if recipe.adapter is not None:
        decoder, base = _adapted(plan, recipe.adapter)
        return RunModel(decoder, build(decoder), teams, base)
    build = partial(build, teams=teams, whole=config)
    if world.lockstep:  # only this rank's parts of the weights are allocated
        decoder = teams.build(config, train.kernel, "meta")
        step = build(decoder)
        init = _set_weights(plan, step.objective.decoder, step.optimizer.masters.places)
    else:
        decoder, init = _whole(plan)
        step = build(decoder)
    if init is not None:
        start_optimizer(str(recipe.init), init, step.optimizer, train.optimizer.kind)
    return RunModel(decoder, step, teams)


def frozen_model(plan: RunPlan, stored: Path) -> Decoder:
    """Build the whole decoder with the weights of a model folder, frozen, as it is trained."""
    decoder = _whole(plan, stored)[0]
    decoder.requires_grad_(requires_grad=False)
    if training_dtype(plan.train.dtype, plan.device) == torch.bfloat16:
        round_weights(decoder)
    return decoder


def scorer(plan: RunPlan, decoder: Decoder) -> ScoringBody:
    """Return a body that scores as the training step would; see `workhorse.execute.scoring`.

    Args:
        plan: the run.
        decoder: a whole decoder in the dtype of training.
    """
    train = plan.train
    dtype = training_dtype(train.dtype, plan.device)
    exact = train.rollouts is not None and train.rollouts.exact
    return scoring_body(
        decoder,
        training_operators(plan.device, dtype, train.execution, exact=exact),
        precision=train.matmul_precision,
        exact=exact,
        compiled=train.execution == "compiled",
        fp8=train.fp8,
    )


def _whole(plan: RunPlan, stored: Path | None = None) -> tuple[Decoder, Checkpoint | None]:
    """Build the whole decoder; see `_set_weights`."""
    decoder = empty_decoder(plan.config, plan.train.kernel, plan.device, torch.float32)
    return decoder, _set_weights(plan, decoder, weights_of, stored)


def _adapted(plan: RunPlan, adapter: AdapterConfig) -> tuple[Decoder, Base]:
    """Build the frozen base of a recipe, with an adapter that is new or from a checkpoint."""
    train, config, checkpoint = plan.train, plan.config, plan.checkpoint
    if checkpoint is None:
        init = str(plan.recipe.init)
        new = new_tokens(init, open_stored(init), plan.tokenizer, plan.notify)
        base, weights = open_base(init, config, new=new)
    else:
        base, weights = open_base(config=config, **checkpoint.state["base"])
    dtype = training_dtype(train.dtype, plan.device)
    decoder = adapter.trainable(
        config, train.kernel, plan.device, dtype, weights.items(), seed=train.seed
    )
    if checkpoint is not None:
        copy_adapter(decoder, checkpoint.model)
    return decoder, base


def _set_weights(
    plan: RunPlan, decoder: Decoder, places: Places, stored: Path | None = None
) -> Checkpoint | None:
    """Set the weights of a decoder, or of a part of it, through its `places`.

    Args:
        plan: the run.
        decoder: the decoder, or this rank's part of it.
        places: the destinations of the weights.
        stored: a model folder; its weights replace the initial ones.

    Returns:
        The checkpoint of `init` if its optimizer state must be loaded too, or None.
    """
    recipe = plan.recipe
    if stored is not None:
        model = open_stored(stored).load_decoder(places=mapped_weights)
        load_weights(decoder, weights_of(model), places)
    elif plan.checkpoint is not None:
        load_weights(decoder, plan.checkpoint.model, places)
    elif recipe.init is not None:
        return start_weights(
            recipe.init,
            decoder,
            plan.notify,
            whole=plan.config,
            tokenizer=plan.tokenizer,
            places=places,
            with_optimizer=recipe.init_optimizer,
        )
    else:
        into = places(decoder)
        for name, values in plan.config.draw(decoder.device):
            into[name].copy_(values)
    return None


def with_whole_weights(step: TrainingStep, world: World, call: Call | None) -> Call | None:
    """Wrap a function so that weights outside the layers are gathered before it is called.

    The function calls parts of the model directly, so FSDP's hooks on the whole model do not run.
    """
    if call is None or not world.lockstep:
        return call
    from workhorse.parallel.division.sharding import gathered  # importing takes a second

    return gathered(step.objective)(call)
