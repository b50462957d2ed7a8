"""The part of a model that a process builds, where layers are divided.

It is a smaller decoder, of some of each layer's heads and hidden features and of some tokens of the
vocabulary (1909.08053 §3). What is not divided, norms above all, is there whole.
"""

from workhorse.config.base import ConfigError
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.parallel.config import share_of


def part_of_model(config: DecoderConfig, ways: int, member: int = 0) -> DecoderConfig:
    """The decoder of one of so many processes that divide a model evenly.

    Heads of keys and values that are fewer than processes are copied.

    Raises:
        ConfigError: there are fewer tokens than processes.
    """
    if ways == 1:
        return config
    if ways > config.vocab_size:
        raise ConfigError(
            f"tensor={ways} is more than vocab_size={config.vocab_size}; choose less", "parallel"
        )
    tokens = share_of(config.vocab_size, ways, member)
    blocks = {name: _part_of(block, config.d_model, ways) for name, block in config.blocks.items()}
    return config.replace(
        vocab_size=len(tokens), blocks={name: block.to_dict() for name, block in blocks.items()}
    )


def _part_of(block: BlockConfig, d_model: int, ways: int) -> BlockConfig:
    attention, feed_forward = block.attention, block.feed_forward
    heads = {"n_heads": attention.n_heads // ways}
    if grouped := block.grouped:
        heads["n_kv_heads"] = max(1, (grouped.n_kv_heads or grouped.n_heads) // ways)
        heads["head_dim"] = grouped.key_dim(d_model)
    part = feed_forward.replace(d_ff=feed_forward.d_ff // ways)
    if block.mixture and (shared := block.mixture.shared):
        part = part.replace(shared=shared.replace(d_ff=shared.d_ff // ways).to_dict())
    return block.replace(attention=attention.replace(**heads), feed_forward=part)
