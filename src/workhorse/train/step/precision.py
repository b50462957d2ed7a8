"""The precision of forward and backward passes, if it is not simply the dtype of the weights."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


class Precision:
    """Makes the context of a forward pass: autocast to a lower precision, or nothing.

    Training uses it for float16, whose range is too small for weights; bfloat16 has
    `optim.master_weights`.

    Args:
        device: of the passes.
        dtype: float16, or float32 for no autocast.
        matmul: precision of float32 gemms, `highest` or `high`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, matmul: str = "highest") -> None:
        self.device = device
        self.dtype = dtype
        self.matmul = matmul

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """Set PyTorch's process-wide precision of float32 gemms around passes on CUDA.

        On a CPU see `Gemm`; there PyTorch's attention took twice as long with PyTorch's `high`.
        """
        if self.device.type != "cuda":
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.matmul)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def __call__(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)
