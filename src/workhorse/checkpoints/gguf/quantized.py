"""Quantises and dequantises the tensors of GGUF files.

Most types need the Python package `gguf`. Q8_0 is decoded without it. Q4_K is encoded here, because
the package can only decode it.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workhorse.errors import WorkhorseError, to_install

CODES, SCALE_BYTES = 32, 2
"""Size of a Q8_0 block: number of 8-bit codes, and bytes of the float16 scale in front."""
GROUPS, GROUP = 8, 32
"""Size of a Q4_K block: number of groups (each with a scale and an offset), values per group."""
VALUES_AT_ONCE = 2**17
"""Number of values converted at once: 512 KiB in float32, which fit into CPU caches."""


def gguf_package(task: str) -> Any:
    """Import the Python package `gguf`.

    Args:
        task: the task that needs the package, for the error message.

    Raises:
        WorkhorseError: the package is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise WorkhorseError(f"{task} needs the package gguf; {to_install('gguf')}") from None
    return gguf


def check_readable(kind: str) -> None:
    """Check that tensors of a quantised type can be dequantised.

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
    """Dequantise a tensor to float32.

    Args:
        data: the tensor's bytes.
        kind: a type that `check_readable` accepts.
        shape: shape of the values; a row is a whole number of blocks.
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
    step = max(
        1, VALUES_AT_ONCE // shape[-1]
    )  # the package needs several times the memory of its result
    with np.errstate(all="ignore"):  # a damaged file may have infinite scales
        for at in range(0, len(rows), step):
            values[at : at + step] = package.quants.dequantize(rows[at : at + step], number)
    return torch.from_numpy(values).view(shape)


def quantize(values: np.ndarray, kind: Any) -> np.ndarray:
    """Quantise values to bytes; `kind` is one of the package's `GGMLQuantizationType`."""
    if kind.name != "Q4_K":
        return gguf_package("writing GGUF").quants.quantize(values, kind)
    blocks = values.reshape(-1, GROUPS, GROUP)
    step = VALUES_AT_ONCE // (GROUPS * GROUP)
    parts = [_q4_k(blocks[at : at + step]) for at in range(0, len(blocks), step)]
    return np.concatenate(parts).reshape(*values.shape[:-1], -1)


def _q4_k(groups: np.ndarray) -> np.ndarray:
    """Quantise values `(blocks, 8, 32)` to blocks of Q4_K, `(blocks, 144)`.

    A value is `scale * step * code - offset * offset_step`, with a 4-bit code per value, a 6-bit
    step and offset per group, and two float16 scales per block.
    """
    steps, offsets = _fit(groups)
    scales = (steps.max(axis=1) / 63).astype(np.float16)
    offset_scales = (offsets.max(axis=1) / 63).astype(np.float16)
    coded_steps = _codes(steps, scales[:, None], 63)
    coded_offsets = _codes(offsets, offset_scales[:, None], 63)
    steps = coded_steps * scales[:, None].astype(np.float32)
    offsets = coded_offsets * offset_scales[:, None].astype(np.float32)
    codes = _codes(groups + offsets[..., None], steps[..., None], 15)
    # Two groups share 32 bytes: the even group has the low 4 bits of each.
    halves = codes[:, 0::2] | codes[:, 1::2] << 4
    ends = [one[:, None].view(np.uint8) for one in (scales, offset_scales)]
    six_bits = _packed(coded_steps, coded_offsets)
    return np.concatenate([*ends, six_bits, halves.reshape(len(groups), -1)], axis=1)


def _fit(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose a step and an offset for each group, both at least 0, that give a small error.

    Tries several ranges of codes. Least squares gives the step and the offset for the codes of each
    range. Errors of large values weigh more, as in ggml's reference quantiser.
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
        # the weighted squared error, minus the constant sum of weights * values ** 2
        error = step * (step * second + 2 * (offset * first - product))
        error += offset * (offset * total - 2 * linear)
        better = (error < best) & (step > 0)
        best = np.where(better, error, best)
        best_step = np.where(better, step, best_step)
        best_low = np.where(better, offset, best_low)
    return best_step, -best_low


def _ratio(above: np.ndarray | np.float32, below: np.ndarray) -> np.ndarray:
    """Divide element by element; 0 if the divisor is not positive."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)


def _codes(values: np.ndarray, step: np.ndarray, largest: int) -> np.ndarray:
    """Divide values by a step and round them to whole codes from 0 to `largest`."""
    inverse = _ratio(np.float32(1), step.astype(np.float32))
    return np.rint(values * inverse).clip(0, largest).astype(np.uint8)


def _packed(steps: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Pack eight steps and eight offsets of 6 bits into 12 bytes.

    Bytes 0 to 3 hold the first four steps, and bytes 4 to 7 the first four offsets. Their upper two
    bits hold the upper two bits of the last four steps and offsets. Each of bytes 8 to 11 holds the
    lower four bits of one of the last four steps and of its offset.
    """
    high_steps, high_offsets = (one[:, 4:] >> 4 << 6 for one in (steps, offsets))
    shared = steps[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4
    return np.concatenate(
        [steps[:, :4] | high_steps, offsets[:, :4] | high_offsets, shared], axis=1
    )
