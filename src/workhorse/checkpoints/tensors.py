"""Tensors by name, in and out of a decoder."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from workhorse.devices.transfer import Destination, copy_tensors
from workhorse.errors import WorkhorseError
from workhorse.models.huggingface.moves import check_weight
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.transforms.record import check_weights_kept

Places = Callable[[Decoder], Mapping[str, Destination]]
"""For an empty decoder: the destination of each of its weights, by name."""


def empty_decoder(
    config: DecoderConfig, kernel: KernelName, device: torch.device | str, dtype: torch.dtype
) -> Decoder:
    """A decoder whose weights are allocated but not yet filled."""
    return allocate(config.build(kernel, device="meta", dtype=dtype), device)


def allocate(decoder: Decoder, device: torch.device | str) -> Decoder:
    """Move a decoder from the meta device to uninitialised memory, in place."""
    # As `to_empty`, but that asks for strides and imports PyTorch's compiler for it: half a second.
    decoder._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=device))
    decoder.tie_weights()  # moving from meta parts what was shared
    return decoder


def weights_of(decoder: Decoder) -> dict[str, Tensor]:
    """Every weight once, by the first of its names; the tensors themselves.

    Raises:
        WorkhorseError: some are quantised, which no format of ours holds.
    """
    check_weights_kept(decoder)
    return {name: weight.detach() for name, weight in decoder.named_parameters()}


def check_numbers(name: str, tensor: Tensor) -> None:
    """Refuse to write weights that no model can compute with.

    A vector other than a `weight` may hold -inf: as a bias of logits it rules tokens out.

    Raises:
        WorkhorseError: a value is infinite or NaN.
    """
    if tensor.sum(dtype=torch.float32).isfinite():  # far quicker than testing each
        return
    wrong = ~tensor.isfinite()
    if tensor.ndim == 1 and not name.endswith("weight"):
        wrong &= tensor != -torch.inf
    if wrong.any():
        raise WorkhorseError(
            f"{name} holds infinite values or NaN; write an earlier state of the model"
        )


def mapped_weights(decoder: Decoder) -> dict[str, Destination]:
    """Like `weights_of`, but a weight that is stored as it is used is not copied.

    It is the mapped file itself: available at once, read from the disk when it is first used, and
    copied by the system if something writes to it, so that nothing reaches the file. The others are
    copied into ordinary pages: to make large ones the system may first have to move others, which
    takes longer than the copy.
    """
    mapped: set[int] = set()
    return {name: _MappedWeight(weight, mapped) for name, weight in decoder.named_parameters()}


class _MappedWeight:
    """Takes over the memory of what is copied to it, if it has the same dtype and layout.

    Args:
        weight: not yet filled.
        mapped: addresses that already belong to a weight; no two weights share memory.
    """

    def __init__(self, weight: nn.Parameter, mapped: set[int]) -> None:
        self.weight = weight
        self.mapped = mapped

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def copy_(self, source: Tensor) -> None:
        if (
            source.dtype == self.weight.dtype
            and source.device == self.weight.device
            and source.is_contiguous()
            and source.data_ptr() not in self.mapped
        ):
            self.mapped.add(source.data_ptr())
            self.weight.data = source
        else:
            self.weight.copy_(source)


@torch.no_grad()
def load_weights(
    decoder: Decoder, weights: Mapping[str, Tensor], places: Places = weights_of
) -> None:
    """Copy weights into a decoder, by name, or to the destinations that `places` gives.

    Raises:
        WorkhorseError: names or shapes differ, or a tensor has a dtype that is not for weights.
    """
    for name, weight in weights.items():
        check_weight(name, weight)
    copy_tensors(places(decoder), weights, "model")
