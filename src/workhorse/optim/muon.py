"""Muon: momentum updates that are orthogonalised before they are applied.

Keller Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024). The update
scale for which AdamW's learning rate and weight decay can be used is from Moonshot (2502.16982
§2.2).
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import OfItsKind, OnResume
from workhorse.devices.names import multiplies_bfloat16
from workhorse.native import Training
from workhorse.optim.adamw import AdamWConfig, Rate, RatedConfig
from workhorse.optim.gradients import number, refused
from workhorse.optim.master_weights import MasterWeights
from workhorse.parallel.shards import is_sharded, local, part_of_stack, placed_like, whole_stack

if TYPE_CHECKING:
    from workhorse.parallel.division.parts import TensorSlice

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b and c of the iteration `X ← aX + b(XXᵀ)X + c(XXᵀ)²X`. Of all coefficients
that move singular values to about 0.7 to 1.2, these raise small ones fastest (Keller Jordan)."""


Shapes = tuple[torch.Size, torch.Size]
"""Shape of a matrix in the whole model, and on this rank (smaller with tensor parallelism)."""


class MuonConfig(RatedConfig):
    """Muon for the matrices inside the layers, AdamW for everything else."""

    kind: Annotated[Literal["muon"], OnResume.NEW_RUN] = "muon"
    learning_rate: Annotated[float, OfItsKind()] = Field(default=1e-3, gt=0, le=1e9)
    """Learning rate of the matrices inside the layers, at the schedule's peak."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the running mean of gradients: the fraction of the mean that a step keeps."""
    nesterov: bool = True
    """True for Nesterov momentum, which looks one step ahead."""
    iterations: int = Field(default=5, ge=1, le=100)
    """Number of Newton–Schulz iterations; fewer are faster and less orthogonal."""
    scale: Literal["match_adamw", "spectral"] = "match_adamw"
    """`match_adamw` multiplies an update by `0.2·sqrt(max(rows, columns))`, which gives it the size
    of AdamW's updates, so AdamW's learning rates carry over (2502.16982). `spectral` multiplies by
    `sqrt(max(1, rows / columns))`, for learning rates around 0.02 (Keller Jordan)."""
    weight_decay: Annotated[float, OfItsKind()] = Field(default=0.1, ge=0)
    """Each step multiplies a matrix inside the layers by `1 - learning_rate · weight_decay`."""
    adamw: AdamWConfig = AdamWConfig()
    """Options of AdamW, which updates embeddings, head, norms and biases."""

    def rates(self) -> tuple[Rate, ...]:
        rest = "embeddings, head and norms"
        return (
            Rate("learning_rate", self.learning_rate, "the matrices inside the layers"),
            *(Rate(f"adamw.{rate.setting}", rate.value, rest) for rate in self.adamw.rates()),
        )

    def scaled(self, factor: float) -> Self:
        return super().scaled(factor).replace(adamw=self.adamw.scaled(factor))


