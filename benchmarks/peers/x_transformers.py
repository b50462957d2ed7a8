"""x-transformers: its decoder with flash attention, learned positions, and a tied head."""

import torch
from x_transformers import Decoder, TransformerWrapper  # pyright: ignore[reportMissingImports]

from benchmarks.contestants.training import batch, fused_adamw, plain_step, rounds
from benchmarks.harness.shapes import TRAINING
from benchmarks.harness.worker import Round


def train(*, shape: str, dtype: str, device: str, threads: int) -> Round:
    """Rounds of training steps."""
    sizes = TRAINING[shape]
    tokens, targets = batch(shape, device, threads)
    model = TransformerWrapper(
        num_tokens=sizes.vocab_size,
        max_seq_len=sizes.context,
        tie_embedding=True,
        attn_layers=Decoder(
            dim=sizes.d_model,
            depth=sizes.n_layers,
            heads=sizes.n_heads,
            attn_dim_head=sizes.d_model // sizes.n_heads,
            attn_flash=True,
            ff_no_bias=True,
        ),
    ).to(device)

    def loss() -> torch.Tensor:
        logits = model(tokens)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return rounds(shape, plain_step(model, fused_adamw(model), loss, dtype, device), device)
