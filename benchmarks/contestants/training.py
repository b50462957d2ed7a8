"""Code shared by all training contestants: AdamW's settings, the batch, the timing of a round."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from benchmarks.harness.limits import seconds_of
from benchmarks.harness.shapes import TRAINING
from benchmarks.harness.worker import Round

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.99)
GRAD_CLIP = 1.0
WARM_UP = 3
"""Steps before the first round; the second step may compile again."""
STEPS = {"tiny": 40, "baby": 3, "gpt2": 1}
"""Steps of a round, which takes about half a second to two seconds."""


def batch(shape: str, device: str, threads: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets `(batch, context)`, the same for all contestants."""
    torch.set_num_threads(threads)
    sizes = TRAINING[shape]
    torch.manual_seed(0)
    rows = torch.randint(sizes.vocab_size, (sizes.batch, sizes.context + 1), device=device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def rounds(shape: str, step: Callable[[], object], device: str) -> Round:
    """Rounds that return `tokens` per second, after the warm-up steps."""
    sizes = TRAINING[shape]
    tokens = sizes.batch * sizes.context * STEPS[shape]

    def steps() -> None:
        for _ in range(STEPS[shape]):
            step()

    for _ in range(WARM_UP):
        step()
    return lambda: {"tokens": tokens / seconds_of(steps, device)}


def autocast(dtype: str, device: str) -> AbstractContextManager[object]:
    """The usual mixed precision: weights in float32, matmuls in `dtype`."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, getattr(torch, dtype))


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    dtype: str,
    device: str,
) -> Callable[[], None]:
    """A training step in plain PyTorch."""

    def step() -> None:
        with autocast(dtype, device):
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's fastest AdamW."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
