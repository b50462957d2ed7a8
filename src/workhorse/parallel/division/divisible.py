"""Whether a model can be divided as a recipe asks."""

from collections.abc import Iterator

from workhorse.config.base import ConfigError
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.parallel.config import ParallelismConfig


def check_divisible(config: DecoderConfig, kernel: KernelName, parallel: ParallelismConfig) -> None:
    """Refuse a mesh that this model cannot be divided by.

    Raises:
        ConfigError: sequences whose attention looks ahead or whose kernel is compiled for one
            length; experts that there are not; more stages than layers; or a number that is not
            divisible. Whether there are tokens enough is seen when they are known: `part_of_model`.
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
                f"{context} does not go with train.kernel=flex, which is compiled for as many "
                "keys as queries; leave one of the two out",
                "parallel",
            )
    mixes = any(block.mixture for block in blocks)
    if parallel.expert > 1 and not mixes:
        raise ConfigError(
            f"expert={parallel.expert} divides routed experts, and this model has none; leave it "
            "out",
            "parallel",
        )
    if parallel.pipeline > config.n_layers:
        raise ConfigError(
            f"pipeline={parallel.pipeline} is more than n_layers={config.n_layers}; choose at most "
            "that",
            "parallel",
        )
    check_layers(config, parallel.tensor, parallel.expert)


def check_layers(config: DecoderConfig, tensor: int, expert: int = 1) -> None:
    """Refuse to divide layers of which some part cannot be.

    Raises:
        ConfigError: a number is not divisible.
    """
    for name, ways, what, whole in _divided(config, tensor, expert):
        if whole % ways:
            raise ConfigError(
                f"{name}={ways} does not divide {what}={whole}; choose a divisor", "parallel"
            )


def _divided(
    config: DecoderConfig, tensor: int, expert: int
) -> Iterator[tuple[str, int, str, int]]:
    """Into how many parts what is divided, each with its name."""
    for block in config.blocks.values():
        mixture = block.mixture
        yield "tensor", tensor, "n_heads", block.attention.n_heads
        if block.grouped is not None:
            kv_heads = block.grouped.n_kv_heads or block.grouped.n_heads
            if tensor % kv_heads:  # else each head is copied to as many processes
                yield "tensor", tensor, "n_kv_heads", kv_heads
        yield "tensor", tensor, "d_ff", block.feed_forward.d_ff
        if mixture is not None:
            yield "expert", expert, "n_experts", mixture.n_experts
            if mixture.shared is not None:
                yield "tensor", tensor, "shared.d_ff", mixture.shared.d_ff
