"""Hold a model's weights in 8 or 4 bits (`quantized_linear.py`), while loading or afterwards."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workhorse.devices.destination import Destination
from workhorse.devices.pages import in_large_pages
from workhorse.errors import WorkhorseError
from workhorse.execute.native_decoding.stream import StreamedLinear
from workhorse.native import Decoding, resolve
from workhorse.native.decoding import GROUP, LANES
from workhorse.nn.attention.self_attention import SelfAttention
from workhorse.nn.experts.grouped_linear import GroupedLinear
from workhorse.transforms.quantization.codes import FORMATS, FormatName
from workhorse.transforms.quantization.quantized_linear import (
    QuantizedGroupedLinear,
    QuantizedLinear,
    QuantizedWeight,
)
from workhorse.transforms.record import check, record


def quantize(model: nn.Module, format: FormatName) -> nn.Module:
    """Quantise the weights of a model's linear layers, in place; see `place_codes`."""
    weights = dict(model.named_parameters())
    for name, place in place_codes(model, format).items():
        weight = weights.pop(name)  # so that its memory is freed after its turn
        if not isinstance(place, Tensor):
            place.copy_(weight.detach())
    return model


@torch.no_grad()
def place_codes(model: nn.Module, format: FormatName) -> dict[str, Destination]:
    """Replace a model's linear layers by quantised ones, whose weights are copied in afterwards.

    Not quantised are embeddings, norms, routers, layers narrower than a group, and those whose
    weight latent attention reads itself. A head that is tied to the embedding gets its own copy, so
    the embedding stays exact. Experts of a mixture are quantised only if the native operator
    multiplies by their codes; otherwise all of them would be dequantised at every call.

    Args:
        model: on its device, after transforms that join linear layers; its state dict then holds
            codes.
        format: `int8` or `int4`.

    Returns:
        The destination of each of the model's weights, by its former name. Copying quantises one
        weight at a time, so the whole model is never in memory unquantised.

    Raises:
        WorkhorseError: there is no such format, or no layer to quantise; or the model carries a
            transform that this cannot follow.
    """
    if format not in FORMATS:
        raise WorkhorseError(f"quantize={format} is not a format; choose {' or '.join(FORMATS)}")
    check(model, "quantize")
    names: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    packed: dict[str, list[Destination]] = defaultdict(list)
    made: list[QuantizedWeight] = []
    # Wait for the operators: without them this process would dequantise each weight at every call.
    on_cpu = any(weight.device.type == "cpu" for weight in model.parameters())
    decoding = resolve("decoding", wait=True).decoding if on_cpu else None
    for name, layer, kind in _layers(model, decoding):
        quantized = kind(layer.weight.shape, format, layer.bias, layer.weight.device, decoding)
        model.set_submodule(name, quantized)
        packed[names[layer.weight]].append(quantized)
        made.append(quantized)
    if not made:
        raise WorkhorseError(f"quantize={format} finds no linear layer; leave it out")
    _into_large_pages(made)
    record(model, "quantize", format=format)
    kept = {name: [weight.detach()] for name, weight in model.named_parameters()}
    places = {name: [*kept.get(name, ()), *packed[name]] for name in names.values()}
    return {name: one[0] if len(one) == 1 else _Everywhere(one) for name, one in places.items()}


@dataclass(frozen=True)
class _Everywhere:
    """A weight that several modules share."""

    places: Sequence[Destination]

    @property
    def shape(self) -> torch.Size:
        return self.places[0].shape

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.places)

    def copy_(self, weight: Tensor) -> None:
        for place in self.places:
            place.copy_(weight)


def _layers(
    model: nn.Module, decoding: Decoding | None
) -> list[tuple[str, nn.Linear | GroupedLinear, type[QuantizedWeight]]]:
    """The layers to quantise, by name, and the layers that take their places."""
    parts = list(model.named_modules())
    kept = {
        layer
        for _, part in parts
        if isinstance(part, SelfAttention)
        for layer in map(part.get_submodule, part.multiplied_here)
    }
    found: list[tuple[str, nn.Linear | GroupedLinear, type[QuantizedWeight]]] = []
    for name, part in parts:
        if isinstance(part, nn.Linear) and part not in kept and _plain(part):
            found.append((name, part, QuantizedLinear))
        elif decoding is not None and type(part) is GroupedLinear:
            found.append((name, part, QuantizedGroupedLinear))
    return [item for item in found if _large_enough(item[1].weight)]


def _plain(layer: nn.Linear) -> bool:
    return type(layer).forward in (nn.Linear.forward, StreamedLinear.forward)


def _large_enough(weight: Tensor) -> bool:
    return weight.shape[-2] >= LANES and weight.shape[-1] >= GROUP


def _into_large_pages(layers: Sequence[QuantizedWeight]) -> None:
    """Move the codes and scales, which every token reads, next to each other into large pages."""
    here = [layer for layer in layers if layer.codes.device.type == "cpu"]
    for name, dtype in (("codes", torch.uint8), ("scales", torch.int16)):
        shapes = [layer.get_buffer(name).shape for layer in here]
        for layer, room in zip(here, in_large_pages(shapes, dtype), strict=True):
            setattr(layer, name, room)
