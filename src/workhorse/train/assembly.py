"""Build the training loop of a recipe, for a new or a resumed run."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from workhorse import __version__
from workhorse.checkpoints import (
    Checkpoint,
    Places,
    RunDirectory,
    empty_decoder,
    load_weights,
    weights_of,
)
from workhorse.checkpoints.adapted import AdapterConfig, Base, copy_adapter, open_base
from workhorse.checkpoints.runs.store import CheckpointStore
from workhorse.config.base import ConfigError
from workhorse.data import (
    Batches,
    Dataset,
    ValidationBatches,
    prepare,
    prepare_tokenizer,
    sequence_start,
)
from workhorse.devices.names import name_of, training_dtype, use_threads
from workhorse.devices.transfer import copy_tensors
from workhorse.errors import WorkhorseError
from workhorse.execute.body import with_parameters_of
from workhorse.execute.choose import decoding_body, training_announcement
from workhorse.generate.conversation import TemplateFormat
from workhorse.memory.capacity import check_training, fit_micro_batch
from workhorse.models.describe import active_parameters, count_parameters, flops_per_token
from workhorse.nn import Decoder, DecoderConfig
from workhorse.parallel.division.teams import Teams, make_teams
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.world import World
from workhorse.tokenizers import ChatTemplate, Tokenizer
from workhorse.train.init_from import check_tokens, start_optimizer, start_weights
from workhorse.train.loop import Loop
from workhorse.train.minutes import settle
from workhorse.train.recipe.recipe import Recipe, TrainConfig
from workhorse.train.reference import compute_references, load_references
from workhorse.train.report.metrics import Event, MetricsFile, open_tracker
from workhorse.train.resume import Resumption, check_same_run, seed_everything
from workhorse.train.rollouts import Rollouts
from workhorse.train.speed import Peak
from workhorse.train.step.build import build_step, measured_peak, training_operators
from workhorse.train.step.step import TrainingStep
from workhorse.train.validation import RolloutValidator, Sampler, Validator

Listener = Callable[[Event], None]
GiveWeights = Callable[[Decoder, Places], Checkpoint | None]
Call = TypeVar("Call", bound=Callable[..., object])


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
    notify = partial(_notify, on_event)
    if config.threads:
        use_threads(config.threads)
    listener = _with_trackers(recipe, run, on_event) if world.is_first else on_event
    with world.first_before_others():
        tokenizer = _tokenizer(recipe, run, notify)
        if recipe.init is not None and checkpoint is None:
            check_tokens(recipe.init, tokenizer)
        dataset = _dataset(recipe, tokenizer, run, on_event)
    batches = _batches(recipe, dataset, at, notify)
    decoder_config = recipe.decoder_config(tokenizer.vocab_size)
    constants = _constants(decoder_config, tokenizer, dataset)
    if checkpoint is not None:
        check_same_run(run, recipe, at, constants)
    fitted = _fitted(recipe, decoder_config, device, at, world)
    if environment.rank_here() == 0:  # for all ranks of this machine, before any allocates memory
        check_training(
            decoder_config,
            fitted,
            device,
            packed=recipe.data.packed,
            parallel=recipe.parallel,
            adapter=recipe.adapter,
        )
    world.wait()
    built = partial(
        _built,
        recipe.replace(train=fitted.to_dict()),
        decoder_config,
        device,
        world,
        partial(
            _give_weights, recipe, decoder_config, checkpoint, tokenizer=tokenizer, notify=notify
        ),
        checkpoint=checkpoint,
    )
    if config.rollouts is None:
        _check_needs(config, batches, at)
    _reference(recipe, run, dataset, built, at, world=world, notify=notify)
    minutes = config.minutes
    recipe = _with_steps(recipe, built, batches, dataset, world=world, notify=notify)
    config = recipe.train
    constants["recipe"] = recipe.to_dict()
    seed_everything(config.seed)
    model = built()
    reference, step, teams = model.reference, model.step, model.teams
    rollouts = _rollouts(recipe, reference, batches, tokenizer, world)
    constants |= {"micro_batch_size": step.micro_batch_size, **model.constants}
    together = partial(_together, step, world)
    loop = Loop(
        config=config,
        step=step,
        weights=model.weights,
        batches=rollouts or batches,
        validate=together(_validator(recipe, step, dataset, world, rollouts)),
        sample=together(_sampler(recipe, reference, step, tokenizer, teams, world=world)),
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
    operators = training_operators(device, training_dtype(config.dtype, device), config.execution)
    compiled = config.execution == "compiled"
    notify(training_announcement(step.objective, operators, compiled=compiled))
    _tell_start(loop, recipe, decoder_config, dataset, settings, minutes=minutes)
    return loop


class _Built(NamedTuple):
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
        masters = self.step.optimizer.masters
        return masters.trained() if self.base else masters.weights(self.step.objective.decoder)

    @property
    def constants(self) -> dict[str, Any]:
        """What a checkpoint adds to the constants of a run."""
        return {} if self.base is None else {"base": asdict(self.base)}


def _built(
    recipe: Recipe,
    config: DecoderConfig,
    device: torch.device,
    world: World,
    give_weights: GiveWeights,
    *,
    checkpoint: Checkpoint | None,
) -> _Built:
    """Build the decoder with its initial weights, and the step that trains it."""
    train, parallel, divided = recipe.train, recipe.parallel, world.lockstep
    if recipe.adapter is not None:
        decoder, base = _adapted(recipe, recipe.adapter, config, device, checkpoint)
        return _Built(
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
    return _Built(decoder, step, teams)


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


def _reference(
    recipe: Recipe,
    run: RunDirectory,
    dataset: Dataset,
    built: Callable[[], _Built],
    at: Resumption,
    *,
    world: World,
    notify: Callable[[str], None],
) -> None:
    """Load the reference model's log-probabilities if the objective needs them.

    A new run computes them first.
    """
    if "reference" not in recipe.train.objective.needs:
        return
    if load_references(dataset, run.reference_folder):
        return
    if at.checkpoint is not None:
        raise WorkhorseError(
            f"{run.reference_folder} is missing, the log-probabilities of the model that this run "
            "started from; restore it, or start a new run"
        )
    notify("computing the reference model's log-probabilities")
    seed_everything(recipe.train.seed)  # so that random weights are those that training starts from
    step = built().step
    compute = partial(
        compute_references,
        step,
        dataset,
        run.reference_folder,
        seq_len=recipe.train.seq_len,
        too_long=recipe.data.too_long,
        world=world,
    )
    together = _together(step, world, compute)
    assert together is not None
    together()
    gc.collect()  # frees the memory of this model


def _with_steps(
    recipe: Recipe,
    built: Callable[[], _Built],
    batches: Batches,
    dataset: Dataset,
    *,
    world: World,
    notify: Callable[[str], None],
) -> Recipe:
    """Replace `minutes` of a recipe by `steps`, by timing a separate copy of the model."""
    config, held_out = recipe.train, dataset.validation
    if config.minutes is None:
        return recipe
    seed_everything(config.seed)
    rows = 0 if held_out is None else held_out.n_tokens / config.tokens_per_step
    config = settle(config, built().step, batches, world, held_out=rows, notify=notify)
    gc.collect()  # frees the memory of the timed model
    return recipe.replace(train=config.to_dict())


def _dataset(
    recipe: Recipe, tokenizer: Tokenizer, run: RunDirectory, on_event: Listener
) -> Dataset:
    """Return the recipe's data as tokens; data is tokenized only if the run has no tokens yet."""
    return prepare(
        recipe.data,
        tokenizer,
        run.data_folder,
        progress=lambda done, total: on_event({"kind": "data", "done": done, "total": total}),
        notify=partial(_notify, on_event),
    )


