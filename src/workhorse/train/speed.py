"""What a step costs in arithmetic, and what the machine can do."""

import time

import torch
from torch import nn

from workhorse.nn import Decoder
from workhorse.nn.grouped_linear import GroupedLinear
from workhorse.nn.head_loss import Multiply, product
from workhorse.nn.moe import MixtureOfExperts

PROBE_SECONDS = 0.05
"""How long the probe multiplies, after a warm-up of one product."""


def flops_per_token(decoder: Decoder, seq_len: int) -> int:
    """Floating-point operations to train on one token: forward and backward.

    Six for each weight that multiplies (in a mixture those of `top_k` experts), and
    `12 · heads · head_dim · seq_len` a layer for the attention (2204.02311 appendix B): what a
    causal kernel leaves out counts, what is computed again does not.
    """
    products = {
        id(module.weight): module.weight.numel()
        for module in decoder.modules()
        if isinstance(module, nn.Linear)
    }
    for module in decoder.modules():
        if isinstance(module, MixtureOfExperts):
            stacks = [part for part in module.experts.modules() if isinstance(part, GroupedLinear)]
            matrices = sum(stack.weight.numel() for stack in stacks)
            products[id(module)] = matrices * module.router.top_k // module.router.n_experts
    widths = sum(
        module.out_features
        for name, module in decoder.named_modules()
        if name.endswith((".q_proj", ".q_up_proj")) and isinstance(module, nn.Linear)
    )
    return 6 * sum(products.values()) + 12 * widths * seq_len


def peak_flops(device: torch.device, dtype: torch.dtype, multiply: Multiply = product) -> float:
    """Floating-point operations a second of a large matrix product here and now."""
    size = 8192 if device.type == "cuda" else 1024
    left = torch.rand(size, size, device=device, dtype=dtype)
    right = torch.rand(size, size, device=device, dtype=dtype)
    float(multiply(left, right, None)[0, 0])  # reading a number waits for the device
    products, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < PROBE_SECONDS or not products:
        float(multiply(left, right, None)[0, 0])
        products += 1
    return 2 * size**3 * products / seconds
