"""Bfloat16 weights with float32 master weights in the optimizer: mixed precision without casts.

Autocast keeps float32 weights and casts them, and their gradients, at every use. Here weights,
activations and gradients are bfloat16 and nothing is cast; an update works on the float32 values
(1710.03740 §3.1). A float32 value is its rounding to bfloat16 plus sixteen low bits, so a master
weight needs only these bits in addition to the weight:

    bits of the master = bits of the weight · 2^16 + low bits, -2^15 <= low bits < 2^15
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workhorse.devices.transfer import Destination, SkippedDestination
from workhorse.native import Training
from workhorse.nn.experts.router import ALWAYS_FLOAT32
from workhorse.parallel.shards import is_sharded, local, placed_like, sharded_like
from workhorse.transforms.lora import MAGNITUDE

if TYPE_CHECKING:
    from workhorse.parallel.division.parts import ModelPart, TensorSlice

CHUNK = 2**18
"""Number of elements that are updated at once on a CPU, so that intermediate results stay in its
cache."""


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 tensor into its value rounded to bfloat16 and its low 16 bits, as int16.

    Ties are rounded away from zero.
    """
    bits = master.view(torch.int32)
    upper = (bits + 2**15) >> 16
    lower = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), lower.to(torch.int16)


def join(rounded: Tensor, low_bits: Tensor) -> Tensor:
    """Restore a float32 tensor, bitwise, from the two tensors that `split` returned."""
    return ((rounded.view(torch.int16).to(torch.int32) << 16) + low_bits).view(torch.float32)


def chunks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split tensors of one shape into flat chunks that fit into a CPU's cache.

    On other devices there is one chunk.
    """
    first = tensors[0]
    size = CHUNK if first.device.type == "cpu" else max(first.numel(), 1)
    return zip(*(tensor.detach().view(-1).split(size) for tensor in tensors), strict=True)


def round_weights(module: nn.Module) -> dict[str, Tensor]:
    """Round a module's parameters to bfloat16, in place.

    A router's selection bias and DoRA's magnitudes are not rounded: their updates are too small for
    bfloat16. Call this before sharding.

    Returns:
        The low bits of the trainable parameters, by name; see `split`.
    """
    low_bits: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.float32 and not name.endswith((ALWAYS_FLOAT32, MAGNITUDE)):
            assert not is_sharded(parameter), f"{name} is sharded; round it before"
            parameter.data, rest = split(parameter.data)
            if parameter.requires_grad:
                low_bits[name] = rest
    return low_bits


def _room_beside(weight: Tensor, bits: Tensor) -> Tensor:
    """Allocate memory for the low bits of this rank's shard of a weight."""
    part = local(weight)
    return torch.empty(part.shape, dtype=bits.dtype, device=part.device)


class LocalShard:
    """Destination of a copy: `copy_` takes this rank's part of a whole float32 tensor.

    Args:
        weight: the tensor on this rank that is written, of any dtype.
        low_bits: the low bits of a bfloat16 `weight`, which are written too, or None.
        cut: the position of `weight` in the whole tensor, if layers are divided among ranks.
    """

    def __init__(
        self, weight: Tensor, low_bits: Tensor | None = None, cut: "TensorSlice | None" = None
    ) -> None:
        self.weight, self.low_bits, self.cut = weight, low_bits, cut

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape if self.cut is None else self.cut.shape

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * torch.float32.itemsize

    def copy_(self, source: Tensor) -> None:
        source = source if self.cut is None else self.cut.of(source)
        part = local(sharded_like(source, self.weight))
        weight = local(self.weight).detach()
        if weight.dtype == torch.bfloat16 and part.dtype == torch.float32:
            part, low_bits = split(part)
            if self.low_bits is not None:
                self.low_bits.copy_(low_bits)
        weight.copy_(part)


