"""The tokenizer, data, batches and rollouts of a run."""

import gc
import shutil
from collections.abc import Callable
from functools import partial

from torch import Tensor

from workhorse.checkpoints import RunDirectory
from workhorse.checkpoints.model_folder import ModelFolder, write_model
from workhorse.config.base import ConfigError
from workhorse.data import Batch, Batches, Dataset, prepare, prepare_tokenizer
from workhorse.errors import WorkhorseError
from workhorse.execute.choose import decoding_backend
from workhorse.generate.conversation import TemplateFormat
from workhorse.run.initial_model import Built, Start, with_whole_weights
from workhorse.run.reference import (
    OfTargets,
    compute_references,
    divided_sequence_scores,
    load_references,
    sequence_scores,
    token_logprobs,
    token_values,
    trained_logprobs,
)
from workhorse.run.resume import Resumption
from workhorse.tokenizers import ChatTemplate, Tokenizer
from workhorse.train.objectives.policy import PolicyConfig
from workhorse.train.randomness import seed_everything
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.report.metrics import Listener, notice
from workhorse.train.rollouts import Critic, Rollouts
from workhorse.train.step.build import precision_of
from workhorse.transforms.adapters import disabled


def tokenizer_of(recipe: Recipe, run: RunDirectory, notify: Callable[[str], None]) -> Tokenizer:
    """Return the run's tokenizer; it is trained on the training data if there is none yet."""
    if not run.tokenizer_folder.exists():
        if recipe.tokenizer.kind not in ("bytes", "file"):
            notify("training the tokenizer")
        made = prepare_tokenizer(recipe.tokenizer, recipe.data, run.data_folder, notify=notify)
        run.save_tokenizer(made)
    return run.tokenizer()


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


def check_needs(config: TrainConfig, batches: Batches, at: Resumption) -> None:
    """Raise ConfigError if the rows of the batches are not of the kind that the objective needs."""
    needs, row = config.objective.needs, batches.rows(at.step, 0, 1)
    wanted = "pairs" if "group" in needs else "labels" if "values" in needs else ""
    given = "pairs" if row.group is not None else "labels" if row.values is not None else ""
    if wanted and wanted != given:
        fields = {"pairs": "chosen and rejected", "labels": "prompt, completion and label"}[wanted]
        raise ConfigError(
            f"the objective {config.objective.kind} needs {wanted}, which this data does not have; "
            f"set data.corpus to conversations with rows={wanted} (records with {fields})",
            "train.objective",
        )
    if given and not wanted:
        raise ConfigError(
            f"{config.objective.kind} would learn the rejected answers of {given} too; choose "
            "another kind, such as dpo or kto",
            "train.objective",
        )


def rollouts_of(start: Start, run: RunDirectory, model: Built, prompts: Batches) -> Rollouts | None:
    """Return the batches of a run that learns from its own completions; None for other runs.

    They are generated with the current weights of `model`.
    """
    train, reference = start.recipe.train, model.reference
    config, objective = train.rollouts, train.objective
    if config is None:
        return None
    values = objective.values if isinstance(objective, PolicyConfig) else None
    execution = "reference" if train.execution == "reference" else "auto"
    exact = config.exact
    backend = decoding_backend(reference, execution, wait=True, exact=exact, scores=exact)
    if exact and not backend.is_invariant:
        raise WorkhorseError(
            f"rollouts.exact is not possible for this model ({backend.announcement}); remove it"
        )
    rollouts = Rollouts(
        prompts,
        backend,
        start.tokenizer,
        config,
        stop_tokens=_stop_tokens(start.recipe, start.tokenizer),
        reward=None if config.reward is None else config.reward.build(),
        seed=train.seed,
        reference=_initial_logprobs(start, run, model) if train.needs_initial_model else None,
        critic=None if values is None else Critic(values, token_values(model.step)),
        world=start.world,
        notify=start.notify,
    )
    if exact:
        step = 0 if start.checkpoint is None else start.checkpoint.step
        rollouts.check_exact(step, trained_logprobs(model.step), backend.announcement)
    return rollouts


def _stop_tokens(recipe: Recipe, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids that end a completion."""
    if recipe.data.has_conversations and tokenizer.chat_templates:
        return TemplateFormat(ChatTemplate.of(tokenizer), tokenizer).stop_tokens
    return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


def prepare_reference(start: Start, run: RunDirectory, dataset: Dataset) -> None:
    """Load the reference model's log-probabilities if the objective needs them.

    A new run computes them first. So does a run that ended before its first checkpoint, because its
    initial model can have changed since then.
    """
    recipe = start.recipe
    if "reference" not in recipe.train.objective.needs:
        return
    if start.checkpoint is not None:
        if load_references(dataset, run.reference_folder):
            return
        raise WorkhorseError(
            f"{run.reference_folder} is missing, the log-probabilities of the model that this run "
            "started from; restore it, or start a new run"
        )
    start.notify("computing the reference model's log-probabilities")
    seed_everything(recipe.train.seed)  # so that random weights are those that training starts from
    size = recipe.train.micro_batches(recipe.parallel).size
    compute = compute_references
    if start.world.lockstep or recipe.parallel.team > 1:
        step = start.build().step
        scores = divided_sequence_scores(step)
        compute = with_whole_weights(step, start.world, compute)
        assert compute is not None
    else:
        body = start.scoring_body(start.frozen())
        precision = precision_of(recipe.train, start.device)
        scores = sequence_scores(token_logprobs(body, precision, size))
    compute(
        scores,
        dataset,
        run.reference_folder,
        seq_len=recipe.train.seq_len,
        batch_size=size,
        too_long=recipe.data.too_long,
        world=start.world,
        device=start.device,
    )
    gc.collect()  # frees the memory of this model


def _initial_logprobs(start: Start, run: RunDirectory, model: Built) -> OfTargets:
    """Return a function that computes log-probabilities with the weights that a run started from.

    With an adapter, it uses the base in training. Otherwise a new run writes these weights, which
    `model` still has, to the run directory.
    """
    options = model.step.precision, model.step.micro_batch_size
    if model.base is not None:
        body = start.scoring_body(model.reference)
        compute = token_logprobs(body, *options)

        def without_adapter(batch: Batch) -> Tensor:
            with disabled(body):
                return compute(batch)

        return without_adapter
    folder = run.reference_folder
    with start.world.first_before_others():
        if start.checkpoint is None and start.world.is_first:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that ended before a checkpoint
            write_model(folder, model.reference, tokenizer=None)
    if not ModelFolder.is_one(folder):
        raise WorkhorseError(
            f"{folder} is missing, the model that this run started from; restore it, or start a "
            "new run"
        )
    return token_logprobs(start.scoring_body(start.frozen(folder)), *options)
