"""Forward and backward passes without Python: one is recorded, and replayed for later rows."""

# PyTorch has no public question for modes and hooks.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

import time
from itertools import chain
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from workhorse.data import Batch
from workhorse.interrupts import interrupts_held
from workhorse.native.replay import Recorder, Recording, Replay, Unrecordable
from workhorse.nn.watched import Held, Watch
from workhorse.train.objectives.next_token import NextToken

MAX_SECONDS = 0.25
"""Of a pass that is recorded. Python takes a few milliseconds, so a longer one gains little."""
MAX_RECORDINGS = 8
"""One for each shape of a micro-batch; a run has one, or two where the last one is smaller."""

Shape = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]

_Attributes = tuple[list[object], list[tuple[torch.Size, tuple[int, ...], bool]]]
"""Of all modules, and of how the parameters lie in memory and whether they are trained."""


class _Recorded(NamedTuple):
    passes: Recording
    names: list[str]
    """Of the figures, which are its first results; the gradients of all parameters follow."""


class RecordedPasses:
    """Forward and backward passes of an objective on a CPU, with the bits of ordinary ones.

    The first pass of a shape is an ordinary one, the second, if the first was short, is recorded,
    and later ones are replayed. Only passes that find no gradients are recorded or replayed, so
    that none needs more memory than an ordinary one.

    A pass is ordinary, and what was recorded is forgotten, where the objective is not what it was
    (its modules, parameters, or an attribute of a module), or something else takes part: hooks,
    modes of PyTorch, autocast. Not noticed are what changes within an attribute or a class, hooks
    on nodes of autograd's graph, and which of PyTorch's own kernels are allowed.

    Args:
        objective: of next tokens.
        replay: the operators.
    """

    def __init__(self, objective: NextToken, replay: Replay) -> None:
        self._objective = objective
        self._replay = replay
        self._modules = list(objective.modules())
        self._parameters = list(objective.parameters())
        self._held = Held(objective)
        self._watch = Watch(self._modules)
        self._attributes: _Attributes = [], []
        """When something was last recorded."""
        self._seconds: dict[Shape, float] = {}
        """Of the last ordinary pass."""
        self._recorded: dict[Shape, _Recorded | None] = {}
        """None: it cannot be recorded."""

    def __call__(self, batch: Batch, weight: float) -> dict[str, Tensor]:
        """Add the gradient of the rows' loss to those of the parameters; returns the figures.

        Args:
            batch: rows of it.
            weight: of the loss.
        """
        if not self._as_it_was():
            self._recorded.clear()
            return self._pass(batch, weight)
        shape = tuple((one.shape, one.stride(), one.dtype) for one in batch.tensors)
        if all(one.grad is None for one in self._parameters):
            recorded = self._recorded.get(shape)
            if recorded is not None:
                return self._again(recorded, batch, weight)
            if shape not in self._recorded and self._is_worth_it(shape):
                figures = self._record(shape, batch, weight)
                self._attributes = self._attributes_now()
                return figures
        started = time.perf_counter()
        figures = self._pass(batch, weight)
        self._seconds[shape] = time.perf_counter() - started
        return figures

    def _is_worth_it(self, shape: Shape) -> bool:
        short = shape in self._seconds and self._seconds[shape] < MAX_SECONDS
        return short and len(self._recorded) < MAX_RECORDINGS

    def _pass(self, batch: Batch, weight: float | Tensor) -> dict[str, Tensor]:
        loss, _, figures = self._objective(batch)
        (loss * weight).backward()
        return {"loss": loss.detach(), **figures}

    def _record(self, shape: Shape, batch: Batch, weight: float) -> dict[str, Tensor]:
        """An ordinary pass, to be replayed if it can be."""
        views = batch.rows(0, len(batch))  # new ones: a recorder knows tensors by their identity
        drawn = torch.get_rng_state()
        try:
            with interrupts_held():  # PyTorch's conversions crash where a handler raises
                recorder = Recorder([*views.tensors, of_loss := _number(weight)])
                with recorder:
                    figures = self._pass(views, of_loss)
                if figures["loss"].dtype != of_loss.dtype:  # which may decide the product's dtype
                    raise Unrecordable("the loss is not float32")
                results = [*figures.values(), *(one.grad for one in self._parameters)]
                recording = self._replay.record(recorder, results)
        except (Unrecordable, NotImplementedError):  # the latter of higher-order operators
            self._recorded[shape] = None
            torch.set_rng_state(drawn)
            for one in self._parameters:
                one.grad = None
            return self._pass(batch, weight)
        self._recorded[shape] = _Recorded(recording, list(figures))
        return figures

    def _again(self, recorded: _Recorded, batch: Batch, weight: float) -> dict[str, Tensor]:
        drawn = torch.get_rng_state()
        try:
            results = recorded.passes.run([*batch.tensors, _number(weight)])
        except (RuntimeError, IndexError):  # an ordinary pass does it, or says what is wrong
            self._recorded.clear()
            torch.set_rng_state(drawn)
            return self._pass(batch, weight)
        figures: dict[str, Tensor] = {}
        for name, figure in zip(recorded.names, results, strict=False):
            assert figure is not None
            figures[name] = figure
        gradients = results[len(recorded.names) :]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return figures

    def __getstate__(self) -> dict[str, object]:
        """A copy records its own passes."""
        return {**vars(self), "_recorded": {}}

    def _as_it_was(self) -> bool:
        """Whether an ordinary pass would call what was recorded, and nothing else."""
        return (
            self._held.unchanged
            and not self._watch.sees_hooks
            and not any(map(_has_hooks, self._parameters))
            and _is_plain()
            and (not self._recorded or self._same_attributes())
        )

    def _same_attributes(self) -> bool:
        attributes, layouts = self._attributes
        now, layouts_now = self._attributes_now()
        same = len(now) == len(attributes) and all(map(is_, now, attributes))
        return same and layouts_now == layouts

    def _attributes_now(self) -> _Attributes:
        layouts = [(one.shape, one.stride(), one.requires_grad) for one in self._parameters]
        return list(chain.from_iterable(vars(one).values() for one in self._modules)), layouts


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _is_plain() -> bool:
    """Whether PyTorch computes as it does by itself."""
    return (
        torch.get_default_dtype() == torch.float32
        and torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_anomaly_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # pyright: ignore[reportAttributeAccessIssue]
        and not _get_current_dispatch_mode_stack()
        and not _get_current_function_mode_stack()
    )