class MasterWeights:
    """Float32 values and float32 gradients of trainable parameters, which may be bfloat16.

    A float32 parameter is its own master weight and accumulates its own gradient. For a sharded
    parameter, values and gradients are those of this rank's shard.

    Args:
        parameters: the parameters, by name; those that need no gradient are ignored.
        low_bits: the low bits that `round_weights` returned, of unsharded parameters. They are on
            the meta device if the parameters have no values yet; copies to `places` then set them.
        operators: native training operators, which update CPU tensors.
        part: this rank's part of the model, if layers are divided among ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        low_bits: Mapping[str, Tensor] | None = None,
        *,
        operators: Training | None = None,
        part: "ModelPart | None" = None,
    ) -> None:
        self.part = part
        trained = {name: weight for name, weight in parameters.items() if weight.requires_grad}
        self.parameters = trained
        self.low_bits = {
            name: _room_beside(trained[name], bits)
            if bits.is_meta
            else local(sharded_like(bits, trained[name]))
            for name, bits in (low_bits or {}).items()
        }
        self.operators = operators
        self.sums: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """Return a parameter's float32 values: the parameter itself if it is float32, or a copy."""
        weight = local(self.parameters[name]).detach()
        return join(weight, self.low_bits[name]) if name in self.low_bits else weight

    def write(self, name: str, values: Tensor) -> None:
        """Store updated float32 values that `read` returned.

        For a float32 parameter it does nothing, because `read` returned the parameter itself.
        """
        if name in self.low_bits:
            rounded, lower = split(values)
            local(self.parameters[name]).detach().copy_(rounded)
            self.low_bits[name].copy_(lower)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the float32 values of all parameters of a module, by name, trainable or not."""
        return {name: self._whole(name, weight) for name, weight in module.named_parameters()}

    def trained(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the float32 values of a module's trained parameters, by name."""
        return {
            name: self._whole(name, weight)
            for name, weight in module.named_parameters()
            if name in self.parameters
        }

    def _whole(self, name: str, weight: Tensor) -> Tensor:
        if name in self.low_bits:
            return placed_like(self.read(name), weight)
        return weight.detach().float()

    def places(self, module: nn.Module) -> dict[str, Destination]:
        """Return copy destinations for the float32 weights of a module; see `destinations`."""
        return self.destinations(dict(module.named_parameters()))

    def destinations(self, tensors: Mapping[str, Tensor]) -> dict[str, Destination]:
        """Return a copy destination for each tensor of the whole model, by its name there.

        A destination takes this rank's part of the tensor. Tensors that are only on other ranks get
        a destination that ignores them.

        Args:
            tensors: this rank's parameters, or their optimizer state, by name.
        """
        into: dict[str, Destination] = {}
        if self.part is not None:
            beside = self.part.beside(tensors)
            into |= {name: SkippedDestination(tensor.shape) for name, tensor in beside.items()}
        for name, tensor in tensors.items():
            cut = None if self.part is None else self.part.cut(name, tensor)
            own = LocalShard(tensor, self.low_bits.get(name), cut)
            into[name if cut is None else cut.name] = own
        return into

    def accumulate(self) -> None:
        """Add a micro-batch's gradients to float32 sums; small ones would vanish in bfloat16."""
        for name in self.low_bits:
            gradient = dense_gradient(self.parameters[name])
            if gradient is None:
                continue
            if name in self.sums:
                _add(self.sums[name], local(gradient))
            else:
                self.sums[name] = local(gradient).float()
            self.parameters[name].grad = None

    def gradient(self, name: str) -> Tensor | None:
        """Return a parameter's gradient, summed over micro-batches, sharded like the parameter.

        It is in float32 if `accumulate` was called; None if there is no gradient.
        """
        weight = self.parameters[name]
        if name in self.sums:
            return placed_like(self.sums[name], weight)
        return dense_gradient(weight)

    def gradients(self, names: Iterable[str]) -> list[Tensor]:
        """Return this rank's shards of the gradients of the named parameters; all must have one."""
        gradients: list[Tensor] = []
        for name in names:
            gradient = self.gradient(name)
            assert gradient is not None, f"{name} does not contribute to the loss"
            gradients.append(local(gradient))
        return gradients

    def take_gradients(self) -> list[Tensor]:
        """Remove and return this rank's shards of all gradients, in float32.

        The caller may overwrite them.
        """
        taken = [gradient.float().contiguous() for gradient in self.gradients(self.parameters)]
        self.zero_grad()
        return taken

    def put_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Set the float32 gradients of all parameters, in the order of `take_gradients`."""
        self._put(dict(zip(self.parameters, gradients, strict=True)))

    def change_gradients(
        self, names: Sequence[str], change: Callable[[list[Tensor]], object]
    ) -> None:
        """Change the gradients of the parameters `names`, in float32.

        The function `change` changes this rank's shards of the gradients in place.
        """
        parts = [gradient.float().contiguous() for gradient in self.gradients(names)]
        change(parts)
        self._put(dict(zip(names, parts, strict=True)))

    def _put(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            if name in self.low_bits:
                self.sums[name] = gradient
                parameter.grad = None
            else:
                parameter.grad = placed_like(gradient, parameter)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self.sums.clear()


def _add(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total`, in chunks, so that a CPU need not cast the whole of `part` at once."""
    if part.is_contiguous():
        for some, more in chunks(total, part):
            some.add_(more)
    else:
        total.add_(part)


def dense_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient; a sparse gradient (of an embedding) is first made dense."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad
