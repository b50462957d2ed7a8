"""One training step: loss and gradient of a batch, then the update, unless it is not finite."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from workhorse.data import Batch
from workhorse.nn import IGNORE
from workhorse.optim.groups import Optimizer
from workhorse.optim.norm import total_norm
from workhorse.train.step.balance import Balancer
from workhorse.train.step.loss_scale import LossScale
from workhorse.train.step.precision import Precision

TERMS = ("z_loss", "balance_loss")
"""What may be added to the cross-entropy."""


@dataclass(frozen=True)
class StepResult:
    """What a step found."""

    loss: float
    """The cross-entropy, mean over the batch's predictions, nats."""
    grad_norm: float
    """Of the whole gradient, before it is shortened."""
    tokens: int
    """Predictions that counted."""
    terms: dict[str, float] = field(default_factory=dict)
    """What else was minimised, each term weighted, per prediction: `z_loss` and
    `balance_loss` where they have a weight."""

    @property
    def finite(self) -> bool:
        """Whether the weights were updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class TrainingStep:
    """Does steps, in two halves so that the next batch can be read while a device works.

    Args:
        module: gives the summed losses of some rows, the cross-entropy and what is added to it,
            and how many targets count.
        optimizer: of its parameters.
        device: where the rows go.
        precision: makes the contexts that passes run in.
        scale: of the loss.
        micro_batch_size: rows that pass through at once.
        grad_clip: longest gradient; None for any.
        balancer: of the module's mixtures of experts; None for none.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        *,
        precision: Precision,
        scale: LossScale,
        micro_batch_size: int,
        grad_clip: float | None,
        balancer: Balancer | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.device = device
        self.precision = precision
        self.scale = scale
        self.micro_batch_size = micro_batch_size
        self.grad_clip = grad_clip
        self.balancer = balancer or Balancer(module)
        self._terms = torch.zeros(2, device=device)
        """The terms beside the cross-entropy of what `backward` saw: z-loss and balance loss."""

    def backward(self, batch: Batch) -> tuple[Tensor, int]:
        """Leave the gradient of the batch's mean loss on the parameters.

        The sum over micro-batches is divided by the predictions of the whole batch, so that the
        gradient does not depend on how they are spread.

        Returns:
            The mean cross-entropy, still on the device, and how many predictions counted.
        """
        with self.precision.products():
            return self._backward(batch)

    def _backward(self, batch: Batch) -> tuple[Tensor, int]:
        counted = int((batch.targets != IGNORE).sum())
        total = torch.zeros(3, device=self.device)  # cross-entropy, z-loss, balance loss
        for start in range(0, len(batch.tokens), self.micro_batch_size):
            rows = batch.rows(start, start + self.micro_batch_size)
            rows = rows.to(self.device, non_blocking=True)
            with self.precision(), self.balancer.watch():
                losses, _ = self.module(rows.tokens, rows.targets, rows.documents)
            balance = self.balancer.loss(rows.targets)
            total[:2] += losses.detach()
            total[2] += balance.detach()
            ((losses.sum() + balance) * (self.scale.value / max(counted, 1))).backward()
            if len(batch.tokens) > self.micro_batch_size:
                self.optimizer.masters.accumulate()
        loss, *_ = means = total / max(counted, 1)
        self._terms = means[1:]
        return loss, counted

    def update(self, loss: Tensor, counted: int, schedule: float) -> StepResult:
        """Update the weights with the gradient that `backward` left, if all of it is finite.

        Args:
            loss: what `backward` returned.
            counted: likewise.
            schedule: multiplies the learning rates.
        """
        norm = total_norm(self.optimizer.gradients(), native=self.optimizer.masters.native)
        # The step's only wait for the device.
        figures = torch.stack([loss, norm.to(loss.dtype), *self._terms]).tolist()
        loss_value, norm_value, *extra = figures
        norm_value /= self.scale.value
        terms = {name: value for name, value in zip(TERMS, extra, strict=True) if value}
        result = StepResult(loss_value, norm_value, counted, terms)
        if result.finite:
            shrink = 1 / self.scale.value
            if self.grad_clip is not None and norm_value > self.grad_clip:
                shrink *= self.grad_clip / norm_value
            self.optimizer.step(schedule, shrink)
        self.balancer.update(result.finite)
        self.scale.update(result.finite)
        self.optimizer.masters.zero_grad()
        return result

    def forget(self) -> None:
        """Drop what `backward` left, without an update."""
        self.optimizer.masters.zero_grad()
        self.balancer.forget()
