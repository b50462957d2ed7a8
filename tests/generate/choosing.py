"""Tokens chosen as a config says, without a model."""

from collections.abc import Callable

from torch import Tensor

from workhorse.generate.config import GenerationConfig
from workhorse.generate.sampling import samplers


def sampler(
    config: GenerationConfig, vocab: int | None = None
) -> Callable[[Tensor, Tensor, samplers.History | None], Tensor]:
    """`(logits (batch, vocab), uniforms float64 (batch,), history) -> tokens (batch,)`."""
    shape = samplers.shaping(config, vocab)

    def sample(logits: Tensor, uniforms: Tensor, history: samplers.History | None) -> Tensor:
        logits = shape(logits, history)
        return samplers.draw(logits, uniforms) if config.samples else samplers.greedy(logits)

    return sample
