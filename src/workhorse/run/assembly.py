"""Build the training loop of a recipe, for a new or a resumed run."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from workhorse import __version__
from workhorse.checkpoints import RunDirectory
from workhorse.checkpoints.runs.store import CheckpointStore
from workhorse.data import Batches, Dataset, ValidationBatches, sequence_start
from workhorse.devices.names import name_of, training_dtype, use_threads
from workhorse.execute.body import with_parameters_of
from workhorse.execute.choose import decoding_backend, training_announcement
from workhorse.models.describe import active_parameters, count_parameters, flops_per_token
from workhorse.nn import Decoder, DecoderConfig
from workhorse.parallel.division.teams import Teams
from workhorse.parallel.processes.world import World
from workhorse.run.init_from import check_tokens
from workhorse.run.initial_model import Built, Start, fitted_to_memory, with_whole_weights
from workhorse.run.inputs import (
    batches_of,
    check_needs,
    dataset_of,
    prepare_reference,
    rollouts_of,
    tokenizer_of,
)
from workhorse.run.minutes import settle
from workhorse.run.reference import reference_digest
from workhorse.run.resume import Resumption, check_same_run
from workhorse.tokenizers import Tokenizer
from workhorse.train.loop import Loop
from workhorse.train.objectives.distill import DistillConfig
from workhorse.train.randomness import seed_everything
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.report.metrics import Event, Listener, MetricsFile, notice, open_tracker
from workhorse.train.rewards import PythonRewardConfig
from workhorse.train.rollouts import Rollouts
from workhorse.train.speed import Peak
from workhorse.train.step.build import measured_peak, training_operators
from workhorse.train.step.step import TrainingStep
from workhorse.train.validation import RolloutValidator, Sampler, Validator
from workhorse.transforms.adapters import trained_parameters


def assemble(
    recipe: Recipe,
    run: RunDirectory,
    device: torch.device,
    on_event: Listener,
    store: CheckpointStore,
    *,
    at: Resumption,
    settings: Sequence[str] = (),
    world: World,
) -> Loop:
    """Build tokenizer, data, model, optimizer and loop, for a new run or from a checkpoint.

    Nothing is written into the run directory before all checks have passed, except the tokenizer
    and the token shards that a new run makes from its data.
    """
    config = recipe.train
    checkpoint = at.checkpoint
    notify = partial(notice, on_event)
    if config.threads:
        use_threads(config.threads)
    listener = _with_trackers(recipe, run, on_event) if world.is_first else on_event
    with world.first_before_others():
        tokenizer = tokenizer_of(recipe, run, notify)
        if recipe.init is not None and checkpoint is None:
            check_tokens(
                recipe.init,
                tokenizer,
                setting="init",
                remedy="remove tokenizer, or set 'tokenizer={{kind: file, path: {folder}}}'",
            )
        if isinstance(config.objective, DistillConfig):
            check_tokens(
                config.objective.teacher,
                tokenizer,
                setting="teacher",
                remedy="choose a teacher with the same tokenizer",
            )
        dataset = dataset_of(recipe, tokenizer, run, on_event)
    batches = batches_of(recipe, dataset, at, notify)
    decoder_config = recipe.decoder_config(tokenizer.vocab_size)
    constants = _constants(config, decoder_config, tokenizer, dataset)
    if checkpoint is not None:
        constants["reference"] = reference_digest(config, run.reference_folder)
        check_same_run(run, recipe, at, constants)
    fitted = fitted_to_memory(recipe, decoder_config, device, at, world)
    start = Start(
        recipe.replace(train=fitted.to_dict()),
        decoder_config,
        tokenizer,
        device,
        world,
        checkpoint,
        notify,
    )
    if config.rollouts is None:
        check_needs(config, batches, at)
    prepare_reference(start, run, dataset)
    minutes = config.minutes
    recipe = _with_steps(recipe, start, batches, dataset)
    config = recipe.train
    constants["recipe"] = recipe.to_dict()
    seed_everything(config.seed)
    model = start.build()
    reference, step, teams = model.reference, model.step, model.teams
    rollouts = rollouts_of(start, run, model, batches)
    constants |= {
        "reference": constants.get("reference") or reference_digest(config, run.reference_folder),
        "micro_batch_size": step.micro_batch_size,
        **model.constants,
    }
    gathered = partial(with_whole_weights, step, world)
    loop = Loop(
        config=config,
        step=step,
        weights=model.weights,
        batches=rollouts or batches,
        validate=gathered(_validator(recipe, step, dataset, world, rollouts)),
        sample=gathered(_sampler(recipe, reference, step, tokenizer, teams, world=world)),
        store=store,
        metrics=MetricsFile(run.metrics_file, at.step),
        on_event=listener,
        constants=constants,
        flops_per_token=flops_per_token(
            decoder_config.build(device="meta"), config.seq_len, frozen=model.base is not None
        ),
        peak=Peak(partial(measured_peak, config, device)),
        check_place=run.check_place,
        world=world,
        look_first=recipe.init is not None,
    )
    if checkpoint is not None:
        loop.restore(checkpoint, at.rows)
    if not world.is_first:
        return loop
    if checkpoint is not None:
        store.prune(checkpoint.step)  # frees disk space if the recipe now keeps fewer checkpoints
    run.save_config(decoder_config)
    loop.metrics.open()
    run.rewrite_recipe(recipe.to_yaml())  # last: from here on all changes count as accepted
    for change in at.changes:
        loop.notify("change", setting=change.setting, before=change.before, now=change.now)
    notify(_execution_of(step, config))
    _notify_start(loop, recipe, decoder_config, dataset, settings, minutes=minutes, model=model)
    return loop


def _with_steps(recipe: Recipe, start: Start, batches: Batches, dataset: Dataset) -> Recipe:
    """Replace `minutes` of a recipe by `steps`, by timing a separate copy of the model."""
    config, held_out = recipe.train, dataset.validation
    if config.minutes is None:
        return recipe
    seed_everything(config.seed)
    rows = 0 if held_out is None else held_out.n_tokens / config.tokens_per_step
    settled = partial(settle, held_out=rows, notify=start.notify)
    config = settled(config, start.build().step, batches, start.world)
    gc.collect()  # frees the memory of the timed model
    return recipe.replace(train=config.to_dict())


def _constants(
    train: TrainConfig, config: DecoderConfig, tokenizer: Tokenizer, dataset: Dataset
) -> dict[str, Any]:
    """Return the values that identify a run: model config, fingerprints and versions.

    Every checkpoint stores them in addition to the recipe.
    """
    reward = train.rollouts.reward if train.rollouts else None
    return {
        "config": config.to_dict(),
        "tokenizer": tokenizer.fingerprint,
        "data": dataset.fingerprint,
        "teacher": train.objective.fingerprint()
        if isinstance(train.objective, DistillConfig)
        else None,
        "reward": reward.fingerprint() if isinstance(reward, PythonRewardConfig) else None,
        "versions": {"workhorse": __version__, "torch": torch.__version__},
    }


def _execution_of(step: TrainingStep, config: TrainConfig) -> str:
    """Describe in one line how the steps of a run are executed."""
    dtype = training_dtype(config.dtype, step.device)
    operators = training_operators(step.device, dtype, config.execution)
    return training_announcement(step.objective, operators, compiled=config.execution == "compiled")


def _notify_start(
    loop: Loop,
    recipe: Recipe,
    config: DecoderConfig,
    dataset: Dataset,
    settings: Sequence[str],
    *,
    minutes: float | None,
    model: Built,
) -> None:
    loop.notify(
        "start",
        time=time.time(),
        name=recipe.name,
        settings=list(settings),
        device=name_of(loop.step.device),
        threads=torch.get_num_threads(),
        parallel={name: ways for name, ways in recipe.parallel.ways.items() if ways > 1},
        parameters=count_parameters(config)["total"],
        active_parameters=active_parameters(config),
        **(
            {}
            if model.base is None
            else {"trained_parameters": trained_parameters(model.reference)}
        ),
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


def _validator(
    recipe: Recipe, step: TrainingStep, dataset: Dataset, world: World, rollouts: Rollouts | None
) -> Validator | RolloutValidator | None:
    """Return the validator; None without validation data.

    It shares the objective with training, so that modules are compiled only once.
    """
    if dataset.validation is None:
        return None
    batches = partial(
        ValidationBatches,
        dataset.validation,
        seq_len=recipe.train.seq_len,
        packing=recipe.data.packing,
        too_long=recipe.data.too_long,
    )
    if rollouts is not None and rollouts.reward is not None:
        prompts = batches(batch_size=recipe.train.batch_size, packing="padded")
        return RolloutValidator(rollouts, prompts)
    return Validator(
        step.objective,
        dataset.validation,
        step.device,
        precision=step.precision,
        batches=partial(batches, batch_size=step.micro_batch_size),
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
    """Return a function that generates samples, on rank 0, or on all ranks of a sharded model.

    The samples are generated by a copy of the decoder that is optimised for decoding and shares the
    weights in training. Weights sharded by FSDP are gathered for it. With context, tensor, pipeline
    or expert parallelism, the decoder in training generates the samples, with collectives.
    """
    samples, parallel = recipe.train.samples, recipe.parallel
    if samples is None or not (world.is_first or world.lockstep):
        return None
    execution = "reference" if recipe.train.execution == "reference" else "auto"
    trained = step.objective.decoder
    chats = recipe.data.has_conversations and tokenizer.chat_templates
    begin = None if chats else sequence_start(tokenizer, recipe.data)
    sampler = Sampler(tokenizer, samples, begin, trained.max_seq_len)
    if not world.lockstep:
        return partial(sampler, decoding_backend(reference, execution, wait=True))
    if max(parallel.context, parallel.tensor, parallel.pipeline, parallel.expert) > 1:
        return teams.for_generation()(partial(sampler, trained))
    from workhorse.parallel.division.sharding import whole_weights  # importing takes a second

    def sample() -> list[dict[str, str]]:
        with whole_weights(step.objective):
            whole = with_parameters_of(reference, trained)
            return sampler(decoding_backend(whole, execution, wait=True))

    return sample


def _with_trackers(recipe: Recipe, run: RunDirectory, on_event: Listener) -> Listener:
    """Return a listener that also passes events to the trackers of a recipe."""
    trackers = {
        name: open_tracker(name, recipe.name, recipe.to_dict(), run.path)
        for name in recipe.train.trackers
    }

    def notify_all(event: Event) -> None:
        on_event(event)
        for name, track in list(trackers.items()):
            try:
                track(event)
            except Exception as error:  # a failing tracker must not stop training
                del trackers[name]
                notice(on_event, f"the tracker {name} failed and is disabled: {error!r}")

    return notify_all
