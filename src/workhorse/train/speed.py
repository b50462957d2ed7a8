"""The rate of arithmetic that the machine can reach."""

import time
from collections.abc import Callable

import torch

from workhorse.nn.products import Multiply, product

PROBE_SECONDS = 0.02
"""How long the probe multiplies matrices of one size; the very first gemm does not count."""
PROBE_SIZES = {"cpu": (256, 512, 1024)}
"""Small gemms fit between interruptions by other work, large ones keep all cores busy."""
LARGE_SIZES = (4096, 8192)


class Peak:
    """The highest number of floating-point operations per second measured on this machine.

    A machine may be busy while it is probed, so if training exceeds the peak it is measured again,
    and if training still exceeds it, training's own rate is the peak.

    Args:
        measure: probes the machine.
    """

    def __init__(self, measure: Callable[[], float]) -> None:
        self.measure = measure
        self.flops = measure()

    def fraction(self, rate: float) -> float:
        """A rate as a fraction of the peak, at most 1."""
        if rate > self.flops:
            self.flops = max(rate, self.measure())
        return rate / self.flops


def peak_flops(device: torch.device, dtype: torch.dtype, multiply: Multiply = product) -> float:
    """Floating-point operations per second of the fastest square gemm on this machine now.

    The best of many gemms of several sizes, since other work can only slow one down. Training's
    random generators are not touched.

    Args:
        device: that multiplies.
        dtype: of the matrices.
        multiply: the gemm that training uses.
    """
    best = 0.0
    generator = torch.Generator(device).manual_seed(0)
    for size in PROBE_SIZES.get(device.type, LARGE_SIZES):
        left, right = (
            torch.rand(size, size, device=device, dtype=dtype, generator=generator)
            for _ in range(2)
        )
        if not best:
            float(multiply(left, right.t(), None)[0, 0])  # the first gemm loads a library
        begin = time.perf_counter()
        while (start := time.perf_counter()) - begin < PROBE_SECONDS:
            float(multiply(left, right.t(), None)[0, 0])  # reading a number waits for the device
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
