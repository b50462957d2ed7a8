"""AdamW: Adam with decoupled weight decay (1711.05101)."""

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim.adamw import adamw

from workhorse.config.base import Config, OnResume
from workhorse.native import Training
from workhorse.optim.compiled import Recorded, compiled_adamw_, constants_of, numbers_of
from workhorse.optim.gradients import number, refused
from workhorse.optim.master_weights import MasterWeights, chunks, join, split
from workhorse.parallel.shards import local, placed_like


class Rate(NamedTuple):
    """A learning rate of an optimizer."""

    setting: str
    """The setting's name in the optimizer's section."""
    value: float
    """The rate at the schedule's peak."""
    weights: str
    """The weights that it applies to."""


class RatedConfig(Config):
    """Base class of the options of an optimizer."""

    if TYPE_CHECKING:
        learning_rate: float

    def rates(self) -> tuple[Rate, ...]:
        """Return the learning rates of the optimizer, the most important first."""
        return (Rate("learning_rate", self.learning_rate, "all weights"),)

    def scaled(self, factor: float) -> Self:
        """Return a copy with all learning rates multiplied by a factor."""
        return self.replace(learning_rate=self.learning_rate * factor) if factor != 1 else self


class AdamWConfig(RatedConfig):
    """AdamW. Weight decay applies only to matrices, never to norms, biases and other vectors."""

    kind: Annotated[Literal["adamw"], OnResume.NEW_RUN] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate at the schedule's peak."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the running mean of gradients: the fraction of the mean that a step keeps."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the running mean of squared gradients, as `beta1`."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the divisor of an update, the square root of the mean of squared gradients."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Each step multiplies a matrix by `1 - learning_rate · weight_decay`."""
    base_width: int | None = Field(default=None, ge=1)
    """Width for which `learning_rate` was chosen, for muP (2203.03466 table 8); None: no muP. The
    learning rate of matrices inside the layers and of an untied head is multiplied by
    `base_width / d_model`, so that the best rate of a narrow model is also the best of a wide one.
    Weight decay per step stays `learning_rate · weight_decay`, without this factor. Requires
    `init: fan_in` and the same `head_dim` at all widths. An untied head must start at zero; a tied
    head needs a `multiplier` of `base_width / d_model`."""
    mean_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the running mean of gradients. bfloat16 saves two bytes per parameter and rounds the
    mean by up to 0.4 % at each step, as DeepSeek-V3 does (2412.19437 §3.3.3). The mean of squares
    stays float32: with `beta2` near 1 its changes would be rounded away."""
    decay_embeddings: bool = False
    """True if weight decay also applies to token and position embeddings (and a head tied to them).
    Embeddings of tokens that no batch contains then only shrink, and small embeddings cause large
    gradients in the norm that follows (OLMo 2, 2501.00656 §3.2)."""


class State(NamedTuple):
    """A weight with its gradient and optimizer state, all of one shape, and its update count."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    mean_square: Tensor
    updates: Tensor
    low_bits: Tensor | None = None


class _CompiledNumbers(NamedTuple):
    """Scalar inputs of a compiled update: tensors at fixed addresses, for CUDA graphs."""

    numbers: Tensor
    grad_scale: Tensor
    constants: Tensor


def _compiled_loops(
    states: list[State], numbers: Tensor, grad_scale: Tensor, constants: Tensor
) -> None:
    """Update bfloat16 weights, each with one compiled loop (`compiled.adamw_`)."""
    update = compiled_adamw_()
    for one, its_numbers in zip(states, numbers.unbind(), strict=True):
        assert one.low_bits is not None
        state = one.weight, one.low_bits, one.mean, one.mean_square
        flat = *(tensor.view(-1) for tensor in state), one.gradient.reshape(-1)
        update(*flat, its_numbers, grad_scale, constants)


