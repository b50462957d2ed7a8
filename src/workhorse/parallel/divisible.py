"""Whether a model can be divided as a recipe asks."""

from workhorse.config import ConfigError
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.parallel.config import ParallelismConfig


def check_divisible(config: DecoderConfig, kernel: KernelName, parallel: ParallelismConfig) -> None:
    """Refuse what cannot be.

    Raises:
        ConfigError: sequences whose attention looks ahead or whose kernel is compiled for one
            length; experts that there are not, or that the processes do not divide.
    """
    blocks = config.blocks.values()
    if parallel.context > 1:
        context = f"context={parallel.context}"
        if any(not block.attention.causal for block in blocks):
            raise ConfigError(
                f"{context} divides sequences, of which causal=false sees the end; leave it out",
                "parallel",
            )
        if kernel == "flex":
            raise ConfigError(
                f"{context} does not go with train.kernel=flex, which takes as many keys as "
                "queries; leave one of the two out",
                "parallel",
            )
    if parallel.expert > 1:
        expert = f"expert={parallel.expert}"
        mixtures = [
            block.feed_forward for block in blocks if isinstance(block.feed_forward, MoEConfig)
        ]
        if not mixtures:
            raise ConfigError(
                f"{expert} divides routed experts, and this model has none; leave it out",
                "parallel",
            )
        for mixture in mixtures:
            if mixture.n_experts % parallel.expert:
                raise ConfigError(
                    f"{expert} does not divide n_experts={mixture.n_experts}; choose a divisor",
                    "parallel",
                )
