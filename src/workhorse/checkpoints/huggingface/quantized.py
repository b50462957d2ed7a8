"""Dequantises the tensors of quantised Hugging Face checkpoints, each when it is read.

quant_method         stored tensors                                  dequantised tensor
mxfp4 (gpt-oss)      X_blocks uint8 (experts, rows, groups, 16)      X (experts, groups · 32, rows)
                     X_scales uint8 (experts, rows, groups)
fp8 (DeepSeek-V3)    X float8 (…, rows, columns)                     X (…, rows, columns)
                     X_scale_inv, one value per block or per matrix
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError, shown
from workhorse.models.huggingface.moves import TensorSource

Shape = tuple[int, ...]
Block = tuple[int, int]

_NIBBLES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class StoredTensors(TensorSource, Protocol):
    """A source of tensors that knows their dtypes before it reads them."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...


class Dequantized:
    """A source of tensors in which some are computed from stored ones (codes and scales).

    Args:
        source: the stored tensors.
        computed: shape of each computed tensor, and the function that computes it, by name.
        consumed: names of stored tensors to hide, because they are inputs of computed tensors.
    """

    def __init__(
        self,
        source: TensorSource,
        computed: Mapping[str, tuple[Shape, Callable[[], Tensor]]],
        consumed: set[str],
    ) -> None:
        self._source = source
        self._makers = {name: make for name, (_, make) in computed.items()}
        plain = {name: shape for name, shape in source.shapes.items() if name not in consumed}
        self.shapes: Mapping[str, Shape] = plain | {n: shape for n, (shape, _) in computed.items()}

    def read(self, name: str) -> Tensor:
        if name in self._makers:
            return self._makers[name]()
        return self._source.read(name)


def dequantized(
    source: StoredTensors, quantization_config: Mapping[str, Any] | None, dtype: torch.dtype
) -> TensorSource:
    """Return the tensors of a checkpoint as without quantisation: dequantised and renamed.

    Args:
        source: the stored tensors.
        quantization_config: as in `config.json`; None if the checkpoint is not quantised.
        dtype: dtype of dequantised tensors; other tensors keep their dtype.

    Raises:
        WorkhorseError: the method is unknown, or weights and scales do not match.
    """
    if quantization_config is None:
        return source
    if not isinstance(quantization_config, Mapping):
        raise WorkhorseError(
            f"quantization_config is {shown(quantization_config)}, not a mapping; "
            "take config.json from the model's publisher"
        )
    method = quantization_config.get("quant_method")
    if method == "mxfp4":
        return _mxfp4(source, dtype)
    if method == "fp8":
        return _fp8(source, quantization_config, dtype)
    if method == "bitnet":  # weights without it would compute something else
        raise WorkhorseError(
            "quantization method 'bitnet' is not supported, because its linear layers also round "
            "their inputs; use a model without quantization_config"
        )
    raise WorkhorseError(
        f"quantization method {shown(method)} is not supported (only mxfp4 and fp8); use the model "
        "without quantisation"
    )


