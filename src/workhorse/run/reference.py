"""Log-probabilities of the reference model, which is the model that training started from.

For preference objectives, the sequences never change. So their log-probabilities are computed
before training and stored in the run directory, and no second model is kept in memory. Rollouts are
new sequences in every step. So their reference model is kept in memory, and the run directory has a
copy of the initial weights.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workhorse.checkpoints.model_folder import ModelFolder, write_model
from workhorse.data import Batch, Dataset, Split
from workhorse.data.batches import ValidationBatches
from workhorse.data.config import TooLong
from workhorse.data.dataset import open_array
from workhorse.data.manifest import write_array
from workhorse.errors import WorkhorseError
from workhorse.execute.scoring import ScoringBody
from workhorse.parallel.processes.world import World
from workhorse.run.model import RunModel, frozen_model, scorer, with_whole_weights
from workhorse.run.plan import RunPlan
from workhorse.train.objectives.objective import (
    Divided,
    ModelObjective,
    Objective,
    UncountedObjective,
    Wrapped,
    target_weights,
)
from workhorse.train.step.step import Precision, TrainingStep
from workhorse.transforms.adapters import disabled

OfTargets = Callable[[Batch], Tensor]
"""Computes a value for each target of a batch, (rows, seq), on the CPU."""
Progress = Callable[[int, int], None]
"""Called with the number of batches done and in total."""


def load_references(dataset: Dataset, folder: Path) -> bool:
    """Set `TokenStream.reference` of all streams from the files in a folder.

    Returns:
        False if a file is missing.

    Raises:
        WorkhorseError: a file is damaged, or does not fit the data.
    """
    for path, split, index in _files_of(dataset, folder):
        if not path.exists():
            return False
        stream = split.streams[index]
        remedy = "restore it, or start a new run"
        stream.reference = open_array(path, stream.n_documents, remedy)
    return True


def prepare_references(plan: RunPlan, model: RunModel) -> bool:
    """Load the reference model's log-probabilities if the objective needs them.

    A new run computes them first, with its initial weights. So does a run that ended before its
    first checkpoint, because its initial model can have changed since then.

    Args:
        plan: the run.
        model: its model. At a checkpoint its weights are not used.

    Returns:
        True if the step of the model computed them, as it does if it is divided among ranks.
    """
    if plan.train.objective.reference != "sequence":
        return False
    folder = plan.run.reference_folder
    if plan.checkpoint is not None:
        if load_references(plan.dataset, folder):
            return False
        raise WorkhorseError(
            f"{folder} is missing, the log-probabilities of the model that this run started from; "
            "restore it, or start a new run"
        )
    plan.notify("computing the reference model's log-probabilities")
    step, size = model.step, model.step.micro_batch_size
    compute = compute_references
    divided = plan.world.lockstep or plan.recipe.parallel.team > 1
    if divided:
        scores = divided_sequence_scores(step)
        compute = with_whole_weights(step, plan.world, compute)
        assert compute is not None
    else:
        scores = sequence_scores(
            token_logprobs(scorer(plan, model.reference), step.precision, size)
        )
    compute(
        scores,
        plan.dataset,
        folder,
        seq_len=plan.train.seq_len,
        batch_size=size,
        too_long=plan.recipe.data.too_long,
        world=plan.world,
        device=plan.device,
    )
    return divided


def initial_logprobs(plan: RunPlan, model: RunModel) -> OfTargets:
    """Return a function that computes log-probabilities with the weights that a run started from.

    With an adapter, it uses the base in training. Otherwise a new run writes these weights, which
    `model` still has, to the run directory.
    """
    options = model.step.precision, model.step.micro_batch_size
    if model.base is not None:
        body = scorer(plan, model.reference)
        compute = token_logprobs(body, *options)

        def without_adapter(batch: Batch) -> Tensor:
            with disabled(body):
                return compute(batch)

        return without_adapter
    folder = plan.run.reference_folder
    with plan.world.first_before_others():
        if plan.checkpoint is None and plan.world.is_first:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that ended before a checkpoint
            write_model(folder, model.reference, tokenizer=None)
    if not ModelFolder.is_one(folder):
        raise WorkhorseError(
            f"{folder} is missing, the model that this run started from; restore it, or start a "
            "new run"
        )
    return token_logprobs(scorer(plan, frozen_model(plan, folder)), *options)


def compute_references(
    scores: Callable[[Batch], Tensor | None],
    dataset: Dataset,
    folder: Path,
    *,
    seq_len: int,
    batch_size: int,
    too_long: TooLong | None,
    world: World,
    device: torch.device,
    progress: Progress = lambda done, total: None,
) -> None:
    """Compute the log-probability of every sequence with the reference model, and store it.

    Args:
        scores: computes it for the rows of a batch, (rows); None if another rank's result counts.
            All ranks call it.
        dataset: prepared data with one sequence per row; `TokenStream.reference` is set.
        folder: the folder for the files, which rank 0 writes.
        seq_len: predictions per row.
        batch_size: rows per batch.
        too_long: see `DataConfig.too_long`; omitted sequences get NaN.
        world: the processes that divide the sequences among themselves.
        device: the device of the model.
        progress: called after every batch.
    """
    for path, split, index in _files_of(dataset, folder):
        stream = split.streams[index]
        batches = ValidationBatches(
            Split(split.name, (stream,), (1.0,)),
            seq_len=seq_len,
            batch_size=batch_size,
            packing="padded",
            too_long=too_long,
        )
        sums = torch.zeros(len(batches) * batch_size, dtype=torch.float64, device=device)
        for number, counts_here in world.passes(len(batches)):
            rows = batches[number]
            of_rows = scores(rows)
            if counts_here and of_rows is not None:
                sums[number * batch_size :][: len(rows)] = of_rows.double()
            progress(number, len(batches))
        world.add_(sums)
        values = np.full(stream.n_documents, np.nan)
        documents = batches.documents(0)
        values[documents] = sums.cpu().numpy()[: len(documents)]
        stream.reference = values
        if world.is_first:
            folder.mkdir(exist_ok=True)
            write_array(path, values)


def token_logprobs(body: ScoringBody, precision: Precision, size: int) -> OfTargets:
    """Return a function that computes log-probabilities with a frozen model.

    Args:
        body: the model, executed as in training, so that the KL divergence of a model from itself
            is exactly 0.
        precision: the precision of training.
        size: rows per pass.
    """

    def of_rows(rows: Batch) -> Tensor:
        return body(rows.tokens, rows.targets, documents=rows.documents).target

    return _in_parts(of_rows, precision, size)


def trained_logprobs(step: TrainingStep) -> OfTargets:
    """Return a function that computes log-probabilities as the training step, with dropout."""
    return _of_step(step, lambda objective, rows: objective.score(rows).target, dropout=True)


def token_values(step: TrainingStep) -> OfTargets:
    """Return a function that computes the current value at each position.

    The objective must be a `Policy` with a value head.
    """
    return _of_step(step, lambda objective, rows: objective.values_at(rows), dropout=False)


def _of_step(
    step: TrainingStep, figure: Callable[[Any, Batch], Tensor], *, dropout: bool
) -> OfTargets:
    """Return a function that computes `figure(objective, rows)`, with dropout if that is True."""
    whole = objective = step.objective
    while isinstance(objective, Wrapped):
        objective = objective.objective
    assert isinstance(objective, ModelObjective)
    in_parts = _in_parts(partial(figure, objective), step.precision, step.micro_batch_size)

    def compute(batch: Batch) -> Tensor:
        whole.train(dropout)
        found = in_parts(batch)
        whole.train()
        return found

    return compute


def _in_parts(figure: Callable[[Batch], Tensor], precision: Precision, size: int) -> OfTargets:
    """Return a function that computes a figure without gradients, for `size` rows at a time."""

    def compute(batch: Batch) -> Tensor:
        parts = [batch.rows(start, start + size) for start in range(0, len(batch), size)]
        with torch.no_grad(), precision.products(), precision():
            found = [figure(part.to(precision.device)).float().cpu() for part in parts]
        return torch.cat(found)

    return compute


def sequence_scores(logprobs: OfTargets) -> Callable[[Batch], Tensor]:
    """Return a function that computes the weighted sum of each row's log-probabilities, (rows)."""
    return lambda batch: (logprobs(batch) * target_weights(batch)).sum(dim=1)


