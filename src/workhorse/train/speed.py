"""Measure the peak floating-point operations per second of a device."""

import time
from collections.abc import Callable

import torch

from workhorse.nn.products import Multiply, product

PROBE_SECONDS = 0.02
"""Seconds of measurement for each matrix size; the very first GEMM does not count."""
PROBE_SIZES = {"cpu": (256, 512, 1024)}
"""Matrix sizes to measure. Small GEMMs fit between interruptions by other programs; large ones keep
all cores busy."""
LARGE_SIZES = (4096, 8192)


class Peak:
    """The highest number of floating-point operations per second measured on this machine.

    The machine may be busy during the measurement. If training exceeds the peak, the peak is
    measured again. If training still exceeds it, training's own rate becomes the peak.

    Args:
        measure: measures the peak.
    """

    def __init__(self, measure: Callable[[], float]) -> None:
        self.measure = measure
        self.flops = measure()

    def fraction(self, rate: float) -> float:
        """Return a rate as a fraction of the peak, at most 1."""
        if rate > self.flops:
            self.flops = max(rate, self.measure())
        return rate / self.flops


def peak_flops(device: torch.device, dtype: torch.dtype, multiply: Multiply = product) -> float:
    """Measure the floating-point operations per second of the fastest square GEMM.

    The result is the best of many GEMMs of several sizes, because other programs can only slow a
    GEMM down. The random generators of training are not used. `multiply` is the GEMM that training
    uses.
    """
    best = 0.0
    generator = torch.Generator(device).manual_seed(0)
    for size in PROBE_SIZES.get(device.type, LARGE_SIZES):
        left, right = (
            torch.rand(size, size, device=device, dtype=dtype, generator=generator)
            for _ in range(2)
        )
        if not best:
            float(multiply(left, right.t(), None)[0, 0])  # the first GEMM loads a library
        begin = time.perf_counter()
        while (start := time.perf_counter()) - begin < PROBE_SECONDS:
            float(multiply(left, right.t(), None)[0, 0])  # reading an element waits for the device
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
