"""Reads the weights of a decoder by name, and loads weights into it."""

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
"""Function that returns the object to copy each weight of a decoder into, by weight name."""
VOCABULARY_WEIGHTS = ("embedding.tokens.weight", "head.proj.weight", "head.proj.bias")
"""Names of the weights that have a row per token. With a tied head, only the first exists."""


def empty_decoder(
    config: DecoderConfig, kernel: KernelName, device: torch.device | str, dtype: torch.dtype
) -> Decoder:
    """Build a decoder with allocated but uninitialised weights."""
    return allocate(config.build(kernel, device="meta", dtype=dtype), device)


def allocate(decoder: Decoder, device: torch.device | str) -> Decoder:
    """Allocate uninitialised memory for a decoder on the meta device, in place."""
    # `to_empty` would do the same, but imports PyTorch's compiler for the strides: half a second.
    decoder._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=device))
    decoder.tie_weights()  # shared weights became separate when they left the meta device
    return decoder


def weights_of(decoder: Decoder) -> dict[str, Tensor]:
    """Return the weights of a decoder by name, without copying. A shared weight is listed once.

    Raises:
        WorkhorseError: some weights are quantised, which Workhorse's formats cannot store.
    """
    check_weights_kept(decoder)
    return {name: weight.detach() for name, weight in decoder.named_parameters()}


def check_numbers(name: str, tensor: Tensor, of: str = "model") -> None:
    """Check that a tensor of a model or adapter has no infinite values or NaN.

    A vector may contain -inf unless its name ends in `weight`: a bias of -inf excludes a token.

    Raises:
        WorkhorseError: a value is infinite or NaN.
    """
    if tensor.itemsize == 1:  # PyTorch has no isfinite for float8
        tensor = tensor.float()
    if tensor.sum(dtype=torch.float32).isfinite():  # much faster than testing each value
        return
    wrong = ~tensor.float().isfinite()  # a float64 may not fit float32
    if tensor.ndim == 1 and not name.endswith("weight"):
        wrong &= tensor != -torch.inf
    if wrong.any():
        raise WorkhorseError(
            f"{name} has infinite values or NaN; use an earlier checkpoint of the {of}"
        )


def mapped_weights(decoder: Decoder) -> dict[str, Destination]:
    """Return destinations for loading weights that use the memory-mapped file if possible.

    A weight that is stored with its final dtype and layout is not copied but read on first use. A
    write to it does not change the file. Other weights are copied.
    """
    mapped: set[int] = set()
    return {name: _MappedWeight(weight, mapped) for name, weight in decoder.named_parameters()}


class _MappedWeight:
    """A weight that shares the memory of the loaded tensor if dtype and layout are the same.

    Args:
        weight: the weight to load.
        mapped: addresses that other weights already share; an address is not shared twice.
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
    """Copy weights by name into a decoder, or to the destinations that `places` returns.

    Raises:
        WorkhorseError: names or shapes differ, or a tensor has a dtype that weights cannot have.
    """
    for name, weight in weights.items():
        check_weight(name, weight)
    copy_tensors(places(decoder), weights, "model")


def with_rows(weights: Mapping[str, Tensor], rows: int, new: range) -> dict[str, Tensor]:
    """Extend the weights that have a row per token; see `grown`."""
    return {
        name: grown(weight, rows, new) if name in VOCABULARY_WEIGHTS else weight
        for name, weight in weights.items()
    }


def grown(weight: Tensor, rows: int, new: range) -> Tensor:
    """Extend a weight that has a row per token; the row of each new token is the mean of the old.

    The logit of a new token is then the mean logit. So by Jensen's inequality, `n` new tokens
    beside `m` old ones raise the loss by up to `log(1 + n / m)` per token.

    Args:
        weight: the weight `(vocab, ...)`. Rows from `new.start` on belong to no token.
        rows: number of rows of the result, `vocab` or more. Added rows are the mean too.
        new: ids of the new tokens. The other rows of `weight` stay as they are.

    Paper: Hewitt (2021), Initializing New Word Embeddings for Pretrained Language Models,
    nlp.stanford.edu/~johnhew/vocab-expansion.html; compared with alternatives in 2407.05841.
    """
    if rows == len(weight) and not new:
        return weight
    mean = weight[: new.start].mean(0)
    result = torch.cat([weight, mean.expand(rows - len(weight), *mean.shape)])
    result[new.start : new.stop] = mean
    return result
