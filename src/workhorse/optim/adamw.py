"""AdamW: Adam with decoupled weight decay (1711.05101)."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim.adamw import adamw

from workhorse.config import Config
from workhorse.native import training
from workhorse.on_resume import OnResume
from workhorse.optim.master_weights import Masters, join, pieces, split


class AdamWConfig(Config):
    """AdamW. Weight decay goes to matrices only: never to norms, biases and other vectors."""

    kind: Annotated[Literal["adamw"], OnResume.NEW_RUN] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    """At the schedule's peak."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Share of the running mean of gradients that a step keeps."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Share of the running mean of squared gradients that a step keeps."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean of squares, by which an update is divided."""
    weight_decay: float = Field(default=0.1, ge=0)
    """A matrix shrinks by `learning_rate · weight_decay` of itself at each step."""
    mean_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the running mean of gradients. bfloat16 saves two bytes a parameter and rounds it by up to
    0.4 % at each step, as DeepSeek-V3 does (2412.19437 §3.3.3). The mean of squares stays
    float32: with `beta2` near 1 its steps would round away."""
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
        self,
        parameters: Mapping[str, nn.Parameter],
        config: AdamWConfig,
        *,
        weight_decay: float,
        masters: Masters | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.config = config
        self.weight_decay = weight_decay
        self.masters = masters or Masters()
        weights = list(self.parameters.values())
        mean_dtype = getattr(torch, config.mean_dtype)
        self.mean = [torch.zeros_like(weight, dtype=mean_dtype) for weight in weights]
        self.mean_square = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        self.updates = [torch.zeros((), device=weight.device) for weight in weights]

    @torch.no_grad()
    def step(self, schedule: float, shrink: float = 1.0) -> None:
        """One update; `schedule` multiplies the learning rate and `shrink` the gradient."""
        native: dict[bool, list[tuple[Tensor, ...]]] = {False: [], True: []}
        whole: list[tuple[Tensor, ...]] = []
        for state in zip(
            self.parameters.values(),
            gradients_of(self.parameters, self.masters),
            self.mean,
            self.mean_square,
            self.updates,
            strict=True,
        ):
            weight, _, mean, *_ = state
            remainder = self.masters.remainders.get(weight)
            split_or_float = remainder is not None or weight.dtype == torch.float32
            ours = self.masters.native and weight.is_contiguous()
            if ours and weight.device.type == "cpu" and split_or_float:
                native[remainder is not None].append(state)
            elif remainder is None and mean.dtype == torch.float32:
                whole.append(state)
            else:
                self._update_in_pieces(state, remainder, schedule, shrink)
        for states in filter(None, native.values()):
            self._update_natively(states, schedule, shrink)
        if whole and shrink != 1:
            torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage]
                [gradient for _, gradient, *_ in whole], shrink
            )
        self._update(whole, schedule)

    def _update_natively(
        self, states: list[tuple[Tensor, ...]], schedule: float, shrink: float
    ) -> None:
        """In one pass; either all weights have a remainder or none has."""
        weights, gradients, means, mean_squares, updates = map(list, zip(*states, strict=True))
        remainders = self.masters.remainders
        torch._foreach_add_(updates, 1)  # pyright: ignore[reportPrivateImportUsage]
        training.adamw_(
            [weight.detach() for weight in weights],
            [remainders[weight] for weight in weights if weight in remainders],
            [gradient.contiguous() for gradient in gradients],
            means,
            mean_squares,
            [int(count) for count in updates],
            shrink=shrink,
            rate=self.config.learning_rate * schedule,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            eps=self.config.eps,
            weight_decay=self.weight_decay,
        )

    def _update_in_pieces(
        self,
        state: tuple[Tensor, ...],
        remainder: Tensor | None,
        schedule: float,
        shrink: float,
    ) -> None:
        """Where not all is float32: piece by piece, made wide and narrow again."""
        *numbers, updates = state
        updates.add_(1)
        rest = () if remainder is None else (remainder,)
        for parts in pieces(*numbers, *rest):
            rounded, part, narrow, square, *lower = parts
            master, wide = join(rounded, *lower) if lower else rounded, narrow.float()
            self._update([(master, part.float() * shrink, wide, square, updates - 1)], schedule)
            narrow.copy_(wide)
            for old, new in zip((rounded, *lower), split(master) if lower else (), strict=False):
                old.copy_(new)

    def _update(self, states: list[tuple[Tensor, ...]], schedule: float) -> None:
        """PyTorch's kernel on float32 weights, gradients, means, mean squares and counts."""
        if not states:
            return
        weights, gradients, mean, mean_square, updates = map(list, zip(*states, strict=True))
        adamw(
            weights,
            gradients,
            mean,
            mean_square,
            [],
            updates,
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


def gradients_of(parameters: Mapping[str, nn.Parameter], masters: Masters) -> list[Tensor]:
    """Every parameter's gradient; each must have one."""
    gradients: list[Tensor] = []
    for name, parameter in parameters.items():
        gradient = masters.gradient(parameter)
        assert gradient is not None, f"{name} takes no part in the loss"
        gradients.append(gradient)
    return gradients
