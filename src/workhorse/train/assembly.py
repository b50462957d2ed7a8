"""From a recipe to a training loop that is ready for its next step."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from workhorse import __version__
from workhorse.checkpoints import (
    Checkpoint,
    Places,
    RunDirectory,
    empty_decoder,
    load_weights,
    weights_of,
)
from workhorse.config.base import ConfigError
from workhorse.data import Batches, Dataset, beginning, prepare, prepare_tokenizer
from workhorse.devices.names import name_of, training_dtype, use_threads
from workhorse.execute.body import with_parameters_of
from workhorse.execute.choose import decoding_body, training_announcement
from workhorse.memory.capacity import check_training, fit_micro_batch
from workhorse.models.describe import active_parameters, count_parameters, flops_per_token
from workhorse.nn import Decoder, DecoderConfig
from workhorse.parallel.division.teams import Teams, make_teams
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.world import World
from workhorse.tokenizers import Tokenizer
from workhorse.train.init_from import check_tokens, start_optimizer, start_weights
from workhorse.train.loop import Loop
from workhorse.train.minutes import settle
from workhorse.train.recipe.recipe import Recipe, TrainConfig
from workhorse.train.report.metrics import Event, MetricsFile, open_tracker
from workhorse.train.resume import Resumption, check_same_run, seed_everything
from workhorse.train.saver import Store
from workhorse.train.speed import Peak
from workhorse.train.step.build import build_step, measured_peak, training_operators
from workhorse.train.step.step import TrainingStep
from workhorse.train.validation import Sampler, Validator

Listener = Callable[[Event], None]
GiveWeights = Callable[[Decoder, Places], Checkpoint | None]
Call = TypeVar("Call", bound=Callable[..., object])


def assemble(
    recipe: Recipe,
    run: RunDirectory,
    device: torch.device,
    on_event: Listener,
    store: Store,
    *,
    at: Resumption,
    settings: Sequence[str] = (),
    world: World,
) -> Loop:
    """Tokenizer, data, model and optimizer, fresh or from a checkpoint.

    Nothing is written into the run directory before everything is accepted, except the tokenizer
    and the token shards that a fresh run makes from its text.
    """
    config = recipe.train
    checkpoint = at.checkpoint
    tell = partial(_tell, on_event)
    if config.threads:
        use_threads(config.threads)
    listener = _with_trackers(recipe, run, on_event) if world.is_first else on_event
    with world.first_before_others():
        tokenizer = _tokenizer(recipe, run, tell)
        if recipe.init is not None and checkpoint is None:
            check_tokens(recipe.init, tokenizer)
        dataset = _dataset(recipe, tokenizer, run, on_event)
    batches = _batches(recipe, dataset, at)
    _check_needs(config, batches, at)
    decoder_config = recipe.decoder_config(tokenizer.vocab_size)
    constants = _constants(decoder_config, tokenizer, dataset)
    if checkpoint is not None:
        check_same_run(run, recipe, at, constants)
    fitted = _fitted(recipe, decoder_config, device, at, world)
    if environment.rank_here() == 0:  # for all on this machine, before any takes memory
        check_training(
            decoder_config, fitted, device, packed=recipe.data.packed, parallel=recipe.parallel
        )
    world.wait()
    built = partial(
        _built,
        recipe.replace(train=fitted.to_dict()),
        decoder_config,
        device,
        world,
        partial(_give_weights, recipe, decoder_config, checkpoint, tell=tell),
    )
    minutes = config.minutes
    recipe = _with_steps(recipe, built, batches, dataset, world=world, tell=tell)
    config = recipe.train
    constants["recipe"] = recipe.to_dict()
    seed_everything(config.seed)
    reference, step, teams = built()
    constants["micro_batch_size"] = step.micro_batch_size
    together = partial(_together, step, world)
    loop = Loop(
        config=config,
        step=step,
        weights=lambda: step.optimizer.masters.weights(step.objective.decoder),
        batches=batches,
        validate=together(_validator(recipe, step, dataset, world)),
        sample=together(_sampler(recipe, reference, step, tokenizer, teams, world=world)),
        store=store,
        metrics=MetricsFile(run.metrics_file, at.step),
        on_event=listener,
        constants=constants,
        flops_per_token=flops_per_token(decoder_config.build(device="meta"), config.seq_len),
        peak=Peak(partial(measured_peak, config, device)),
        check_place=run.check_place,
        world=world,
    )
    if checkpoint is not None:
        loop.restore(checkpoint, at.rows)
    if not world.is_first:
        return loop
    if checkpoint is not None:
        store.prune(checkpoint.step)  # makes room on a full disk if fewer are kept from now on
    run.save_config(decoder_config)
    loop.metrics.open()
    run.rewrite_recipe(recipe.to_yaml())  # last, since it says that all changes were accepted
    for change in at.changes:
        loop.tell("change", setting=change.setting, before=change.before, now=change.now)
    operators = training_operators(device, training_dtype(config.dtype, device), config.execution)
    compiled = config.execution == "compiled"
    tell(training_announcement(step.objective, operators, compiled=compiled))
    _tell_start(loop, recipe, decoder_config, dataset, settings, minutes=minutes)
    return loop


class _Built(NamedTuple):
    """A model, and the step that trains it."""

    reference: Decoder
    """As built; without data if weights are divided."""
    step: TrainingStep
    teams: Teams


def _built(
    recipe: Recipe,
    config: DecoderConfig,
    device: torch.device,
    world: World,
    give_weights: GiveWeights,
) -> _Built:
    """The decoder, with the weights it begins with, and the step that trains it."""
    train, parallel, divided = recipe.train, recipe.parallel, world.in_step
    teams = make_teams(world, parallel, config.vocab_size)
    if divided:
        decoder, other = teams.build(config, train.kernel, "meta"), None
    else:
        decoder = empty_decoder(config, train.kernel, device, torch.float32)
        other = give_weights(decoder, weights_of)
    step = build_step(
        decoder, train, device, parallel=parallel, world=world, teams=teams, whole=config
    )
    if divided:  # only its parts of the weights were allocated
        other = give_weights(step.objective.decoder, step.optimizer.masters.places)
    if other is not None:
        start_optimizer(str(recipe.init), other, step.optimizer, train.optimizer.kind)
    return _Built(decoder, step, teams)


def _with_steps(
    recipe: Recipe,
    built: Callable[[], _Built],
    batches: Batches,
    dataset: Dataset,
    *,
    world: World,
    tell: Callable[[str], None],
) -> Recipe:
    """The recipe with `steps` in place of `minutes`, found by timing a model of its own."""
    config, held_out = recipe.train, dataset.validation
    if config.minutes is None:
        return recipe
    seed_everything(config.seed)
    rows = 0 if held_out is None else held_out.n_tokens / config.tokens_per_step
    config = settle(config, built().step, batches, world, held_out=rows, tell=tell)
    gc.collect()  # the memory of what was timed is wanted
    return recipe.replace(train=config.to_dict())


def _dataset(
    recipe: Recipe, tokenizer: Tokenizer, run: RunDirectory, on_event: Listener
) -> Dataset:
    """The recipe's text as tokens, made unless the run has them."""
    return prepare(
        recipe.data,
        tokenizer,
        run.data_folder,
        progress=lambda done, total: on_event({"kind": "data", "done": done, "total": total}),
        tell=partial(_tell, on_event),
    )


