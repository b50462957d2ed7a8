"""The groups of ranks that divide a model or its sequences, and the part that each rank builds.

It is a smaller decoder, of some of each layer's heads and hidden features and of some tokens of the
vocabulary (1909.08053 §3). What is not divided, norms above all, is there whole.
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
from workhorse.parallel.division.layers import LayerTeam
from workhorse.parallel.division.sequences import SequenceTeam
from workhorse.parallel.division.stages import Pipeline, keep_stage
from workhorse.parallel.processes.group import AbsentGroup, Group
from workhorse.parallel.processes.world import World


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


class Teams(NamedTuple):
    """The teams of a process; None where nothing is divided so."""

    sequences: SequenceTeam | None = None
    layers: LayerTeam | None = None
    stages: Pipeline | None = None
    first: int = 0
    """The number of the first process of the run that has the same part of the model."""

    @property
    def tells(self) -> bool:
        """Whether this process counts what all that divide layers see."""
        return self.layers is None or self.layers.group.is_first

    @property
    def has_loss(self) -> bool:
        """Whether this process counts the loss of its rows: once for all with the same tokens."""
        return self.tells and (self.stages is None or self.stages.group.is_last)

    def build(
        self, whole: DecoderConfig, kernel: KernelName, device: torch.device | str
    ) -> Decoder:
        """The part of a model that this process has, as `DecoderConfig.build` would make it."""
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
        decoder.tie_weights()  # a parameter that was replaced is no longer tied
        return decoder.initialize()

    @contextmanager
    def of_texts(self) -> Generator[None]:
        """Let passes be of texts that grow: of all their tokens, with logits for all processes."""
        teams = [team for team in (self.layers, self.stages) if team is not None]
        for team in teams:
            team.grows = True
        try:
            yield
        finally:
            for team in teams:
                team.grows = False


NO_TEAMS = Teams()


def make_teams(world: World, parallel: ParallelismConfig, vocabulary: int) -> Teams:
    """The teams of this process; all of the run must call it.

    Args:
        world: of the run.
        parallel: how many there are in each.
        vocabulary: tokens of the model.
    """

    def alike_but_for(axis: str) -> Group:
        return world.alike(lambda rank: parallel.coordinates(rank)._replace(**{axis: 0}))

    at = parallel.coordinates(world.rank)
    first = parallel.rank(at._replace(data=0, shard=0, context=0))
    return _teams(parallel, vocabulary, alike_but_for)._replace(first=first)


def absent_teams(parallel: ParallelismConfig, vocabulary: int, stage: int | None = None) -> Teams:
    """The same for passes on tensors without data, where there are no other processes.

    Args:
        parallel: how many there are in each.
        vocabulary: tokens of the model.
        stage: of the process; None for the last.
    """

    def last_of(axis: str) -> Group:
        size = parallel.ways[axis]
        return AbsentGroup(stage if axis == "pipeline" and stage is not None else size - 1, size)

    return _teams(parallel, vocabulary, last_of)


def _teams(
    parallel: ParallelismConfig, vocabulary: int, group_along: Callable[[str], Group]
) -> Teams:
    """The teams along the axes of the mesh that have more than one process."""
    sequences = layers = stages = None
    if parallel.context > 1:
        sequences = SequenceTeam(group_along("context"))
    if parallel.tensor > 1:
        layers = LayerTeam(group_along("tensor"), vocabulary)
    if parallel.pipeline > 1:
        stages = Pipeline(group_along("pipeline"))
    return Teams(sequences, layers, stages)
