"""The groups of ranks ("teams") that divide a model or its sequences, and the part of each rank.

The part is a smaller decoder, with some heads and hidden features of each layer and some tokens of
the vocabulary (1909.08053 §3). Undivided modules, such as norms, are replicated on every rank.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from workhorse.config.base import ConfigError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.nn.blocks import BlockConfig
from workhorse.parallel.config import ParallelismConfig, share_of
from workhorse.parallel.division.layers import TensorParallelGroup
from workhorse.parallel.division.sequences import ContextParallelGroup
from workhorse.parallel.division.stages import Pipeline, keep_stage
from workhorse.parallel.processes.group import AbsentGroup, Group
from workhorse.parallel.processes.world import World


def part_of_model(config: DecoderConfig, ways: int, member: int = 0) -> DecoderConfig:
    """Return the decoder config of rank `member` of `ways` tensor-parallel ranks.

    If there are fewer key and value heads than ranks, several ranks have copies of the same head.

    Raises:
        ConfigError: the vocabulary has fewer tokens than there are ranks.
    """
    if ways == 1:
        return config
    if ways > config.vocab_size:
        raise ConfigError(
            f"tensor={ways} is more than vocab_size={config.vocab_size}; "
            f"choose at most {config.vocab_size}",
            "parallel",
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


class Teams(NamedTuple):
    """The groups of a rank, one for each kind of parallelism; None for a kind that is not used."""

    sequences: ContextParallelGroup | None = None
    layers: TensorParallelGroup | None = None
    stages: Pipeline | None = None
    first: int = 0
    """The first rank of the run with the same part of the model."""

    @property
    def groups(self) -> dict[str, Group]:
        """The groups, by the recipe key that divides among them."""
        teams = {"context": self.sequences, "tensor": self.layers, "pipeline": self.stages}
        return {name: team.group for name, team in teams.items() if team is not None}

    @property
    def reports(self) -> bool:
        """True if this rank reports values that are equal on all its tensor-parallel ranks."""
        return self.layers is None or self.layers.group.is_first

    @property
    def has_loss(self) -> bool:
        """True if this rank reports the loss of its rows, so that each token is counted once."""
        return self.reports and (self.stages is None or self.stages.group.is_last)

    def build(
        self, whole: DecoderConfig, kernel: KernelName, device: torch.device | str
    ) -> Decoder:
        """Build this rank's part of a model; `whole` is the config of the whole model."""
        config = whole
        if self.layers is not None:
            group = self.layers.group
            config = part_of_model(whole, group.size, group.rank)
        if self.stages is None:
            return config.build(kernel, device=device)
        decoder = config.build(kernel, device="meta")
        keep_stage(decoder, self.stages)
        if torch.device(device).type == "meta":
            return decoder
        for module in decoder.modules():
            for name, weight in module.named_parameters(recurse=False):
                room = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                setattr(module, name, nn.Parameter(room, requires_grad=weight.requires_grad))
        decoder.tie_weights()  # replacing a parameter breaks the tie
        return decoder.initialize()

    @contextmanager
    def for_generation(self) -> Generator[None]:
        """Context manager for generation: each rank gets whole sequences and all logits."""
        teams = [team for team in (self.layers, self.stages) if team is not None]
        for team in teams:
            team.generating = True
        try:
            yield
        finally:
            for team in teams:
                team.generating = False


NO_TEAMS = Teams()


def make_teams(world: World, parallel: ParallelismConfig, vocabulary: int) -> Teams:
    """Create the groups of this rank; all ranks of the run must call it.

    `vocabulary` is the vocabulary size of the whole model.
    """

    def alike_but_for(axis: str) -> Group:
        return world.alike(lambda rank: parallel.coordinates(rank)._replace(**{axis: 0}))

    at = parallel.coordinates(world.rank)
    first = parallel.rank(at._replace(data=0, shard=0, context=0))
    return _teams(parallel, vocabulary, alike_but_for)._replace(first=first)


def absent_teams(parallel: ParallelismConfig, vocabulary: int, stage: int | None = None) -> Teams:
    """Create groups that do not communicate, to trace the passes of one rank without data.

    Args:
        parallel: the parallelism settings.
        vocabulary: vocabulary size of the whole model.
        stage: the pipeline stage; None for the last.
    """

    def last_of(axis: str) -> Group:
        size = parallel.ways[axis]
        return AbsentGroup(stage if axis == "pipeline" and stage is not None else size - 1, size)

    return _teams(parallel, vocabulary, last_of)


def _teams(
    parallel: ParallelismConfig, vocabulary: int, group_along: Callable[[str], Group]
) -> Teams:
    """Create a group for each kind of parallelism that is used."""
    sequences = layers = stages = None
    if parallel.context > 1:
        sequences = ContextParallelGroup(group_along("context"))
    if parallel.tensor > 1:
        layers = TensorParallelGroup(group_along("tensor"), vocabulary)
    if parallel.pipeline > 1:
        stages = Pipeline(group_along("pipeline"))
    return Teams(sequences, layers, stages)
