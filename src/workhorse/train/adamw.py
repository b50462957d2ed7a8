"""AdamW: Adam with decoupled weight decay (1711.05101)."""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim.adamw import adamw

from workhorse.config import Config


class AdamWConfig(Config):
    """AdamW. Weight decay goes to matrices only: never to norms, biases and other vectors."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    """At the schedule's peak."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """A matrix shrinks by `learning_rate · weight_decay` of itself at each step."""
    decay_embeddings: bool = False
    """Whether token and position tables (and a head tied to them) decay too. A row that no batch
    touches would only ever shrink, and small embeddings make for large gradients in the norm that
    follows (OLMo 2, 2501.00656 §3.2)."""


class AdamW:
    """AdamW over named parameters that share one weight decay.

    It calls PyTorch's fused kernel without `torch.optim.Optimizer`, whose first instance imports
    the compiler and makes every start a second slower.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig, *, weight_decay: float
    ) -> None:
        self.parameters = dict(parameters)
        self.config = config
        self.weight_decay = weight_decay
        weights = list(self.parameters.values())
        self.mean = [torch.zeros_like(weight) for weight in weights]
        self.mean_square = [torch.zeros_like(weight) for weight in weights]
        self.updates = [torch.zeros((), device=weight.device) for weight in weights]

    @torch.no_grad()
    def step(self, schedule: float) -> None:
        """One update; `schedule` multiplies the learning rate."""
        weights: list[Tensor] = list(self.parameters.values())
        adamw(
            weights,
            [_gradient(name, weight) for name, weight in self.parameters.items()],
            self.mean,
            self.mean_square,
            [],
            self.updates,
            fused=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=self.config.learning_rate * schedule,
            weight_decay=self.weight_decay,
            eps=self.config.eps,
            maximize=False,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything the next step depends on, by parameter name; the tensors themselves."""
        state = zip(self.parameters, self.mean, self.mean_square, self.updates, strict=True)
        return {
            f"{name}.{part}": tensor
            for name, mean, mean_square, updates in state
            for part, tensor in (("mean", mean), ("mean_square", mean_square), ("updates", updates))
        }


def _gradient(name: str, weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None, f"{name} takes no part in the loss"
    return weight.grad
