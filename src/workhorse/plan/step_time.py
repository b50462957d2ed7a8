"""Simulated time of a training step on one device.

The time of a layer is computed from its FLOPs and the memory traffic of its activations.
"""

from dataclasses import dataclass, replace

import torch

from workhorse.memory.account import is_of_layer
from workhorse.memory.device_memory import device_memory
from workhorse.memory.step_memory import PlannedStep
from workhorse.models.describe import SCORES, forward_flops
from workhorse.parallel.config import UNDIVIDED
from workhorse.plan.devices import GIGA, DeviceConfig
from workhorse.transforms.adapters import trained_parameters

FORWARD_PASSES, BACKWARD_PASSES = 2, 4
"""Number of memory accesses per saved activation in a pass: one operator writes it and the next one
reads it. The backward pass also accesses its gradient."""
UPDATE_PASSES = 2
"""Number of memory accesses per element of weights, gradients and optimizer state in an update: one
read, one write."""
STATE = 4
"""Number of float32 elements per weight in an update: the float32 weight (bfloat16 and its low
bits), two optimizer moments and the gradient."""
BANDWIDTH_REACHED = 0.8
"""Fraction of its peak bandwidth that memory reaches."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step.

    Attributes:
        compute: arithmetic and memory traffic, including recomputed activations.
        optimizer: the optimizer's update.
    """

    compute: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.optimizer


def simulated_step(step: PlannedStep, device: DeviceConfig) -> StepTime:
    """Simulate the time of a training step on one device.

    The size of saved activations is recorded on a model with one period of the layer pattern.

    Args:
        step: the step on one GPU; its `micro_batch_size` must not be `auto`.
        device: the GPU; its `reached` must be known.
    """
    config, train = step.config, step.train
    period = len(config.pattern or config.blocks)
    own = train.micro_batches(step.parallel)
    few = replace(
        step,
        config=config.replace(n_layers=period, pattern=config.pattern[:period]),
        parallel=UNDIVIDED,
    ).with_train(batch_size=own.size, micro_batch_size=None, activation_checkpointing=False)
    activations = device_memory(few, updates=False).activations
    kept = [size for part, size in activations.items() if is_of_layer(part)]
    traffic = config.n_layers * sum(kept) / len(kept)
    whole = config.build(device="meta")
    per_token = forward_flops(whole, train.seq_len)
    if train.kernel != "eager":  # other kernels skip the scores that a causal mask hides
        per_token[SCORES] = per_token.get(SCORES, 0) // 2
    head, scores = per_token.get("head", 0), per_token.get(SCORES, 0)
    layers = sum(per_token.values()) - head
    # Gradients of each matmul with a weight: of its input, and of the weight if it is trained. Both
    # inputs of the scores have a gradient.
    gradients = 2 if step.adapter is None else 1
    again = 1 + train.activation_checkpointing
    flops = again * layers + gradients * (layers - scores) + 2 * scores + (1 + gradients) * head
    passes = again * FORWARD_PASSES + BACKWARD_PASSES
    assert device.reached is not None
    peak = device.peak(getattr(torch, train.dtype), tf32=train.matmul_precision == "high")
    bandwidth = BANDWIDTH_REACHED * GIGA * device.bandwidth
    seconds = flops * own.size * train.seq_len / (device.reached * peak)
    trained = sum(weight.numel() for weight in whole.parameters())
    if step.adapter is not None:
        trained = trained_parameters(step.adapter.adapt(whole, seed=0))
    return StepTime(
        compute=own.count * (seconds + passes * traffic / bandwidth),
        optimizer=UPDATE_PASSES * trained * STATE * torch.float32.itemsize / bandwidth,
    )