class AdamW:
    """AdamW over named parameters that share one weight decay and one learning rate.

    It calls PyTorch's fused kernel directly, because the first instance of `torch.optim.Optimizer`
    imports the compiler, which takes a second. Each rank updates its own shard of a sharded
    parameter.

    Args:
        parameters: the parameters, by name.
        config: the options of the update rule.
        weight_decay: weight decay of these parameters.
        rate_factor: factor of the learning rate in `config`; weight decay does not change.
        masters: the float32 master weights; they may include those of other parameters.
        uniform: True if the rounding of an element must not depend on its position in a tensor, and
            so not on how the tensor is sharded. PyTorch's fused kernel for CPUs rounds the last few
            elements of a tensor differently.
        compiled: True to update bfloat16 weights with a compiled loop if no native operator can
            update them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: AdamWConfig,
        *,
        weight_decay: float,
        rate_factor: float = 1.0,
        masters: MasterWeights | None = None,
        uniform: bool = False,
        compiled: bool = False,
    ) -> None:
        self.learning_rate = config.learning_rate * rate_factor
        self.weight_decay = weight_decay / rate_factor
        self.parameters = dict(parameters)
        self.config = config
        self.uniform = uniform
        self.compiled = compiled
        self.masters = masters or MasterWeights(parameters)
        weights = [local(weight) for weight in self.parameters.values()]
        mean_dtype = getattr(torch, config.mean_dtype)
        self.mean = [weight.new_zeros(weight.shape, dtype=mean_dtype) for weight in weights]
        self.mean_square = [
            weight.new_zeros(weight.shape, dtype=torch.float32) for weight in weights
        ]
        self.updates = [torch.zeros((), device=weight.device) for weight in weights]
        self._numbers: _CompiledNumbers | None = None
        """Scalar inputs of the compiled update, created at its first step."""
        self._recorded = Recorded()

    @torch.no_grad()
    def step(self, schedule: float, grad_scale: float | Tensor = 1.0) -> None:
        """Update the parameters once; for the arguments see `Optimizer.step`."""
        native: dict[bool, list[State]] = {False: [], True: []}
        whole: list[State] = []
        compiled: list[State] = []
        operators = self.masters.operators
        for one in self._states():
            has_low_bits, weight = one.low_bits is not None, one.weight
            split_or_float = has_low_bits or weight.dtype == torch.float32
            ours = operators is not None and weight.is_contiguous()
            if ours and weight.device.type == "cpu" and split_or_float:
                native[has_low_bits].append(one)
            elif not has_low_bits and one.mean.dtype == torch.float32:
                whole.append(one)
            elif has_low_bits and self.compiled:
                compiled.append(one)
            else:
                self._update_in_chunks(one, schedule, grad_scale)
        if operators is not None:
            for states in filter(None, native.values()):
                self._update_natively(operators, states, schedule, number(grad_scale))
        if compiled:
            self._update_compiled(compiled, schedule, grad_scale)
        if whole and (isinstance(grad_scale, Tensor) or grad_scale != 1):
            torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage]
                [one.gradient for one in whole], grad_scale
            )
        self._update(whole, schedule, refused(grad_scale))

    def _states(self) -> list[State]:
        weights = [local(weight).detach() for weight in self.parameters.values()]
        gradients = self.masters.gradients(self.parameters)
        low_bits = map(self.masters.low_bits.get, self.parameters)
        rows = (weights, gradients, self.mean, self.mean_square, self.updates, low_bits)
        return [State(*row) for row in zip(*rows, strict=True)]

    def _update_natively(
        self, operators: Training, states: list[State], schedule: float, grad_scale: float
    ) -> None:
        """Update weights with the native operator: all bfloat16 with low bits, or all float32."""
        operators.adamw_(
            [one.weight for one in states],
            [one.low_bits for one in states if one.low_bits is not None],
            [one.gradient.contiguous() for one in states],
            [one.mean for one in states],
            [one.mean_square for one in states],
            [one.updates for one in states],
            grad_scale=grad_scale,
            rate=self.learning_rate * schedule,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            eps=self.config.eps,
            weight_decay=self.weight_decay,
        )

    def _update_compiled(
        self, states: list[State], schedule: float, grad_scale: float | Tensor
    ) -> None:
        """Update bfloat16 weights, each with one compiled loop."""
        rate, like = self.learning_rate * schedule, states[0].mean_square
        if not isinstance(grad_scale, Tensor):
            grad_scale = like.new_full((), grad_scale)
        torch._foreach_add_(  # pyright: ignore[reportPrivateImportUsage]
            [one.updates for one in states], grad_scale.isfinite().float()
        )
        config, counts = self.config, [one.updates for one in states]
        numbers = numbers_of(counts, rate, 1 - rate * self.weight_decay, config.beta1, config.beta2)
        if self._numbers is None:
            constants = constants_of(config.beta1, config.beta2, config.eps, like.device)
            self._numbers = _CompiledNumbers(numbers, grad_scale.clone(), constants)
        self._numbers.numbers.copy_(numbers)
        self._numbers.grad_scale.copy_(grad_scale)
        update = partial(_compiled_loops, states, *self._numbers)
        if like.device.type == "cuda":
            # the addresses of low bits, state and numbers never change
            places = [one for state in states for one in (state.weight, state.gradient)]
            self._recorded(update, places)
        else:
            update()

    def _update_in_chunks(self, one: State, schedule: float, grad_scale: float | Tensor) -> None:
        """Update a weight with PyTorch's kernel, in chunks that are converted to float32.

        This is for a weight that is not float32, or whose state is not.
        """
        done, skips = one.updates.clone(), refused(grad_scale)
        numbers = one.weight, one.gradient, one.mean, one.mean_square
        rest = () if one.low_bits is None else (one.low_bits,)
        for rounded, part, narrow, square, *lower in chunks(*numbers, *rest):
            master, wide = join(rounded, *lower) if lower else rounded, narrow.float()
            one.updates.copy_(done)
            chunk = State(master, part.float() * grad_scale, wide, square, one.updates)
            self._update([chunk], schedule, skips)
            narrow.copy_(wide)
            for old, new in zip((rounded, *lower), split(master) if lower else (), strict=False):
                old.copy_(new)

    def _update(self, states: list[State], schedule: float, skips: Tensor | None = None) -> None:
        """Update weights with PyTorch's kernel. All tensors except the counts are float32.

        `skips` is a boolean tensor (), True to skip the update; None to make it.
        """
        if not states:
            return
        if self.uniform and states[0].weight.device.type == "cpu":
            assert skips is None, "on a CPU the host decides whether to update"
            for one in states:
                self._update_uniformly(one, schedule)
            return
        adamw(
            [one.weight for one in states],
            [one.gradient for one in states],
            [one.mean for one in states],
            [one.mean_square for one in states],
            [],
            [one.updates for one in states],
            fused=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=self.learning_rate * schedule,
            weight_decay=self.weight_decay,
            eps=self.config.eps,
            maximize=False,
            found_inf=None if skips is None else skips.float(),
        )

    def _update_uniformly(self, one: State, schedule: float) -> None:
        """Update one weight so that the rounding of an element does not depend on its position.

        Each tensor operation does one arithmetic operation per element and rounds once.
        """
        config, rate = self.config, self.learning_rate * schedule
        one.updates.add_(1)
        updates = int(one.updates)
        one.mean.mul_(config.beta1).add_(one.gradient * (1 - config.beta1))
        one.mean_square.mul_(config.beta2).add_(one.gradient.square().mul_(1 - config.beta2))
        root = one.mean_square.sqrt().div_(math.sqrt(1 - config.beta2**updates)).add_(config.eps)
        move = (one.mean / root).mul_(rate / (1 - config.beta1**updates))
        one.weight.mul_(1 - rate * self.weight_decay).sub_(move)

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimizer state, named `<parameter>.<state>`, without copying it."""
        tensors: dict[str, Tensor] = {}
        state = zip(self.parameters.items(), self.mean, self.mean_square, self.updates, strict=True)
        for (name, weight), mean, mean_square, updates in state:
            tensors[f"{name}.mean"] = placed_like(mean, weight)
            tensors[f"{name}.mean_square"] = placed_like(mean_square, weight)
            tensors[f"{name}.updates"] = updates
        return tensors