class Muon:
    """Muon over named matrices, or stacks of matrices `(…, rows, columns)`.

    Matrices of one shape are orthogonalised in one batch, because small matrices cost more in calls
    than in arithmetic. If matrices are sharded, each rank stores its shard of the momentum. Only a
    whole matrix can be orthogonalised, so the update directions are gathered. Every rank
    orthogonalises all of them and applies its own shard.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: MuonConfig,
        *,
        masters: MasterWeights | None = None,
    ) -> None:
        self.config = config
        self.masters = masters or MasterWeights(parameters)
        self.groups: dict[Shapes, dict[str, nn.Parameter]] = {}
        for name, weight in parameters.items():
            cut = self._cut(name)
            shapes = weight.shape if cut is None else cut.shape, weight.shape
            self.groups.setdefault(shapes, {})[name] = weight
        self.momenta = {
            shapes: _zeros(list(group.values())) for shapes, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, schedule: float, grad_scale: float | Tensor = 1.0) -> None:
        """Update the parameters once; for the arguments see `Optimizer.step`."""
        config = self.config
        for shapes, group in self.groups.items():
            rate = config.learning_rate * schedule
            kept = 1 - rate * config.weight_decay
            size = rate * update_scale(config.scale, *shapes[0][-2:])
            operators, update = self._operators_for(group), self._update
            if operators is not None:
                update = partial(self._update_natively, operators)
            update(group, self.momenta[shapes], grad_scale=grad_scale, kept=kept, size=size)

    def _update(
        self,
        group: Mapping[str, nn.Parameter],
        momenta: Tensor,
        *,
        grad_scale: float | Tensor,
        kept: float | Tensor,
        size: float,
    ) -> None:
        """Update matrices of one shape to `weight · kept - size · direction`.

        `momenta` are stacked. The directions are orthogonalised; `grad_scale` multiplies the
        gradients.
        """
        weights = [self.masters.read(name) for name in group]
        update = torch.stack(self.masters.gradients(group)).float()
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            update *= grad_scale
        if (skips := refused(grad_scale)) is not None:
            update = torch.where(skips, momenta, update)  # so that the momenta do not change
            kept = torch.where(skips, 1.0, kept)
        momentum = self.config.momentum
        momenta.lerp_(update, 1 - momentum)
        update = update.lerp_(momenta, momentum) if self.config.nesterov else momenta
        name = next(iter(group))
        update = orthogonalize(self._whole(update, name), self.config.iterations)
        update = self._part(update, name).to(weights[0].dtype)
        if skips is not None:
            update = update.masked_fill(skips, 0)
        torch._foreach_mul_(weights, kept)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(  # pyright: ignore[reportPrivateImportUsage]
            weights, list(update.unbind()), alpha=-size
        )
        for name, values in zip(group, weights, strict=True):
            self.masters.write(name, values)

    def _update_natively(
        self,
        operators: Training,
        group: Mapping[str, nn.Parameter],
        momenta: Tensor,
        *,
        grad_scale: float | Tensor,
        kept: float,
        size: float,
    ) -> None:
        """Do the same as `_update`, with native operators before and after the matmuls."""
        config = self.config
        weights = [local(weight).detach() for weight in group.values()]
        gradients = [gradient.contiguous() for gradient in self.masters.gradients(group)]
        name, like = next(iter(group.items()))
        divided = is_sharded(like) or self._cut(name) is not None
        whole = momenta
        if divided:
            gradients = list(self._whole(torch.stack(gradients), name).unbind())
            whole = self._whole(momenta, name)
        directions = operators.muon_directions(
            gradients,
            whole,
            grad_scale=number(grad_scale),
            momentum=config.momentum,
            nesterov=config.nesterov,
        )
        update = newton_schulz(directions, config.iterations)
        if divided:
            momenta.copy_(self._part(whole, name))
            upright = update.mT if whole.shape[-2] > whole.shape[-1] else update
            update = self._part(upright.reshape(whole.shape), name)
            rows, columns = update.shape[-2:]
            update = (update.mT if rows > columns else update).contiguous()
        if update.numel():
            lower = [self.masters.low_bits[name] for name in group]
            operators.split_move_(weights, lower, update, kept=kept, size=size)

    def _cut(self, name: str) -> "TensorSlice | None":
        """Return the slice of a matrix on this rank; None if layers are not divided among ranks."""
        part = self.masters.part
        return None if part is None else part.cuts[name]

    def _whole(self, stack: Tensor, name: str) -> Tensor:
        """Gather whole matrices from the parts on all ranks; `stack` has the parts of this rank.

        All matrices have the shape and sharding of the parameter `name`.
        """
        part, like = self.masters.part, self.masters.parameters[name]
        stack = whole_stack(stack, like)
        return stack if part is None else part.whole_stack(stack, part.cuts[name])

    def _part(self, stack: Tensor, name: str) -> Tensor:
        """Cut this rank's parts out of a stack of whole matrices; the inverse of `_whole`."""
        part, like = self.masters.part, self.masters.parameters[name]
        stack = stack if part is None else part.part_of_stack(stack, part.cuts[name])
        return part_of_stack(stack, like)

    def _operators_for(self, group: Mapping[str, nn.Parameter]) -> Training | None:
        """Return the native operators if they can update these parameters, else None."""
        suitable = all(
            name in self.masters.low_bits and weight.device.type == "cpu"
            for name, weight in group.items()
        )
        return self.masters.operators if suitable else None

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimizer state, named `<parameter>.momentum`, without copying it."""
        return {
            f"{name}.momentum": placed_like(momentum, weight)
            for shapes, group in self.groups.items()
            for (name, weight), momentum in zip(
                group.items(), self.momenta[shapes].unbind(), strict=True
            )
        }


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Approximate the nearest matrix whose singular values are all 1.

    The singular values of the result are between about 0.7 and 1.2.

    Args:
        matrices: (…, rows, columns), each processed by itself.
        iterations: number of Newton–Schulz iterations; 5 suffice for singular values above about
            1 % of the norm.

    Returns:
        Matrices of the same shape, in the dtype that `iteration_dtype` chooses.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # makes the Gram matrix as small as possible
    # Dividing by the norm gives singular values up to 1; the clamp keeps a zero matrix zero.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    shape = x.shape
    x = x.to(iteration_dtype(x)).reshape(-1, *shape[-2:]).contiguous()
    x = newton_schulz(x, iterations).reshape(shape)
    return x.mT if tall else x


def newton_schulz(x: Tensor, iterations: int) -> Tensor:
    """Bring the singular values of matrices close to 1 by Newton–Schulz iterations.

    Args:
        x: (matrices, rows, columns), with rows <= columns and singular values up to 1. Contiguous,
            because on a CPU matmuls of transposed matrices took twice as long.
        iterations: number of iterations.
    """
    a, b, c = QUINTIC
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def iteration_dtype(matrices: Tensor) -> torch.dtype:
    """Return the dtype of Newton–Schulz iterations.

    It is bfloat16, which is accurate enough, if the device has instructions for it, otherwise the
    dtype of the matrices. On a CPU with AMX, bfloat16 was 1.3 to 3.4 times as fast for the matrices
    of small models.
    """
    return torch.bfloat16 if multiplies_bfloat16(matrices.device) else matrices.dtype


def update_scale(kind: str, rows: int, columns: int) -> float:
    """Return the factor of a matrix's orthogonalised updates; `kind` is `MuonConfig.scale`."""
    if kind == "match_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _zeros(weights: Sequence[Tensor]) -> Tensor:
    """Return float32 zeros with the shape of this rank's shards of these weights, stacked."""
    part = local(weights[0])
    return part.new_zeros(len(weights), *part.shape, dtype=torch.float32)
