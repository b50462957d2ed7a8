"""Gemms in float8 on CUDA, by torchao: `train.fp8: true`.

Tested by torchao's emulation on a CPU; `python -m benchmarks.gpu precision` ran it on an H200.
"""

import importlib
from typing import Any

import torch
from torch import nn

from workhorse.errors import WorkhorseError, to_install
from workhorse.nn import Decoder

FIRST_CAPABILITY = (8, 9)
"""The lowest compute capability that multiplies float8: Ada, Hopper and newer have it."""
MULTIPLE = 16
"""Every side of a float8 gemm is a multiple of this."""


def check_float8(device: torch.device, dtype: torch.dtype, seq_len: int) -> None:
    """Refuse training that cannot multiply in float8.

    Raises:
        WorkhorseError: the device is not CUDA or is too old, the dtype is not bfloat16, the length
            does not fit, or torchao is not installed.
    """
    if device.type != "cuda":
        raise WorkhorseError(f"train.fp8=true needs CUDA, and this is {device.type}; leave it out")
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise WorkhorseError(
            f"train.fp8=true needs compute capability 8.9, and {name} has "
            f"{capability[0]}.{capability[1]}; leave it out"
        )
    if dtype != torch.bfloat16:
        raise WorkhorseError("train.fp8=true needs train.dtype=bfloat16; set it, or leave fp8 out")
    if seq_len % MULTIPLE:
        raise WorkhorseError(
            f"train.fp8=true needs a train.seq_len divisible by {MULTIPLE}, and it is {seq_len}; "
            "choose another"
        )
    _torchao()


def multiply_in_float8(decoder: Decoder, **options: Any) -> None:
    """Let the linear layers inside a decoder's layers multiply in float8, forwards and backwards.

    Weights stay the same parameters under the same names. Each operand is scaled by its largest
    element at every step (torchao's dynamic tensorwise scaling). Not changed are the head and
    routers, which are sensitive to rounding, and layers whose sides are not multiples of 16.

    Args:
        decoder: narrowed to bfloat16.
        options: of `torchao.float8.Float8LinearConfig`.
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