def divided_sequence_scores(step: TrainingStep) -> Callable[[Batch], Tensor | None]:
    """Return `sequence_scores` of a step whose model or sequences are divided among ranks."""

    def compute(batch: Batch) -> Tensor | None:
        step.objective.eval()
        with torch.no_grad(), step.precision.products(), step.precision():
            found = sequence_logprobs(step.objective, batch.to(step.device))
        step.objective.train()
        return found

    return compute


def sequence_logprobs(objective: Objective, batch: Batch) -> Tensor | None:
    """Compute the weighted sum of the log-probabilities of each row's targets, (rows).

    Args:
        objective: the objective in training, also if it is wrapped or its model is divided.
        batch: rows of one sequence each.

    Returns:
        The sums; None on a rank whose result another rank also computes.
    """
    counted = True
    while isinstance(objective, Wrapped):
        counted &= not isinstance(objective, UncountedObjective)
        if isinstance(objective, Divided):
            batch = batch.columns(objective.team.own(batch.tokens.shape[1]))
        objective = objective.objective
    assert isinstance(objective, ModelObjective)
    of_rows = objective.sequence_logprobs(batch)
    return of_rows if counted else None


def _files_of(dataset: Dataset, folder: Path) -> list[tuple[Path, Split, int]]:
    """Return the file of each stream, its split, and its index there."""
    splits = [split for split in (dataset.train, dataset.validation) if split is not None]
    return [
        (folder / f"{split.name}-{stream.name}.npy", split, index)
        for split in splits
        for index, stream in enumerate(split.streams)
    ]
