"""How a model is divided among devices, and the part that one of them has."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from workhorse.config import Config, ConfigError
from workhorse.nn import DecoderConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.parallel.division.divisible import check_layers
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
    """Parts of every layer's heads and hidden features, and of the vocabulary (1909.08053); and,
    between layers, of each sequence (2205.05198 §4.2.2)."""
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
    check_layers(config, mesh.tensor, mesh.expert)
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
    of_rows = {"context": mesh.context, "tensor": mesh.tensor}
    name = " · ".join(name for name, ways in of_rows.items() if ways > 1)
    yield name, mesh.context * mesh.tensor, "train.seq_len", train.seq_len
    yield "pipeline", mesh.pipeline, "n_layers", config.n_layers
    if mesh.expert > 1:
        yield "expert", mesh.expert, "data · shard", mesh.replicas


def stage_of_model(config: DecoderConfig, mesh: MeshConfig, stage: int) -> DecoderConfig:
    """The decoder of one stage of a pipeline, embedding and head included."""
    names = config.layer_names()
    length = len(names) // mesh.pipeline
    own = names[stage * length : (stage + 1) * length]
    return config.replace(
        n_layers=length,
        pattern=tuple(own),
        blocks={name: block.to_dict() for name, block in config.blocks.items() if name in own},
    )
