"""Weights in bfloat16 whose float32 master weights the optimizer keeps: mixed precision, no casts.

Autocast keeps float32 weights and casts them, and their gradients, at every use. Here weights,
activations and gradients are bfloat16 and nothing is cast; an update works on the float32 values
(1710.03740 §3.1). A float32 number is its rounding to bfloat16 and sixteen low bits, so a master
weight takes no more memory than these bits beside the weight:

    bits of the master = bits of the weight · 2^16 + low bits, -2^15 <= low bits < 2^15
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workhorse.devices.transfer import Destination, Elsewhere
from workhorse.native import Training
from workhorse.nn.experts.router import ALWAYS_FLOAT32
from workhorse.optim.shards import is_sharded, local, placed_like, sharded_like

if TYPE_CHECKING:
    from workhorse.parallel.division.parts import Cut, ModelPart

CHUNK = 2**18
"""Numbers that a CPU updates at once: few enough for intermediate results to stay in the cache."""


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor as its rounding to bfloat16 (half away from zero) and int16 low bits."""
    bits = master.view(torch.int32)
    upper = (bits + 2**15) >> 16
    lower = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), lower.to(torch.int16)


def join(rounded: Tensor, low_bits: Tensor) -> Tensor:
    """The float32 tensor that `split` was given, bit for bit."""
    return ((rounded.view(torch.int16).to(torch.int32) << 16) + low_bits).view(torch.float32)


def chunks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Tensors of one shape in flat chunks that fit a CPU's cache; whole on other devices."""
    first = tensors[0]
    size = CHUNK if first.device.type == "cpu" else max(first.numel(), 1)
    return zip(*(tensor.detach().view(-1).split(size) for tensor in tensors), strict=True)


def round_weights(module: nn.Module) -> dict[str, Tensor]:
    """Round a module's parameters to bfloat16, in place; returns low bits by name.

    These are of parameters that are trained: one that is not needs no more than its rounding. A
    router's selection bias stays as it is, for it moves in steps too small for bfloat16. To be
    called before sharding.
    """
    low_bits: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.float32 and not name.endswith(ALWAYS_FLOAT32):
            assert not is_sharded(parameter), f"{name} is sharded; round it before"
            parameter.data, rest = split(parameter.data)
            if parameter.requires_grad:
                low_bits[name] = rest
    return low_bits


def _room_beside(weight: Tensor, bits: Tensor) -> Tensor:
    """Memory for such low bits of this process's part of a weight."""
    part = local(weight)
    return torch.empty(part.shape, dtype=bits.dtype, device=part.device)


class OwnPart:
    """Takes this process's part of a whole float32 tensor.

    Args:
        weight: to be written, of any dtype.
        low_bits: those of its float32 master, if that is not the weight itself.
        cut: where it lies in the whole; None: it is whole, but for its shards.
    """

    def __init__(
        self, weight: Tensor, low_bits: Tensor | None = None, cut: "Cut | None" = None
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
    """Float32 values and float32 gradients of trainable parameters, by name, whatever their dtype.

    A float32 parameter is its own master weight and accumulates its own gradient, at no cost here.
    Of a sharded parameter, these are of the part that this process holds.

    Args:
        parameters: by name; those without gradients are left out.
        low_bits: from `round_weights`, of whole parameters even if these are sharded by now; on
            the meta device if these had no values yet, which `places` then takes.
        operators: of training, which update tensors on the CPU.
        part: of the model that these are, where layers are divided.
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
        """A parameter's float32 values: a copy, or the parameter itself if it is float32."""
        weight = local(self.parameters[name]).detach()
        return join(weight, self.low_bits[name]) if name in self.low_bits else weight

    def write(self, name: str, values: Tensor) -> None:
        """Write back what `read` gave and an update changed; nothing to do if it is float32."""
        if name in self.low_bits:
            rounded, lower = split(values)
            local(self.parameters[name]).detach().copy_(rounded)
            self.low_bits[name].copy_(lower)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Every weight of the module, trained or not, once, in float32, by name."""
        return {
            name: placed_like(self.read(name), weight)
            if name in self.low_bits
            else weight.detach().float()
            for name, weight in module.named_parameters()
        }

    def places(self, module: nn.Module) -> dict[str, Destination]:
        """Where whole float32 weights of the module are copied to, by name: this process's part."""
        return self.destinations(dict(module.named_parameters()))

    def destinations(self, tensors: Mapping[str, Tensor]) -> dict[str, Destination]:
        """Where whole tensors are copied to, by their names in the whole model.

        Args:
            tensors: this process's parameters, or what an optimizer keeps of them, by name.
        """
        into: dict[str, Destination] = {}
        if self.part is not None:
            beside = self.part.beside(tensors)
            into |= {name: Elsewhere(tensor.shape) for name, tensor in beside.items()}
        for name, tensor in tensors.items():
            cut = None if self.part is None else self.part.cut(name, tensor)
            own = OwnPart(tensor, self.low_bits.get(name), cut)
            into[name if cut is None else cut.name] = own
        return into

    def accumulate(self) -> None:
        """Add a micro-batch's gradients to float32 sums; in bfloat16 small ones would vanish."""
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
        """The gradient of the whole batch, placed as its parameter; float32 if accumulated."""
        weight = self.parameters[name]
        if name in self.sums:
            return placed_like(self.sums[name], weight)
        return dense_gradient(weight)

    def gradients(self, names: Iterable[str]) -> list[Tensor]:
        """This process's parts of the gradients of these parameters; each must have one."""
        gradients: list[Tensor] = []
        for name in names:
            gradient = self.gradient(name)
            assert gradient is not None, f"{name} takes no part in the loss"
            gradients.append(local(gradient))
        return gradients

    def take_gradients(self) -> list[Tensor]:
        """This process's parts of all gradients, in float32; the parameters have none afterwards.

        They belong to the caller, who may write over them.
        """
        taken = [gradient.float().contiguous() for gradient in self.gradients(self.parameters)]
        self.zero_grad()
        return taken

    def put_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Give the parameters gradients in float32, in the order of `take_gradients`."""
        self._put(dict(zip(self.parameters, gradients, strict=True)))

    def change_gradients(
        self, names: Sequence[str], change: Callable[[list[Tensor]], object]
    ) -> None:
        """Change this process's parts of some parameters' gradients, in place, in float32."""
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
    """Add in chunks: a CPU makes a copy of all that it casts."""
    if part.is_contiguous():
        for some, more in chunks(total, part):
            some.add_(more)
    else:
        total.add_(part)


def dense_gradient(parameter: nn.Parameter) -> Tensor | None:
    """A parameter's gradient; a sparse one, of an embedding table, becomes dense."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad
