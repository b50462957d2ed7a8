"""What a step costs in arithmetic, and what the machine can do."""

import time
from collections.abc import Callable

import torch
from torch import nn

from workhorse.nn import Decoder
from workhorse.nn.attention.self_attention import SelfAttention
from workhorse.nn.experts.grouped_linear import GroupedLinear
from workhorse.nn.experts.mixture import MixtureOfExperts
from workhorse.nn.head_loss import Multiply, product

PROBE_SECONDS = 0.02
"""How long the probe multiplies matrices of one size; the first product of all is left out."""
PROBE_SIZES = {"cpu": (256, 512, 1024)}
"""Small products fit between two interruptions by other work, large ones fill the cores."""
LARGE_SIZES = (4096, 8192)


def flops_per_token(decoder: Decoder, seq_len: int) -> int:
    """Floating-point operations to train on one token: forward and backward.

    Six for each weight that multiplies (in a mixture those of `top_k` experts), and in each layer
    `6 · heads · (head_dim + value_dim) · keys` for scores and outputs of the attention. `keys` is
    `seq_len`, or the window or chunk where that is less: what a causal kernel leaves out of the
    square counts, as in PaLM (2204.02311 appendix B), and what a window hides does not. What is
    computed again (checkpointed activations) does not count either, nor do look-ups, norms,
    activations, the softmax and the optimizer.
    """
    flops = 0
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            flops += 6 * module.weight.numel()
        elif isinstance(module, MixtureOfExperts):
            flops += 6 * _multiplied(module)
        elif isinstance(module, SelfAttention):
            keys = min(seq_len, module.pattern.reach or seq_len)
            flops += 6 * module.n_heads * (module.head_dim + module.value_dim) * keys
    return flops


def _multiplied(mixture: MixtureOfExperts) -> int:
    """Weights of a mixture's experts that multiply one token."""
    stacks = [part for part in mixture.experts.modules() if isinstance(part, GroupedLinear)]
    matrices = sum(stack.weight.numel() for stack in stacks)
    return matrices * mixture.router.top_k // mixture.router.n_experts


class Peak:
    """The most floating-point operations a second that were seen here.

    A machine may be busy while it is probed, so a peak that training surpasses is measured anew,
    and where training is still quicker, its own rate is the peak.

    Args:
        measure: probes the machine.
    """

    def __init__(self, measure: Callable[[], float]) -> None:
        self.measure = measure
        self.flops = measure()

    def fraction(self, rate: float) -> float:
        """What part of the peak a rate is, at most 1."""
        if rate > self.flops:
            self.flops = max(rate, self.measure())
        return rate / self.flops


def peak_flops(device: torch.device, dtype: torch.dtype, multiply: Multiply = product) -> float:
    """Floating-point operations a second of the quickest square matrix product here and now.

    The best of many products of several sizes: other work on the machine only ever slows one down.
    No random number of the training's generators is drawn.

    Args:
        device: that multiplies.
        dtype: of the matrices.
        multiply: the product that training uses.
    """
    best = 0.0
    generator = torch.Generator(device).manual_seed(0)
    for size in PROBE_SIZES.get(device.type, LARGE_SIZES):
        left, right = (
            torch.rand(size, size, device=device, dtype=dtype, generator=generator)
            for _ in range(2)
        )
        if not best:
            float(multiply(left, right.t(), None)[0, 0])  # the first product loads a library
        begin = time.perf_counter()
        while (start := time.perf_counter()) - begin < PROBE_SECONDS:
            float(multiply(left, right.t(), None)[0, 0])  # reading a number waits for the device
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