def _batches(recipe: Recipe, dataset: Dataset, at: Resumption) -> Batches:
    """The batches of training, from the row that comes next."""
    config = recipe.train
    return Batches(
        dataset.train,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
        packing=recipe.data.packing,
        offset=at.rows - at.step * config.batch_size,
    )


def _check_needs(config: TrainConfig, batches: Batches, at: Resumption) -> None:
    """Refuse an objective whose batches lack something."""
    needs = config.objective.needs
    missing = [name for name in needs if getattr(batches[at.step], name) is None]
    if missing:
        raise ConfigError(
            f"the objective {config.objective.kind} needs {' and '.join(missing)}, which this data "
            "does not have; choose data that does, or another objective",
            "train.objective",
        )


def _constants(config: DecoderConfig, tokenizer: Tokenizer, dataset: Dataset) -> dict[str, Any]:
    """The facts about the run that every checkpoint holds, beside its recipe."""
    return {
        "config": config.to_dict(),
        "tokenizer": tokenizer.fingerprint,
        "data": dataset.fingerprint,
        "versions": {"workhorse": __version__, "torch": torch.__version__},
    }


def _tell_start(
    loop: Loop,
    recipe: Recipe,
    config: DecoderConfig,
    dataset: Dataset,
    settings: Sequence[str],
    *,
    minutes: float | None,
) -> None:
    loop.tell(
        "start",
        time=time.time(),
        name=recipe.name,
        settings=list(settings),
        device=name_of(loop.step.device),
        threads=torch.get_num_threads(),
        parallel={name: ways for name, ways in recipe.parallel.ways.items() if ways > 1},
        parameters=count_parameters(config)["total"],
        active_parameters=active_parameters(config),
        steps=loop.config.steps,
        **({} if minutes is None else {"minutes": minutes}),
        tokens_per_step=loop.config.tokens_per_step,
        micro_batch_size=loop.step.micro_batch_size,
        train_tokens=dataset.train.n_tokens,
        validation_tokens=0 if dataset.validation is None else dataset.validation.n_tokens,
        flops_per_token=loop.flops_per_token,
        peak_flops=loop.peak.flops,
        versions=loop.constants["versions"],
    )


def _tell(on_event: Listener, line: str) -> None:
    on_event({"kind": "notice", "message": line})


