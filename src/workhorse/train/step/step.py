"""One training step: loss and gradient of a batch, then the update, unless it is not finite."""

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workhorse.data import Batch
from workhorse.native import training
from workhorse.nn import IGNORE, Decoder, HeadLoss
from workhorse.optim.groups import Optimizer
from workhorse.optim.master_weights import pieces
from workhorse.train.step.balance import Balancer

TERMS = ("z_loss", "balance_loss")
"""What may be added to the cross-entropy."""
GROWTH_STEPS = 2000
"""Finite steps after which the float16 loss scale doubles, as in `torch.amp.GradScaler`."""
FIRST_SCALE = 2.0**16


class LossOfBatch(nn.Module):
    """Decoder and loss as one module, whose forward is what gets sharded."""

    def __init__(self, decoder: Decoder, z_loss: float = 0.0) -> None:
        super().__init__()
        self.decoder = decoder
        self.z_loss = z_loss
        self.head_loss = HeadLoss()

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The summed losses in nats and how many targets count.

        Args:
            tokens: (batch, seq).
            targets: (batch, seq), `IGNORE` where none counts.
            documents: (batch, seq) or None; see `Decoder.forward`.

        Returns:
            Cross-entropy and z-loss, (2,), whose sum is to be made less; and the count.
        """
        x = self.decoder.hidden(tokens, documents=documents)
        z_loss = self.z_loss if self.training else 0.0
        return self.head_loss(x, targets, self.decoder.head, z_loss)


class LossScale:
    """Multiplies the loss so that float16 gradients do not vanish (1710.03740 §3.2)."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = FIRST_SCALE if enabled else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Halve after an overflow, double after many steps without one."""
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
        """Go on from a state; one of another dtype, which scaled or did not, says nothing."""
        if state.get("enabled", self.enabled) == self.enabled:
            self.value, self.good_steps = state["value"], state["good_steps"]


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
        precision: "Precision",
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
                self.optimizer.masters.gather(self.optimizer.parameters)
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
        self.optimizer.zero_grad()
        return result

    def forget(self) -> None:
        """Drop what `backward` left, without an update."""
        self.optimizer.zero_grad()
        self.balancer.forget()


class Precision:
    """Makes the context of a forward pass: autocast to a lower precision, or nothing.

    Training uses it for float16, whose range is too small for weights; see `Masters` for bfloat16.

    Args:
        device: where the passes run.
        dtype: float16, or float32 for no autocast.
        matmul: precision of float32 products, `highest` or `high`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, matmul: str = "highest") -> None:
        self.device = device
        self.dtype = dtype
        self.matmul = matmul

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """Around passes on CUDA: PyTorch's precision of float32 products, which is the process's.

        On a CPU see `Products`; PyTorch's attention took twice as long with PyTorch's `high`.
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


def total_norm(gradients: list[Tensor], *, native: bool = False) -> Tensor:
    """The length of all gradients as one vector, in float32; by the native operator if asked."""
    if gradients and native and all(map(training.measures, gradients)):
        return training.squared_length(gradients).sqrt()
    wide = [gradient for gradient in gradients if gradient.dtype != torch.bfloat16]
    narrow = [gradient for gradient in gradients if gradient.dtype == torch.bfloat16]
    if not narrow:
        return nn.utils.get_total_norm(wide)
    # PyTorch rounds the norm of a bfloat16 tensor to bfloat16.
    values = (piece.float() for tensor in narrow for (piece,) in pieces(tensor))
    squares = [torch.dot(piece, piece) for piece in values]
    if wide:
        squares.append(nn.utils.get_total_norm(wide).square())
    return torch.stack(squares).sum().sqrt()
