"""nanoGPT from a checkout, because it is not a package. Model and optimizer are its own."""

import contextlib
import sys

import torch

from benchmarks.contestants.training import (
    BETAS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    batch,
    plain_step,
    rounds,
)
from benchmarks.harness.shapes import TRAINING
from benchmarks.harness.worker import Round


def train(
    *, shape: str, dtype: str, device: str, checkout: str, compiled: bool, threads: int
) -> Round:
    """Rounds of training steps."""
    sys.path.insert(0, checkout)
    from model import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    sizes = TRAINING[shape]
    tokens, targets = batch(shape, device, threads)
    with contextlib.redirect_stdout(sys.stderr):
        model = GPT(
            GPTConfig(
                block_size=sizes.context,
                vocab_size=sizes.vocab_size,
                n_layer=sizes.n_layers,
                n_head=sizes.n_heads,
                n_embd=sizes.d_model,
                dropout=0.0,
                bias=False,
            )
        ).to(device)
        optimizer = model.configure_optimizers(
            WEIGHT_DECAY, LEARNING_RATE, BETAS, torch.device(device).type
        )
    run = torch.compile(model) if compiled else model
    return rounds(
        shape,
        plain_step(model, optimizer, lambda: run(tokens, targets)[1], dtype, device),
        device,
    )
