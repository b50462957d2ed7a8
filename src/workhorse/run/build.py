"""Build a run from its plan: model, source of batches, validation, samples, and the loop."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from workhorse.checkpoints.runs.store import CheckpointStore
from workhorse.data import Batches, ValidationBatches, sequence_start
from workhorse.devices.names import name_of, training_dtype
from workhorse.errors import WorkhorseError
from workhorse.execute.body import Execution, with_parameters_of
from workhorse.execute.choose import decoding_backend, training_announcement
from workhorse.generate.conversation import TemplateFormat
from workhorse.models.describe import active_parameters, count_parameters, flops_per_token
from workhorse.run.minutes import settle
from workhorse.run.model import RunModel, build_model, with_whole_weights
from workhorse.run.plan import RunIdentity, RunPlan, reference_digest
from workhorse.run.reference import (
    initial_logprobs,
    prepare_references,
    token_values,
    trained_logprobs,
)
from workhorse.tokenizers import ChatTemplate
from workhorse.train.loop import Loop
from workhorse.train.randomness import seed_everything
from workhorse.train.report.metrics import Event, Listener, MetricsFile, notice, open_tracker
from workhorse.train.rollouts import Critic, Rollouts
from workhorse.train.speed import Peak
from workhorse.train.step.build import measured_peak, training_operators
from workhorse.train.validation import RolloutValidator, Sampler, Validator
from workhorse.transforms.adapters import trained_parameters


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that are built from its plan.

    Attributes:
        model: the model and the step that trains it.
        source: the batches of the steps.
        validate: measures the loss on held-out data; None without such data.
        sample: generates samples; None for no samples.
        identity: the identity of the run.
    """

    model: RunModel
    source: Batches | Rollouts
    validate: Validator | RolloutValidator | None
    sample: Callable[[], list[dict[str, str]]] | None
    identity: RunIdentity


def build_run(plan: RunPlan) -> tuple[RunPlan, RunParts]:
    """Build the parts of a run, with its initial weights.

    The model is built twice if its step runs before training. With `minutes`, timed steps change
    its weights and the state of its optimizer. FSDP prepares a divided step in its first
    pass, so a step that computed references cannot be trained.

    Returns:
        The plan, with the number of steps in place of `minutes`, and the parts.
    """
    seed = plan.recipe.train.seed
    seed_everything(seed)
    model = build_model(plan)
    has_run = prepare_references(plan, model)
    if plan.recipe.train.minutes is not None:
        plan, has_run = _with_steps(plan, model), True
    if has_run:
        del model
        gc.collect()  # frees its memory
        seed_everything(seed)
        model = build_model(plan)
    rollouts = _rollouts(plan, model)
    reference = plan.identity.reference or reference_digest(plan.train, plan.run.reference_folder)
    gathered = partial(with_whole_weights, model.step, plan.world)
    return plan, RunParts(
        model,
        rollouts or plan.batches,
        validate=gathered(_validator(plan, model, rollouts)),
        sample=gathered(_sampler(plan, model)),
        identity=replace(plan.identity, reference=reference, base=model.base),
    )


def build_loop(
    plan: RunPlan, parts: RunParts, store: CheckpointStore, settings: Sequence[str]
) -> Loop:
    """Build the training loop of a run, at its checkpoint, and record how the run starts.

    Args:
        plan: the plan, with a number of steps.
        parts: its parts.
        store: the checkpoint store.
        settings: the command line's overrides, which the report shows.
    """
    run, train, step, at = plan.run, plan.recipe.train, parts.model.step, plan.at
    has_base = parts.model.base is not None
    decoder = plan.config.build(device="meta")
    loop = Loop(
        config=train,
        step=step,
        weights=parts.model.weights,
        batches=parts.source,
        validate=parts.validate,
        sample=parts.sample,
        store=store,
        metrics=MetricsFile(run.metrics_file, at.step),
        on_event=_with_trackers(plan) if plan.world.is_first else plan.on_event,
        identity={
            **parts.identity.state(),
            "recipe": plan.recipe.to_dict(),
            "micro_batch_size": step.micro_batch_size,
        },
        flops_per_token=flops_per_token(decoder, train.seq_len, frozen=has_base),
        peak=Peak(partial(measured_peak, train, plan.device)),
        check_place=run.check_place,
        world=plan.world,
        look_first=plan.recipe.init is not None,
    )
    if at.checkpoint is not None:
        loop.restore(at.checkpoint, at.rows)
    if not plan.world.is_first:
        return loop
    if at.checkpoint is not None:
        store.prune(at.step)  # frees disk space if the recipe now keeps fewer checkpoints
    run.save_config(plan.config)
    loop.metrics.open()
    run.rewrite_recipe(plan.recipe.to_yaml())  # last: from here on all changes count as accepted
    for change in at.changes:
        loop.notify("change", setting=change.setting, before=change.before, now=change.now)
    plan.notify(_execution(plan, parts.model))
    _notify_start(loop, plan, parts.model, settings)
    return loop


def _with_steps(plan: RunPlan, model: RunModel) -> RunPlan:
    """Replace `minutes` of a plan's recipe by `steps`, by timing steps of a model."""
    train, held_out = plan.recipe.train, plan.dataset.validation
    rows = 0 if held_out is None else held_out.n_tokens / train.tokens_per_step
    timed = settle(train, model.step, plan.batches, plan.world, held_out=rows, notify=plan.notify)
    return replace(plan, recipe=plan.recipe.replace(train=timed.to_dict()), minutes=train.minutes)


