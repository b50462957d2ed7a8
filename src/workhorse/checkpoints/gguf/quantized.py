"""Quantised tensors of GGUF files: values from blocks, and blocks from values.

The package gguf has a decoder for every type that is read, and encoders for some. Q8_0 is decoded
here, so that reading it needs no package; Q4_K is encoded here, because the package cannot.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workhorse.errors import WorkhorseError, to_install

CODES, SCALE_BYTES = 32, 2
"""A block of Q8_0: the number of 8-bit codes, and the bytes of the float16 scale before them."""
GROUPS, GROUP = 8, 32
"""A block of Q4_K: groups that have a scale and an offset each, and values of a group."""
VALUES_AT_ONCE = 2**17
"""Values that are converted together: 512 KiB in float32, which caches hold."""


def gguf_package(task: str) -> Any:
    """The package gguf.

    Args:
        task: what needs it, for the error.

    Raises:
        WorkhorseError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise WorkhorseError(f"{task} needs the package gguf; {to_install('gguf')}") from None
    return gguf


def check_readable(kind: str) -> None:
    """Raise unless tensors of a quantised type can be dequantised here.

    Raises:
        WorkhorseError: the package gguf is missing, or too old to know the type.
    """
    if kind == "Q8_0":
        return
    package = gguf_package(f"reading {kind} tensors")
    number = package.GGMLQuantizationType.__members__.get(kind)
    try:
        package.quants.dequantize(np.zeros((0, 1), np.uint8), number)
    except (AttributeError, NotImplementedError):
        raise WorkhorseError(
            f"the installed package gguf cannot read {kind} tensors; pip install -U gguf"
        ) from None
    except (ValueError, IndexError):  # it knows the type; there is just no data
        pass


def dequantize(data: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The values of a tensor, in float32.

    Args:
        data: its bytes.
        kind: a type that `check_readable` accepts.
        shape: of the values; a row is a whole number of blocks.
    """
    if kind == "Q8_0":
        blocks = data.view(-1, SCALE_BYTES + CODES)
        scales = blocks[:, :SCALE_BYTES].contiguous().view(torch.float16).float()
        codes = blocks[:, SCALE_BYTES:].contiguous().view(torch.int8).float()
        return (codes * scales).view(shape)
    package = gguf_package(f"reading {kind} tensors")
    number = package.GGMLQuantizationType[kind]
    rows = data.numpy().reshape(math.prod(shape[:-1]), -1)
    values = np.empty((len(rows), shape[-1]), np.float32)
    step = max(1, VALUES_AT_ONCE // shape[-1])  # the package needs several times its result
    with np.errstate(all="ignore"):  # a damaged file may have infinite scales
        for at in range(0, len(rows), step):
            values[at : at + step] = package.quants.dequantize(rows[at : at + step], number)
    return torch.from_numpy(values).view(shape)


def quantize(values: np.ndarray, kind: Any) -> np.ndarray:
    """The bytes of values in a type of the package's `GGMLQuantizationType`."""
    if kind.name != "Q4_K":
        return gguf_package("writing GGUF").quants.quantize(values, kind)
    blocks = values.reshape(-1, GROUPS, GROUP)
    step = VALUES_AT_ONCE // (GROUPS * GROUP)
    parts = [_q4_k(blocks[at : at + step]) for at in range(0, len(blocks), step)]
    return np.concatenate(parts).reshape(*values.shape[:-1], -1)


def _q4_k(groups: np.ndarray) -> np.ndarray:
    """Blocks of Q4_K, `(blocks, 144)`, from values `(blocks, 8, 32)`.

    A value is `scale * step * code - offset * offset_step`: a 4-bit code for each value, a 6-bit
    step and offset for each group, and two float16 scales for each block.
    """
    steps, offsets = _fit(groups)
    scales = (steps.max(axis=1) / 63).astype(np.float16)
    offset_scales = (offsets.max(axis=1) / 63).astype(np.float16)
    coded_steps = _codes(steps, scales[:, None], 63)
    coded_offsets = _codes(offsets, offset_scales[:, None], 63)
    steps = coded_steps * scales[:, None].astype(np.float32)
    offsets = coded_offsets * offset_scales[:, None].astype(np.float32)
    codes = _codes(groups + offsets[..., None], steps[..., None], 15)
    # Two groups share 32 bytes: the even one has the low half of each.
    halves = codes[:, 0::2] | codes[:, 1::2] << 4
    ends = [one[:, None].view(np.uint8) for one in (scales, offset_scales)]
    six_bits = _packed(coded_steps, coded_offsets)
    return np.concatenate([*ends, six_bits, halves.reshape(len(groups), -1)], axis=1)


def _fit(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The step and the offset of each group, both at least 0, with a small error.

    Tries several ranges for the codes; least squares give the step and offset of the codes found.
    An error weighs more at a large value, as in ggml's reference quantiser.
    """
    weights = np.abs(groups) + np.sqrt(np.square(groups).mean(axis=-1, keepdims=True))
    low = np.minimum(groups.min(axis=-1), 0)
    width = groups.max(axis=-1) - low
    above, weighted = groups - low[..., None], weights * groups
    total, linear = weights.sum(axis=-1), weighted.sum(axis=-1)
    best_step, best_low, best = width / 15, low, np.full_like(low, np.inf)
    for levels in np.linspace(14.0, 16.0, 21, dtype=np.float32):
        codes = np.rint(above * _ratio(levels, width)[..., None]).clip(0, 15)
        first = np.einsum("bgi,bgi->bg", weights, codes)
        second = np.einsum("bgi,bgi,bgi->bg", weights, codes, codes)
        product = np.einsum("bgi,bgi->bg", weighted, codes)
        determinant = total * second - first * first
        step = _ratio(total * product - linear * first, determinant)
        offset = _ratio(second * linear - first * product, determinant)
        step = np.where(offset > 0, _ratio(product, second), step)
        offset = np.minimum(offset, 0)
        # the weighted squared error, less that of codes of 0
        error = step * (step * second + 2 * (offset * first - product))
        error += offset * (offset * total - 2 * linear)
        better = (error < best) & (step > 0)
        best = np.where(better, error, best)
        best_step = np.where(better, step, best_step)
        best_low = np.where(better, offset, best_low)
    return best_step, -best_low


def _ratio(above: np.ndarray | np.float32, below: np.ndarray) -> np.ndarray:
    """A quotient, or 0 for a division by 0."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)


def _codes(values: np.ndarray, step: np.ndarray, largest: int) -> np.ndarray:
    """Values as whole multiples of a step, from 0 to `largest`."""
    inverse = _ratio(np.float32(1), step.astype(np.float32))
    return np.rint(values * inverse).clip(0, largest).astype(np.uint8)


def _packed(steps: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Eight steps and eight offsets of 6 bits in 12 bytes.

    The first four of each have a byte each, whose upper two bits are the upper bits of the last
    four; the lower four bits of the last four of both share a byte.
    """
    high_steps, high_offsets = (one[:, 4:] >> 4 << 6 for one in (steps, offsets))
    shared = steps[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4
    return np.concatenate(
        [steps[:, :4] | high_steps, offsets[:, :4] | high_offsets, shared], axis=1
    )
