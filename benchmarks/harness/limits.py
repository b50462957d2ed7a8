"""Limits of the machine as PyTorch reaches them: the rates of matmuls and of reading memory."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.worker import Round

READ_BYTES = 1 << 29
"""Far more than any CPU cache holds."""
READ_ROWS = 4096
TRIES = 5


def products(
    *,
    shapes: Sequence[Sequence[int]],
    tokens: int,
    dtype: str,
    device: str,
    backward: bool,
    threads: int,
) -> Round:
    """Rounds that return `gflops`: the rate of matmuls of the given shapes, in GFLOP/s.

    Forward matmuls are computed in each way that PyTorch has on a CPU, and the fastest counts;
    gradients are computed by `matmul`.

    Args:
        shapes: (rows, columns, count) of the weights.
        tokens: number of rows that are multiplied by them.
        dtype: the dtype of all matrices.
        device: the device.
        backward: True to include both gradients.
        threads: number of PyTorch threads.
    """
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    timed: list[tuple[list[Callable[[], Tensor]], float, int]] = []
    for rows, columns, count in shapes:
        x = torch.randn(tokens, columns, dtype=kind, device=device)
        weight = torch.randn(rows, columns, dtype=kind, device=device)
        flops = 2.0 * tokens * rows * columns
        timed.append((_forward_ways(x, weight), flops, count))
        if backward:
            gradient = torch.randn(tokens, rows, dtype=kind, device=device)
            timed.append(([partial(torch.matmul, gradient, weight)], flops, count))
            timed.append(([partial(torch.matmul, gradient.t(), x)], flops, count))
    for ways, _, _ in timed:
        for way in ways:
            way()

    def take() -> dict[str, float]:
        total = sum(flops * count for _, flops, count in timed)
        seconds = sum(_fastest(ways, device) * count for ways, _, count in timed)
        return {"gflops": total / seconds / 1e9}

    return take


def _forward_ways(x: Tensor, weight: Tensor) -> list[Callable[[], Tensor]]:
    ways: list[Callable[[], Tensor]] = [partial(torch.nn.functional.linear, x, weight)]
    if x.device.type == "cpu" and torch.backends.mkldnn.is_available():
        # PyTorch uses MKL for float32, which is the slower library on some processors.
        onednn = partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], "")
        with suppress(RuntimeError):  # oneDNN has no bfloat16 on CPUs with AVX2 only
            onednn()
            ways.append(onednn)
    return ways


def memory(*, device: str, threads: int) -> Round:
    """Rounds that return `gbytes`: GB/s read by a sum, or by a matrix-vector product."""
    torch.set_num_threads(threads)
    matrix = torch.ones(READ_ROWS, READ_BYTES // READ_ROWS // 4, device=device)
    vector = torch.ones(matrix.shape[1], device=device)
    ways: list[Callable[[], Tensor]] = [matrix.sum, partial(torch.mv, matrix, vector)]
    for way in ways:
        way()

    def take() -> dict[str, float]:
        return {"gbytes": READ_BYTES / _fastest(ways, device) / 1e9}

    return take


def _fastest(ways: Sequence[Callable[[], Tensor]], device: str) -> float:
    """Seconds of the fastest way; the median is taken for each way, as for the contestants."""
    return min(statistics.median(seconds_of(way, device) for _ in range(TRIES)) for way in ways)


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Seconds until some work ends on the device; on a GPU measured by the device's clock."""
    if torch.device(device).type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