def _mxfp4(source: StoredTensors, dtype: torch.dtype) -> TensorSource:
    computed: dict[str, tuple[Shape, Callable[[], Tensor]]] = {}
    consumed: set[str] = set()
    for scales in source.shapes:
        name = scales.removesuffix("_scales")
        if name != scales and f"{name}_blocks" not in source.shapes:
            raise WorkhorseError(
                f"tensor {shown(scales)} has no blocks: {name}_blocks is missing; fetch the files "
                "again"
            )
    for blocks, shape in source.shapes.items():
        name = blocks.removesuffix("_blocks")
        if name == blocks:
            continue
        scales = f"{name}_scales"
        if scales not in source.shapes:
            raise WorkhorseError(
                f"tensor {shown(blocks)} has no scales: {scales} is missing; fetch the files again"
            )
        types = {source.dtypes[blocks], source.dtypes[scales]}
        match shape:
            case (experts, rows, groups, 16) if (experts, rows, groups) == source.shapes[scales]:
                plain = (experts, groups * 32, rows)
            case _:
                plain = None
        if plain is None or types != {torch.uint8}:
            raise WorkhorseError(
                f"tensor {shown(blocks)} has shape {shape} and its scales {source.shapes[scales]}; "
                "mxfp4 needs uint8 of (experts, rows, groups, 16) and (experts, rows, groups)"
            )
        if name in source.shapes:
            raise WorkhorseError(
                f"tensor {shown(name)} is stored twice: plain and as {blocks}; fetch the files "
                "again"
            )

        def make(blocks: str = blocks, scales: str = scales) -> Tensor:
            return from_mxfp4(source.read(blocks), source.read(scales), dtype)

        computed[name] = (plain, make)
        consumed |= {blocks, scales}
    return Dequantized(source, computed, consumed)


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise MXFP4: 32 values of 4 bits share a scale of 2^(byte − 127); byte 255 is NaN.

    The lower 4 bits of a byte are the first of its two values. Matrices are returned transposed,
    (columns, rows), as in gpt-oss without quantisation.

    Args:
        blocks: uint8 (experts, rows, groups, 16).
        scales: uint8 (experts, rows, groups).
        dtype: dtype of the result.

    Paper: 2310.10537; OCP Microscaling Formats v1.0, §5.3.3 (E2M1) and §5.4.1 (E8M0).
    """
    experts, rows, groups, width = blocks.shape
    nibbles = torch.tensor(_NIBBLES)
    pairs = torch.stack(
        [nibbles.repeat(16), nibbles.repeat_interleave(16)], dim=1
    )  # the two values of each byte
    result = torch.empty(experts, groups * width * 2, rows, dtype=dtype)
    for packed, exponents, plain in zip(blocks, scales, result, strict=True):
        values = pairs[packed.int()].flatten(-2)  # (rows, groups, 32); float32 of one expert
        values *= exponents.view(torch.float8_e8m0fnu).float()[..., None]
        plain.copy_(values.flatten(-2).T)
    return result


def _fp8(
    source: StoredTensors, quantization_config: Mapping[str, Any], dtype: torch.dtype
) -> TensorSource:
    block = _block_size(quantization_config)
    computed: dict[str, tuple[Shape, Callable[[], Tensor]]] = {}
    consumed: set[str] = set()
    for name, shape in source.shapes.items():
        if source.dtypes[name] not in _FLOAT8 or name.endswith("_scale_inv"):
            continue
        scale = f"{name}_scale_inv"
        if scale not in source.shapes:
            raise WorkhorseError(
                f"tensor {shown(name)} has no scale: {scale} is missing; fetch the files again"
            )
        if source.shapes[scale] not in _scale_shapes(shape, block):
            raise WorkhorseError(
                f"tensor {shown(scale)} has shape {source.shapes[scale]}, which does not fit "
                f"{name} of shape {shape} with weight_block_size {block}"
            )
        if not source.dtypes[scale].is_floating_point:
            raise WorkhorseError(
                f"tensor {shown(scale)} has dtype {source.dtypes[scale]}, not a float dtype"
            )

        def make(name: str = name, scale: str = scale) -> Tensor:
            return from_fp8(source.read(name), source.read(scale), block, dtype)

        computed[name] = (shape, make)
        consumed.add(scale)
    for scale in source.shapes:
        if scale.endswith("_scale_inv") and scale not in consumed:
            raise WorkhorseError(
                f"tensor {shown(scale)} is a scale without a float8 tensor; fetch the files again"
            )
    # Activations are divided by these before a float8 matmul; our activations are not in float8.
    consumed |= {name for name in source.shapes if name.endswith("activation_scale")}
    return Dequantized(source, computed, consumed)


def _block_size(quantization_config: Mapping[str, Any]) -> Block | None:
    """Rows and columns of a block of values with one scale; None if there is one per matrix."""
    match quantization_config.get("weight_block_size"):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise WorkhorseError(f"weight_block_size is {shown(other)}, not [rows, columns]")


def _scale_shapes(shape: Shape, block: Block | None) -> tuple[Shape, ...]:
    """List the valid shapes for the scales of a float8 tensor."""
    *outer, rows, columns = shape if len(shape) > 1 else (0, 0)
    if block is None:
        return (), (1,), (*outer, 1, 1)
    return ((*outer, math.ceil(rows / block[0]), math.ceil(columns / block[1])),)


def from_fp8(weight: Tensor, scale: Tensor, block: Block | None, dtype: torch.dtype) -> Tensor:
    """Dequantise float8: `weight * scale` in float32. Blocks at the edges may be smaller.

    Args:
        weight: float8 (…, rows, columns).
        scale: (…, rows / block rows, columns / block columns), rounded up; or one per matrix.
        block: rows and columns of a block; None if a matrix has one scale.
        dtype: dtype of the result.

    Paper: 2412.19437 (DeepSeek-V3), §3.3.
    """
    if block is None:
        return (weight.float() * scale.float()).to(dtype)
    rows, columns = block
    result = torch.empty(weight.shape, dtype=dtype)
    for number, scales in enumerate(scale.float().unbind(-2)):  # one row of blocks at a time
        band = slice(number * rows, (number + 1) * rows)
        wide = scales.repeat_interleave(columns, dim=-1)[..., None, : weight.shape[-1]]
        result[..., band, :] = weight[..., band, :].float() * wide
    return result
