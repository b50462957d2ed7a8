"""How a model is divided among devices, and the part that one of them has."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from workhorse.config import Config, ConfigError
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.grouped import AttentionConfig
from workhorse.nn.attention.latent import LatentAttentionConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.train.recipe.recipe import TrainConfig

Ways = Annotated[int, Field(ge=1)]


class MeshConfig(Config):
    """Into how many parts each thing is divided; devices are the product of all but `expert`."""

    data: Ways = 1
    """Copies of the model, which share each batch."""
    shard: Ways = 1
    """Parts of weights, gradients and optimizer (FSDP; ZeRO stage 3, 1910.02054); its devices share
    each batch too."""
    tensor: Ways = 1
    """Parts of every layer's heads and hidden features, and of the vocabulary (1909.08053)."""
    sequence: bool = True
    """Divide what `tensor` leaves whole, norms and the residual stream, along the sequence
    (2205.05198 §4.2.2)."""
    pipeline: Ways = 1
    """Stages of consecutive layers, one forward and one backward pass in turn (2104.04473 §2.2)."""
    expert: Ways = 1
    """Parts of each mixture's routed experts, among the devices of `data` and `shard`."""
    context: Ways = 1
    """Parts of each sequence; its devices also divide weights, gradients and optimizer, as those of
    `shard` do, once `shard` is more than one."""

    @property
    def devices(self) -> int:
        return self.replicas * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        """Devices among which the rows of a batch are divided."""
        return self.data * self.shard


def check_mesh(mesh: MeshConfig, config: DecoderConfig, train: TrainConfig) -> None:
    """Refuse a mesh that a model or its batches cannot be divided by.

    Raises:
        ConfigError: with the number that is not divisible, or there are no experts to divide.
    """
    mixtures = [isinstance(block.feed_forward, MoEConfig) for block in config.blocks.values()]
    if mesh.expert > 1 and not any(mixtures):
        raise ConfigError(
            f"expert={mesh.expert} divides routed experts, and this model has none; leave it out",
            "parallel",
        )
    for name, ways, what, whole in _divided(mesh, config, train):
        if whole % ways:
            raise ConfigError(
                f"{name}={ways} does not divide {what}={whole}; choose a divisor", "parallel"
            )


def _divided(
    mesh: MeshConfig, config: DecoderConfig, train: TrainConfig
) -> Iterator[tuple[str, int, str, int]]:
    """Into how many parts what is divided, each with its name."""
    yield "data · shard", mesh.replicas, "train.batch_size", train.batch_size
    yield "context", mesh.context, "train.seq_len", train.seq_len
    yield "pipeline", mesh.pipeline, "n_layers", config.n_layers
    for block in config.blocks.values():
        attention, feed_forward = block.attention, block.feed_forward
        yield "tensor", mesh.tensor, "n_heads", attention.n_heads
        if isinstance(attention, AttentionConfig):
            kv_heads = attention.n_kv_heads or attention.n_heads
            if mesh.tensor % kv_heads:  # else each head is copied to as many devices
                yield "tensor", mesh.tensor, "n_kv_heads", kv_heads
        yield "tensor", mesh.tensor, "d_ff", feed_forward.d_ff
        if isinstance(feed_forward, MoEConfig):
            yield "expert", mesh.expert, "n_experts", feed_forward.n_experts
            if feed_forward.shared is not None:
                yield "tensor", mesh.tensor, "shared.d_ff", feed_forward.shared.d_ff
    if mesh.expert > 1:
        yield "expert", mesh.expert, "data · shard", mesh.replicas


def part_of_model(config: DecoderConfig, mesh: MeshConfig, stage: int) -> DecoderConfig:
    """The decoder that one device of a tensor-parallel pipeline has, embedding and head included.

    Its heads, hidden features and vocabulary are 1 / `tensor` of the whole's, its layers those of
    the stage. Heads of keys and values that are fewer than `tensor` are copied.
    """
    names = config.layer_names()
    length = len(names) // mesh.pipeline
    own = names[stage * length : (stage + 1) * length]
    blocks = {name: _part_of_block(config.blocks[name], config.d_model, mesh) for name in set(own)}
    return config.replace(
        vocab_size=-(-config.vocab_size // mesh.tensor),
        n_layers=length,
        pattern=tuple(own),
        blocks={name: blocks[name].to_dict() for name in config.blocks if name in blocks},
    )


def _part_of_block(block: BlockConfig, d_model: int, mesh: MeshConfig) -> BlockConfig:
    ways = mesh.tensor
    attention, feed_forward = block.attention, block.feed_forward
    heads = {"n_heads": attention.n_heads // ways}
    if isinstance(attention, AttentionConfig):
        heads["n_kv_heads"] = max(1, (attention.n_kv_heads or attention.n_heads) // ways)
        heads["head_dim"] = attention.key_dim(d_model)
    assert isinstance(attention, AttentionConfig | LatentAttentionConfig)
    part = feed_forward.replace(d_ff=feed_forward.d_ff // ways)
    if isinstance(feed_forward, MoEConfig) and feed_forward.shared is not None:
        shared = feed_forward.shared
        part = part.replace(shared=shared.replace(d_ff=shared.d_ff // ways).to_dict())
    return block.replace(attention=attention.replace(**heads), feed_forward=part)