def _give_weights(
    recipe: Recipe,
    config: DecoderConfig,
    checkpoint: Checkpoint | None,
    decoder: Decoder,
    places: Places,
    *,
    tell: Callable[[str], None],
) -> Checkpoint | None:
    """Give a decoder the weights of a checkpoint, of the recipe's `init`, or fresh ones.

    Args:
        recipe: of the run.
        config: of the whole model.
        checkpoint: to go on from.
        decoder: allocated.
        places: where its weights are copied to.
        tell: called with remarks.

    Returns:
        The checkpoint whose optimizer state is to be loaded, beside the weights of `init`.
    """
    if checkpoint is not None:
        load_weights(decoder, checkpoint.model, places)
        return None
    if recipe.init is not None:
        with_optimizer = recipe.init_optimizer
        return start_weights(
            recipe.init, decoder, tell, places=places, with_optimizer=with_optimizer
        )
    into = places(decoder)
    for name, values in config.draw(decoder.device):
        into[name].copy_(values)
    return None


def _fitted(
    recipe: Recipe, config: DecoderConfig, device: torch.device, at: Resumption, world: World
) -> TrainConfig:
    """The settings with a number for `micro_batch_size: auto`: the checkpoint's, if it has one.

    All processes take the least that any of them has room for.
    """
    train = recipe.train
    if train.micro_batch_size == "auto" and at.checkpoint is not None:
        train = train.replace(micro_batch_size=at.micro_batch_size(train.batch_size))
    fitted = fit_micro_batch(
        config, train, device, packed=recipe.data.packed, parallel=recipe.parallel
    )
    size = fitted.micro_batch_size
    return fitted.replace(micro_batch_size=-world.most(-size)) if isinstance(size, int) else fitted


def _tokenizer(recipe: Recipe, run: RunDirectory, tell: Callable[[str], None]) -> Tokenizer:
    """The run's tokenizer, trained on the recipe's training text if there is none yet."""
    if not run.tokenizer_folder.exists():
        made = prepare_tokenizer(recipe.tokenizer, recipe.data, run.data_folder, tell=tell)
        run.save_tokenizer(made)
    return run.tokenizer()


def _validator(
    recipe: Recipe, step: TrainingStep, dataset: Dataset, world: World
) -> Validator | None:
    """The validator, which runs the trained module itself so that it is compiled once."""
    if dataset.validation is None:
        return None
    return Validator(
        step.objective,
        dataset.validation,
        step.device,
        precision=step.precision,
        seq_len=recipe.train.seq_len,
        batch_size=step.micro_batch_size,
        packing=recipe.data.packing,
        world=world,
    )


def _sampler(
    recipe: Recipe,
    reference: Decoder,
    step: TrainingStep,
    tokenizer: Tokenizer,
    teams: Teams,
    *,
    world: World,
) -> Callable[[], list[dict[str, str]]] | None:
    """A function that generates samples, for the first process, or all if the model is divided.

    They are generated by a decoding body with the weights that are being trained. If FSDP shards
    these, they are gathered for it. A model whose layers or stages are divided decodes by its
    training body, with collectives.
    """
    samples, parallel = recipe.train.samples, recipe.parallel
    if samples is None or not (world.is_first or world.in_step):
        return None
    execution = "reference" if recipe.train.execution == "reference" else "auto"
    trained = step.objective.decoder
    sampler = Sampler(trained, tokenizer, samples, beginning(tokenizer, recipe.data))
    if not world.in_step:
        sampler.decoder = decoding_body(reference, execution, wait=True).decoder
        return sampler
    if max(parallel.context, parallel.tensor, parallel.pipeline, parallel.expert) > 1:
        return teams.of_texts()(sampler)
    from workhorse.parallel.division.sharding import whole_weights  # takes a second

    def sample() -> list[dict[str, str]]:
        with whole_weights(step.objective):
            whole = with_parameters_of(reference, trained)
            sampler.decoder = decoding_body(whole, execution, wait=True).decoder
            try:
                return sampler()
            finally:
                sampler.decoder = trained  # the gathered weights are about to be freed

    return sample


def _together(step: TrainingStep, world: World, call: Call | None) -> Call | None:
    """A call of parts of the model, which are gathered for it where FSDP divides weights."""
    if call is None or not world.in_step:
        return call
    from workhorse.parallel.division.sharding import gathered  # takes a second

    return gathered(step.objective)(call)


def _with_trackers(recipe: Recipe, run: RunDirectory, on_event: Listener) -> Listener:
    trackers = {
        name: open_tracker(name, recipe.name, recipe.to_dict(), run.path)
        for name in recipe.train.trackers
    }

    def tell_all(event: Event) -> None:
        on_event(event)
        for name, track in list(trackers.items()):
            try:
                track(event)
            except Exception as error:  # a service's failure is no reason to lose a step
                del trackers[name]
                _tell(on_event, f"the tracker {name} failed and is left out: {error!r}")

    return tell_all