def _batches(
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


def _check_needs(config: TrainConfig, batches: Batches, at: Resumption) -> None:
    """Raise ConfigError if the batches lack a field that the objective needs."""
    needs = [name for name in config.objective.needs if name != "reference"]  # see `_reference`
    missing = [name for name in needs if getattr(batches[at.step], name, None) is None]
    if missing:
        raise ConfigError(
            f"the objective {config.objective.kind} needs {' and '.join(missing)}, which this data "
            "does not have; use other data, or another objective",
            "train.objective",
        )


def _constants(config: DecoderConfig, tokenizer: Tokenizer, dataset: Dataset) -> dict[str, Any]:
    """Return the values that identify a run: model config, fingerprints and versions.

    Every checkpoint stores them in addition to the recipe.
    """
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


def _notify(on_event: Listener, line: str) -> None:
    on_event({"kind": "notice", "message": line})


def _give_weights(
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

    `config` describes the whole model, of which `decoder` may be a part. `places` returns the
    tensors of the decoder that weights are copied to.

    Returns:
        The checkpoint of `init` whose optimizer state must be loaded too, or None.
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


def _fitted(
    recipe: Recipe, config: DecoderConfig, device: torch.device, at: Resumption, world: World
) -> TrainConfig:
    """Replace `micro_batch_size: auto` by a size, from the checkpoint if there is one.

    All ranks use the size of the rank with the least memory.
    """
    train = recipe.train
    if train.micro_batch_size == "auto" and at.checkpoint is not None:
        train = train.replace(micro_batch_size=at.micro_batch_size(train.batch_size))
    fitted = fit_micro_batch(
        config,
        train,
        device,
        packed=recipe.data.packed,
        parallel=recipe.parallel,
        adapter=recipe.adapter,
    )
    size = fitted.micro_batch_size
    return fitted.replace(micro_batch_size=-world.most(-size)) if isinstance(size, int) else fitted


def _tokenizer(recipe: Recipe, run: RunDirectory, notify: Callable[[str], None]) -> Tokenizer:
    """Return the run's tokenizer; it is trained on the training data if there is none yet."""
    if not run.tokenizer_folder.exists():
        made = prepare_tokenizer(recipe.tokenizer, recipe.data, run.data_folder, notify=notify)
        run.save_tokenizer(made)
    return run.tokenizer()


def _rollouts(
    recipe: Recipe, reference: Decoder, prompts: Batches, tokenizer: Tokenizer, world: World
) -> Rollouts | None:
    """Return the batches of a run that learns from rewards; None for other runs."""
    config = recipe.train.rollouts
    if config is None:
        return None
    execution = "reference" if recipe.train.execution == "reference" else "auto"
    return Rollouts(
        prompts,
        decoding_body(reference, execution, wait=True).decoder,
        tokenizer,
        config,
        stop_tokens=_stop_tokens(recipe, tokenizer),
        reward=config.reward.build(),
        seed=recipe.train.seed,
        world=world,
    )


def _stop_tokens(recipe: Recipe, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids that end a completion."""
    if recipe.data.has_conversations:
        return TemplateFormat(ChatTemplate.of(tokenizer), tokenizer).stop_tokens
    return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


def _validator(
    recipe: Recipe, step: TrainingStep, dataset: Dataset, world: World, rollouts: Rollouts | None
) -> Validator | RolloutValidator | None:
    """Return the validator; None without validation data.

    It shares the objective with training, so that modules are compiled only once.
    """
    if dataset.validation is None:
        return None
    if rollouts is not None:
        prompts = ValidationBatches(
            dataset.validation,
            seq_len=recipe.train.seq_len,
            batch_size=recipe.train.batch_size,
            packing="padded",
            too_long=recipe.data.too_long,
        )
        return RolloutValidator(rollouts, prompts)
    return Validator(
        step.objective,
        dataset.validation,
        step.device,
        precision=step.precision,
        seq_len=recipe.train.seq_len,
        batch_size=step.micro_batch_size,
        packing=recipe.data.packing,
        too_long=recipe.data.too_long,
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
    begin = None if recipe.data.has_conversations else sequence_start(tokenizer, recipe.data)
    sampler = Sampler(tokenizer, samples, begin, trained.max_seq_len)
    if not world.lockstep:
        return partial(sampler, decoding_body(reference, execution, wait=True).decoder)
    if max(parallel.context, parallel.tensor, parallel.pipeline, parallel.expert) > 1:
        return teams.for_generation()(partial(sampler, trained))
    from workhorse.parallel.division.sharding import whole_weights  # importing takes a second

    def sample() -> list[dict[str, str]]:
        with whole_weights(step.objective):
            whole = with_parameters_of(reference, trained)
            return sampler(decoding_body(whole, execution, wait=True).decoder)

    return sample


def _together(step: TrainingStep, world: World, call: Call | None) -> Call | None:
    """Wrap a function so that weights outside the layers are gathered before it is called.

    The function calls parts of the model directly, so FSDP's hooks on the whole model do not run.
    """
    if call is None or not world.lockstep:
        return call
    from workhorse.parallel.division.sharding import gathered  # importing takes a second

    return gathered(step.objective)(call)


def _with_trackers(recipe: Recipe, run: RunDirectory, on_event: Listener) -> Listener:
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
                _notify(on_event, f"the tracker {name} failed and is disabled: {error!r}")

    return notify_all
