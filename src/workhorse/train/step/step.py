"""One training step: loss and gradient of a batch, then the update if they are finite."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workhorse.data import Batch
from workhorse.devices.transfer import ToHost
from workhorse.optim.gradients import norm_by_rows, norm_over_parts, shrink_on_device, total_norm
from workhorse.optim.groups import Optimizer
from workhorse.parallel.division.stages import Turn, one_forward_one_backward
from workhorse.train.objectives.objective import Objective
from workhorse.train.step.reduction import Reduction


class Precision:
    """Creates the context of a forward pass: autocast to a lower precision, or nothing.

    Autocast is only used for float16, whose range is too small for weights. For bfloat16 the
    weights are rounded instead; see `optim.master_weights`.

    Args:
        device: the device of the passes.
        dtype: float16, or float32 for no autocast.
        matmul: the precision of float32 GEMMs, `highest` or `high`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, matmul: str = "highest") -> None:
        self.device = device
        self.dtype = dtype
        self.matmul = matmul

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """Set PyTorch's process-wide precision of float32 GEMMs during passes on CUDA.

        On a CPU it is not set, because PyTorch's `high` doubled the time of attention; see `Gemm`.
        """
        if self.device.type != "cuda":
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.matmul)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def __call__(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


GROWTH_STEPS = 2000
"""Number of finite steps in a row after which the float16 loss scale doubles, as in
`torch.amp.GradScaler`."""
FIRST_SCALE = 2.0**16


class LossScale:
    """Loss scaling: a factor on the loss, so that float16 gradients do not vanish.

    See 1710.03740 §3.2.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = FIRST_SCALE if enabled else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow; double it after `GROWTH_STEPS` steps without one."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "value": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a saved state, unless it was saved with another value of `enabled`."""
        if state.get("enabled", self.enabled) == self.enabled:
            self.value, self.good_steps = state["value"], state["good_steps"]


@dataclass(frozen=True)
class StepResult:
    """The loss, gradient norm and other results of a step."""

    loss: float
    """The reported mean loss of the objective: for next tokens the cross-entropy in nats."""
    grad_norm: float
    """Norm of the whole gradient, before clipping."""
    terms: dict[str, float] = field(default_factory=dict)
    """Means of the objective's other values to log: `z_loss` and `balance_loss` if their weight is
    not 0."""

    @property
    def finite(self) -> bool:
        """True if loss and gradient are finite, so the weights were updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class TrainingStep:
    """Training step in two halves, so that the next batch can be read while the device computes.

    The halves are `backward` and `update`.

    Args:
        objective: the objective; it contains the decoder and returns the loss to minimise.
        optimizer: the optimizer of the objective's parameters.
        device: the device of the model.
        precision: creates the contexts that passes run in.
        scale: the loss scale.
        micro_batch_size: rows per pass.
        grad_clip: the largest norm of the gradient; None for no limit.
        turns: function that returns the order of passes for a number of micro-batches.
        reduction: adds up the gradients of a batch that is split; None if it is not split.
        device_decides: True if the device itself decides whether to skip the update, so that it
            need not wait for the host. Native operators do not support it.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        device: torch.device,
        *,
        precision: Precision,
        scale: LossScale,
        micro_batch_size: int,
        grad_clip: float | None,
        turns: Callable[[int], Iterable[Turn]] = one_forward_one_backward,
        reduction: Reduction | None = None,
        device_decides: bool = False,
    ) -> None:
        self.objective = objective
        self.optimizer = optimizer
        self.device = device
        self.precision = precision
        self.scale = scale
        self.micro_batch_size = micro_batch_size
        self.grad_clip = grad_clip
        self.turns = turns
        self.pass_seconds = 0.0
        """Seconds that this process has spent in forward and backward passes."""
        self.reduction = reduction
        self.device_decides = device_decides
        self.terms: dict[str, Tensor] = {}
        """Means of the values to log that `backward` computed in addition to the loss."""

    def backward(self, batch: Batch, step: int = 0) -> tuple[Tensor, float]:
        """Compute the gradient of the batch's mean loss and store it on the parameters.

        The sum over micro-batches is divided by the denominator of the whole batch
        (`Objective.count`), so the gradient does not depend on how rows are assigned to
        micro-batches.

        Args:
            batch: the batch of all ranks together.
            step: the number of the step; it determines dropout if the batch is split.

        Returns:
            The reported mean loss, still on the device, and its denominator.
        """
        counted = self.objective.count(batch).item()
        passes = partial(self._passes, batch, counted)
        with self.precision.products():
            if self.reduction is None:
                sums = passes(0, len(batch))
            else:
                sums = self.reduction(step, len(batch), passes)
        self.terms = {name: total / (counted or 1) for name, total in sums.items()}
        return self.terms.pop("loss"), counted

    def _passes(self, batch: Batch, counted: float, begin: int, end: int) -> dict[str, Tensor]:
        """Accumulate the gradient of rows `begin` to `end` of the batch.

        Losses are divided by the denominator of the whole batch, `counted`.

        Returns:
            Sums to log, by name.
        """
        started = time.perf_counter()
        sums: dict[str, Tensor] = {}
        starts = range(begin, end, self.micro_batch_size)
        weight = self.scale.value / (counted or 1)
        losses: dict[int, Tensor] = {}
        """Losses of the micro-batches that have had no backward pass yet."""
        for number, forward in self.turns(len(starts)):
            if forward:
                rows = batch.rows(starts[number], min(starts[number] + starts.step, end))
                rows = rows.to(self.device, non_blocking=True)
                with self.precision():
                    loss, _, figures = self.objective(rows)
                    losses[number] = loss * weight
                for name, figure in {"loss": loss.detach(), **figures}.items():
                    sums[name] = sums[name] + figure if name in sums else figure
                continue
            losses.pop(number).backward()
            if len(starts) > 1:
                self.optimizer.masters.accumulate()
        self.pass_seconds += time.perf_counter() - started
        return sums

    def update(self, loss: Tensor, counted: float, schedule: float) -> StepResult:
        """Update the weights with the gradient of `backward`, if loss and gradient are finite.

        `loss` and `counted` are the results of `backward`, `schedule` is the learning-rate
        multiplier.
        """
        if self.reduction is not None:
            for tally in self.objective.tallies():
                self.reduction.world.add_(tally)
        norm = self._norm()
        # One copy of all figures, started before the update is queued: the host waits only once.
        figures = ToHost(torch.stack([loss, norm.to(loss.dtype), *self.terms.values()]))
        if self.device_decides:
            grad_scale = shrink_on_device(loss, norm, self.scale.value, self.grad_clip)
            self.optimizer.step(schedule, grad_scale)
        loss_value, norm_value, *extra = figures.wait()
        norm_value /= self.scale.value
        terms = dict(zip(self.terms, extra, strict=True))
        result = StepResult(loss_value, norm_value, terms)
        if result.finite and not self.device_decides:
            grad_scale = 1 / self.scale.value
            if self.grad_clip is not None and norm_value > self.grad_clip:
                grad_scale *= self.grad_clip / norm_value
            self.optimizer.step(schedule, grad_scale)
        self.objective.after_update(result.finite)
        self.scale.update(result.finite)
        self.optimizer.masters.zero_grad()
        return result

    def _norm(self) -> Tensor:
        masters, gradients = self.optimizer.masters, self.optimizer.gradients()
        if masters.part is not None:
            return norm_over_parts(masters, masters.part)
        if self.reduction is not None and self.reduction.exact:
            return norm_by_rows(gradients)
        return total_norm(gradients, masters.operators)

    def forget(self) -> None:
        """Discard the gradient of `backward` without an update."""
        self.optimizer.masters.zero_grad()
        self.objective.forget()
