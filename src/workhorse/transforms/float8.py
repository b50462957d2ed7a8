"""Float8 matmuls on CUDA with torchao: `train.fp8: true`.

The tests use torchao's emulation on a CPU. `benchmarks.gpu precision` of version 0.11.0 was run on
an H200.
"""

import importlib
from typing import Any

import torch
from torch import nn

from workhorse.errors import WorkhorseError, to_install
from workhorse.nn import Decoder

FIRST_CAPABILITY = (8, 9)
"""The lowest compute capability with float8 matmuls: Ada, Hopper and newer have it."""
MULTIPLE = 16
"""Every dimension of the matrices in a float8 matmul must be a multiple of this."""


def check_float8(device: torch.device, dtype: torch.dtype, seq_len: int) -> None:
    """Check that training can use float8 matmuls.

    Raises:
        WorkhorseError: the device is not CUDA or is too old, the dtype is not bfloat16, `seq_len`
            is not a multiple of 16, or torchao is not installed.
    """
    if device.type != "cuda":
        raise WorkhorseError(
            f"train.fp8=true needs CUDA, and the device is {device.type}; remove train.fp8"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise WorkhorseError(
            f"train.fp8=true needs compute capability 8.9, and {name} has "
            f"{capability[0]}.{capability[1]}; remove train.fp8"
        )
    if dtype != torch.bfloat16:
        raise WorkhorseError("train.fp8=true needs train.dtype=bfloat16; set this dtype")
    if seq_len % MULTIPLE:
        raise WorkhorseError(
            f"train.fp8=true needs a train.seq_len divisible by {MULTIPLE}, and it is {seq_len}; "
            f"choose a multiple of {MULTIPLE}"
        )
    _torchao()


def multiply_in_float8(decoder: Decoder, **options: Any) -> None:
    """Make a decoder's linear layers multiply in float8, in forward and backward passes.

    The weights stay bfloat16 parameters with the same names. Each operand is scaled by its largest
    element at every step (torchao's dynamic tensorwise scaling). The head and the routers do not
    change, because they are sensitive to rounding. Linear layers with an input or output width that
    is not a multiple of 16 do not change either, because float8 matmuls need multiples of 16.

    Args:
        decoder: the decoder, in bfloat16.
        options: options of `torchao.float8.Float8LinearConfig`.
    """
    float8 = _torchao()
    float8.convert_to_float8_training(
        decoder.layers,
        module_filter_fn=_is_suitable,
        config=float8.Float8LinearConfig(**options),
    )


def _is_suitable(module: nn.Module, name: str) -> bool:
    return (
        isinstance(module, nn.Linear)
        and "router" not in name.split(".")
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    )


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError:
        raise WorkhorseError(
            f"train.fp8=true needs torchao, which is not installed; {to_install('quant')}"
        ) from None
