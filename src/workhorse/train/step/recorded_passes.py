"""Passes without Python: the operators of one are recorded, and called again for the next rows."""

# PyTorch has no public question for modes and hooks.
# pyright: reportPrivateUsage=false

import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from workhorse.data import Batch
from workhorse.native.replay import Recorder, Recording, Replay, Unrecordable
from workhorse.nn.watched import Held, Watch
from workhorse.train.objectives.next_token import NextToken

SHORT = 0.25
"""Seconds of a pass that is worth recording: Python takes some five milliseconds of it."""
MOST = 8
"""Shapes of micro-batches that are recorded; rows of one length have one, or two."""

Figures = dict[str, Tensor]
Shape = tuple[tuple[torch.Size, tuple[int, ...]], ...]


class _Recorded(NamedTuple):
    passes: Recording
    names: list[str]
    """Of the figures, which are its first results; the gradients of all parameters follow."""


class RecordedPasses:
    """Forward and backward passes of an objective on a CPU, with the bits of ordinary ones.

    The first pass of a shape is an ordinary one, the second is recorded, and all others call its
    operators again. A model with hooks has ordinary passes.

    Args:
        objective: of next tokens, as it will stay.
        replay: the operators.
    """

    def __init__(self, objective: NextToken, replay: Replay) -> None:
        self._objective = objective
        self._replay = replay
        self._parameters = list(objective.parameters())
        self._trained = [one.requires_grad for one in self._parameters]
        self._held = Held(objective)
        self._watch = Watch(objective.modules())
        self._seconds: dict[Shape, float] = {}
        """Of the last ordinary pass."""
        self._recorded: dict[Shape, _Recorded | None] = {}
        """None: it cannot be recorded."""

    def __call__(self, batch: Batch, weight: float) -> Figures:
        """Add the gradient of the rows' loss to those of the parameters; returns the figures.

        Args:
            batch: rows of it.
            weight: of the loss.
        """
        if not self._as_it_was():
            self._recorded.clear()
            return self._ordinary(batch, weight)
        shape = tuple((one.shape, one.stride()) for one in batch.tensors)
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        recorded = self._recorded.get(shape)
        if recorded is not None and not any(one.is_sparse for one in gradients):
            return self._again(recorded, batch, weight)
        if not gradients and self._worthwhile(shape):
            drawn = torch.get_rng_state()
            try:
                return self._record(shape, batch, weight)
            except (Unrecordable, NotImplementedError):  # the latter of functions as operators
                self._recorded[shape] = None
                torch.set_rng_state(drawn)
                for one in self._parameters:
                    one.grad = None
        started = time.perf_counter()
        figures = self._ordinary(batch, weight)
        self._seconds[shape] = time.perf_counter() - started
        return figures

    def _worthwhile(self, shape: Shape) -> bool:
        new = shape not in self._recorded and len(self._recorded) < MOST
        return new and shape in self._seconds and self._seconds[shape] < SHORT

    def _ordinary(self, batch: Batch, weight: float) -> Figures:
        loss, _, figures = self._objective(batch)
        (loss * weight).backward()
        return {"loss": loss.detach(), **figures}

    def _record(self, shape: Shape, batch: Batch, weight: float) -> Figures:
        batch = batch.rows(0, len(batch))  # no tensor twice
        share = torch.tensor(weight)
        recorder = Recorder([*batch.tensors, share])
        with recorder:
            loss, _, figures = self._objective(batch)
            if loss.dtype != share.dtype:  # a product with a number has the type of the tensor
                raise Unrecordable(f"the loss is {loss.dtype}")
            (loss * share).backward()
            figures = {"loss": loss.detach(), **figures}
        results = [*figures.values(), *(one.grad for one in self._parameters)]
        self._recorded[shape] = _Recorded(self._replay.recording(recorder, results), list(figures))
        return figures

    def _again(self, recorded: _Recorded, batch: Batch, weight: float) -> Figures:
        results = recorded.passes.run([*batch.tensors, torch.tensor(weight)])
        figures = {
            name: figure
            for name, figure in zip(recorded.names, results, strict=False)
            if figure is not None
        }
        gradients = results[len(figures) :]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad.add_(gradient)
        return figures

    def _as_it_was(self) -> bool:
        """Whether an ordinary pass would do what one did when they were made, and nothing else."""
        return (
            self._objective.training
            and self._held.unchanged
            and not self._watch.sees_hooks
            and self._trained == [one.requires_grad for one in self._parameters]
            and not any(map(_has_hooks, self._parameters))
            and not torch.is_anomaly_enabled()
            and not _get_current_dispatch_mode_stack()
        )


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
