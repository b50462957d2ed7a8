"""litgpt: a GPT with rotary positions on a quarter of each head and an untied head."""

import torch
from litgpt.model import GPT, Config  # pyright: ignore[reportMissingImports]

from benchmarks.contestants.training import batch, fused_adamw, plain_step, rounds
from benchmarks.harness.shapes import TRAINING
from benchmarks.harness.worker import Round


def train(*, shape: str, dtype: str, device: str, threads: int) -> Round:
    """Rounds of training steps."""
    sizes = TRAINING[shape]
    tokens, targets = batch(shape, device, threads)
    model = GPT(
        Config(
            block_size=sizes.context,
            vocab_size=sizes.vocab_size,
            padded_vocab_size=sizes.vocab_size,
            n_layer=sizes.n_layers,
            n_head=sizes.n_heads,
            n_embd=sizes.d_model,
            parallel_residual=False,
            bias=False,
        )
    ).to(device)

    def loss() -> torch.Tensor:
        logits = model(tokens)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return rounds(shape, plain_step(model, fused_adamw(model), loss, dtype, device), device)