def _rollouts(plan: RunPlan, model: RunModel) -> Rollouts | None:
    """Return the batches of a run that learns from its own completions; None for other runs.

    They are generated with the current weights of `model`.
    """
    train = plan.train
    config, values = train.rollouts, train.objective.critic
    if config is None:
        return None
    exact, reference = config.exact, model.reference
    backend = decoding_backend(reference, _decoding(plan), wait=True, exact=exact, scores=exact)
    if exact and not backend.is_invariant:
        raise WorkhorseError(
            f"rollouts.exact is not possible for this model ({backend.announcement}); remove it"
        )
    rollouts = Rollouts(
        plan.batches,
        backend,
        plan.tokenizer,
        config,
        stop_tokens=_stop_tokens(plan),
        reward=None if config.reward is None else config.reward.build(),
        seed=train.seed,
        reference=initial_logprobs(plan, model) if train.objective.reference else None,
        critic=None if values is None else Critic(values, token_values(model.step)),
        world=plan.world,
        notify=plan.notify,
    )
    if exact:
        rollouts.check_exact(plan.at.step, trained_logprobs(model.step), backend.announcement)
    return rollouts


def _decoding(plan: RunPlan) -> Execution:
    """Return how a run generates: by modules only if it is trained by them."""
    return "reference" if plan.recipe.train.execution == "reference" else "auto"


def _stop_tokens(plan: RunPlan) -> tuple[int, ...]:
    """Return the token ids that end a completion."""
    tokenizer = plan.tokenizer
    if plan.recipe.data.has_conversations and tokenizer.chat_templates:
        return TemplateFormat(ChatTemplate.of(tokenizer), tokenizer).stop_tokens
    return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


def _validator(
    plan: RunPlan, model: RunModel, rollouts: Rollouts | None
) -> Validator | RolloutValidator | None:
    """Return the validator; None without validation data.

    It shares the objective with training, so that modules are compiled only once.
    """
    held_out, train, step = plan.dataset.validation, plan.recipe.train, model.step
    if held_out is None:
        return None
    batches = partial(
        ValidationBatches,
        held_out,
        seq_len=train.seq_len,
        packing=plan.recipe.data.packing,
        too_long=plan.recipe.data.too_long,
    )
    if rollouts is not None and rollouts.reward is not None:
        return RolloutValidator(rollouts, batches(batch_size=train.batch_size, packing="padded"))
    return Validator(
        step.objective,
        held_out,
        step.device,
        precision=step.precision,
        batches=partial(batches, batch_size=step.micro_batch_size),
        world=plan.world,
    )


def _sampler(plan: RunPlan, model: RunModel) -> Callable[[], list[dict[str, str]]] | None:
    """Return a function that generates samples, on rank 0, or on all ranks of a sharded model.

    The samples are generated by a copy of the decoder that is optimised for decoding and shares the
    weights in training. Weights sharded by FSDP are gathered for it. With context, tensor, pipeline
    or expert parallelism, the decoder in training generates the samples, with collectives.
    """
    recipe, world, tokenizer = plan.recipe, plan.world, plan.tokenizer
    samples, parallel = recipe.train.samples, recipe.parallel
    if samples is None or not (world.is_first or world.lockstep):
        return None
    trained, execution = model.step.objective.decoder, _decoding(plan)
    chats = recipe.data.has_conversations and tokenizer.chat_templates
    begin = None if chats else sequence_start(tokenizer, recipe.data)
    sampler = Sampler(tokenizer, samples, begin, trained.max_seq_len)
    if not world.lockstep:
        return partial(sampler, decoding_backend(model.reference, execution, wait=True))
    if max(parallel.context, parallel.tensor, parallel.pipeline, parallel.expert) > 1:
        return model.teams.for_generation()(partial(sampler, trained))
    from workhorse.parallel.division.sharding import whole_weights  # importing takes a second

    def sample() -> list[dict[str, str]]:
        with whole_weights(model.step.objective):
            whole = with_parameters_of(model.reference, trained)
            return sampler(decoding_backend(whole, execution, wait=True))

    return sample


def _with_trackers(plan: RunPlan) -> Listener:
    """Return a listener that also passes events to the trackers of a recipe."""
    recipe, on_event = plan.recipe, plan.on_event
    trackers = {
        name: open_tracker(name, recipe.name, recipe.to_dict(), plan.run.path)
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


def _execution(plan: RunPlan, model: RunModel) -> str:
    """Describe in one line how the steps of a run are executed."""
    train = plan.recipe.train
    operators = training_operators(
        plan.device, training_dtype(train.dtype, plan.device), train.execution
    )
    compiled = train.execution == "compiled"
    return training_announcement(model.step.objective, operators, compiled=compiled)


def _notify_start(loop: Loop, plan: RunPlan, model: RunModel, settings: Sequence[str]) -> None:
    adapted = model.base is not None
    held_out = plan.dataset.validation
    loop.notify(
        "start",
        time=time.time(),
        name=plan.recipe.name,
        settings=list(settings),
        device=name_of(plan.device),
        threads=torch.get_num_threads(),
        parallel={name: ways for name, ways in plan.recipe.parallel.ways.items() if ways > 1},
        parameters=count_parameters(plan.config)["total"],
        active_parameters=active_parameters(plan.config),
        **({"trained_parameters": trained_parameters(model.reference)} if adapted else {}),
        steps=loop.config.steps,
        **({} if plan.minutes is None else {"minutes": plan.minutes}),
        tokens_per_step=loop.config.tokens_per_step,
        micro_batch_size=loop.step.micro_batch_size,
        train_tokens=plan.dataset.train.n_tokens,
        validation_tokens=0 if held_out is None else held_out.n_tokens,
        flops_per_token=loop.flops_per_token,
        peak_flops=loop.peak.flops,
        versions=loop.identity["versions"],
    )
