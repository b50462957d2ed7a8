"""A sampler for a config, without a model."""

from collections.abc import Callable

from torch import Tensor

from workhorse.generate import sampling
from workhorse.generate.config import GenerationConfig


def sampler(
    config: GenerationConfig, vocab: int | None = None
) -> Callable[[Tensor, Tensor, sampling.History | None], Tensor]:
    """`(logits (batch, vocab), uniforms float64 (batch,), history) -> tokens (batch,)`."""
    shape = sampling.shaping(config, vocab)

    def sample(logits: Tensor, uniforms: Tensor, history: sampling.History | None) -> Tensor:
        logits = shape(logits, history)
        return sampling.draw(logits, uniforms) if config.samples else sampling.greedy(logits)

    return sample
