"""The collectives that one device calls to compute the gradient of a step.

Activations are counted by running micro-batches on tensors without data, with groups that note the
calls of their methods. The messages of FSDP, of divided experts and of gradient sums are computed
from the shapes of the weights.

Not counted: the update (gradient norm, loads of experts, matrices that Muon gathers), control
messages, validation, samples and checkpoints.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from workhorse.devices.tape import stand_in, without_data
from workhorse.memory.step_memory import PlannedStep, build_without_data
from workhorse.models.describe import components_of
from workhorse.parallel.config import DIVIDED, Coordinates, ParallelismConfig, share_of
from workhorse.parallel.division.parts import kinds_of
from workhorse.parallel.division.stages import one_forward_one_backward
from workhorse.parallel.division.teams import absent_teams
from workhorse.parallel.processes.exchange import buckets, nodes_of
from workhorse.parallel.processes.group import AbsentGroup
from workhorse.train.step.step import TrainingStep

FLOAT32, INT64 = torch.float32.itemsize, torch.int64.itemsize


class Collective(NamedTuple):
    """All calls of one kind of collective in one process group, by one device in one step."""

    group: str
    """The keys of `parallel` along which the ranks of the group differ, joined by `+`."""
    size: int
    """Number of ranks in the group."""
    kind: str
    """The collective; see `Call`."""
    count: int
    """Number of calls."""
    bytes: int
    """Bytes of the device's inputs; for `receive` of the received tensors."""


def collectives(step: PlannedStep, stage: int) -> list[Collective]:
    """Count the collectives with which a device computes the gradient of a batch.

    The device is the last of its groups, so it has the most rows, vocabulary ids and visible keys;
    only in its shard group it is the first, which has the largest shards. If tokens are spread
    evenly over the experts, all figures are exact.

    Args:
        step: the step; its `micro_batch_size` is a number or None.
        stage: the pipeline stage of the device.
    """
    if step.parallel.processes == 1:
        return []
    found = _Count(step, stage).found
    return [
        Collective(*group, kind, one["count"], one["bytes"])
        for (group, kind), one in sorted(found.items())
    ]


class _Ranks(NamedTuple):
    """The name and the size of a process group, as in `Collective`."""

    name: str
    size: int


class _Count:
    """Counts the calls and bytes of each kind of collective in each group; see `collectives`."""

    def __init__(self, step: PlannedStep, stage: int) -> None:
        self.step, self.stage, self.parallel = step, stage, step.parallel
        self.own = step.train.micro_batches(step.parallel)
        self.found: dict[tuple[_Ranks, str], Counter[str]] = {}
        parallel = step.parallel
        at = Coordinates(stage, parallel.data - 1, 0, parallel.context - 1, parallel.tensor - 1)
        self.rank = parallel.rank(at)
        self.world = self._ranks(range(parallel.processes))
        whole, rest = divmod(self.own.rows, self.own.size)
        traced = self._passes(self.own.size, self.own.parts * whole)
        if rest:
            self._passes(rest, self.own.parts)
        of_experts = {
            name
            for name, component in components_of(traced.objective.decoder).items()
            if component == "experts" and parallel.expert > 1
        }
        if parallel.shard > 1:
            self._shards(traced, of_experts)
        self._gradients(traced, of_experts)

    def _add(self, ranks: _Ranks, kind: str, n_bytes: int, times: int = 1) -> None:
        """Count calls of a collective, each with an input of `n_bytes`."""
        if ranks.size > 1:
            one = self.found.setdefault((ranks, kind), Counter())
            one["count"] += times
            one["bytes"] += times * n_bytes

    def _ranks(self, ranks: Sequence[int]) -> _Ranks:
        at = self.parallel.coordinates
        axes = {
            axis
            for rank in ranks
            for axis, place, first in zip(Coordinates._fields, at(rank), at(ranks[0]), strict=True)
            if place != first
        }
        return _Ranks("+".join(name for name in DIVIDED if name in axes), len(ranks))

    def _passes(self, rows: int, times: int) -> TrainingStep:
        """Count the collectives of activations in `times` micro-batches of `rows` rows.

        Returns:
            The step of one micro-batch, without data, as if `data`, `shard` and `expert` were 1.
        """
        whole = self.parallel
        alone = ParallelismConfig(
            context=whole.context, tensor=whole.tensor, pipeline=whole.pipeline
        )
        step = replace(self.step, parallel=alone).with_train(batch_size=rows, micro_batch_size=rows)
        here = stand_in(step.device)
        with without_data(here):
            teams = absent_teams(step.parallel, step.config.vocab_size, self.stage)
            traced = build_without_data(step, teams, here)
            traced.backward(step.synthetic(rows, here))
        for name, group in teams.groups.items():
            assert isinstance(group, AbsentGroup)
            for call in group.calls:
                self._add(_Ranks(name, group.size), *call, times)
        config, train, ranks = step.config, step.train, _Ranks("expert", whole.expert)
        forwards = times * (1 + train.activation_checkpointing)
        item = getattr(torch, train.dtype).itemsize
        for layer in share_of(config.n_layers, whole.pipeline, self.stage):
            if mixture := config.blocks[config.layer_names()[layer]].mixture:
                chosen = rows * train.seq_len // whole.context * mixture.top_k
                # The numbers of tokens of each expert; then the tokens, and the outputs back.
                self._add(ranks, "all_to_all", mixture.n_experts * INT64, forwards)
                # A router's weights are in float32, and so are the inputs that they multiply.
                for sent in (FLOAT32 if mixture.weigh == "input" else item, item):
                    n_bytes = chosen * config.d_model * sent
                    self._add(ranks, "all_to_all", n_bytes, forwards + times)
        return traced

    def _shards(self, traced: TrainingStep, of_experts: Collection[str]) -> None:
        """Count the weights that FSDP gathers and the gradients that it sums; see `shard`."""
        parallel, own, objective = self.parallel, self.own, traced.objective
        ways, data, decoder = parallel.weight_parts, parallel.data, objective.decoder
        ranks = _Ranks("shard+context" if parallel.context > 1 else "shard", ways)
        replicas = _Ranks("data", data)
        turns = list(one_forward_one_backward(own.passes, parallel.pipeline, self.stage))
        # Weights outside the layers stay gathered from a forward pass to the next backward pass.
        of_root = sum(n == 0 or not turns[n - 1].forward for n in range(len(turns)))
        parts = [] if self.step.config.head.tied else decoder.embedding.children()
        tables = [part for part in parts if isinstance(part, nn.Embedding)]
        layers = list(decoder.layers.children())
        gathers = {**dict.fromkeys(tables, own.count), objective: own.parts * of_root}
        seen = {weight for name, weight in decoder.named_parameters() if name in of_experts}
        units: dict[nn.Module, list[nn.Parameter]] = {}
        for unit in (*tables, *layers, objective):
            weights = [one for one in unit.parameters() if one.requires_grad or one.ndim > 1]
            units[unit] = [one for one in weights if one not in seen]
            seen.update(weights)
        if turns[1].forward and not units[objective] and next(iter(units)) is not layers[-1]:
            # Of two passes in flight, FSDP prefetches the earlier one's last layer too early.
            gathers[layers[-1]] = 2 * own.count + 1
        for unit, weights in units.items():
            if not weights:
                continue
            times = 1 if parallel.reshard == "step" else gathers.get(unit, 2 * own.count)
            item = weights[0].element_size()
            self._add(ranks, "all_gather", item * sum(_shard(one, ways) for one in weights), times)
            rows = sum(_shard(one, ways) for one in weights if one.requires_grad)
            if parallel.is_exact:
                rows = -(-rows // data)  # the `data` ranks with the same rows divide the sum
                if parallel.reshard == "step":
                    n_bytes = self._nodes * parallel.replicas * rows * FLOAT32
                    self._add(self.world, "all_to_all", n_bytes)
                else:
                    n_bytes = parallel.replicas * rows * item
                    self._add(self.world, "all_to_all", n_bytes, own.count)
                self._add(replicas, "all_gather", rows * FLOAT32)
            elif parallel.adds_by_exchange(self.step.device.type):
                self._add(ranks, "all_to_all", ways * rows * item, own.count)
            else:
                self._add(ranks, "reduce_scatter", ways * rows * FLOAT32, own.count)
                self._add(replicas, "all_reduce", rows * FLOAT32, own.count)

    def _gradients(self, traced: TrainingStep, of_experts: Collection[str]) -> None:
        """Count the sums of gradients over ranks, and of values to log; see `Reduction`."""
        parallel, masters = self.parallel, traced.optimizer.masters
        ways = {
            name: parallel.expert if name in of_experts else parallel.weight_parts
            for name in masters.parameters
            if masters.part is None or name in masters.part.cuts
        }
        tied = parallel.pipeline > 1 and self.step.config.head.tied
        summed: dict[_Ranks, list[str]] = {}
        for kind, names in kinds_of(ways, masters.part, of_experts, tied=tied).items():
            part = kind.part_of(parallel, self.rank)
            every = range(parallel.processes)
            ranks = [rank for rank in every if kind.part_of(parallel, rank) == part]
            summed.setdefault(self._ranks(ranks), []).extend(names)
        figures = FLOAT32 * (1 + len(traced.terms))
        if parallel.shard > 1:
            self._add(self.world, "all_gather", figures, self.own.parts)
        else:
            summed.setdefault(self.world, [])
        for ranks, names in summed.items():
            sizes = [_shard(masters.parameters[name], ways[name]) for name in names]
            sizes += [figures // FLOAT32] * (ranks == self.world and parallel.shard == 1)
            for bucket in buckets([torch.empty(size, device="meta") for size in sizes]):
                numbers = sum(one.numel() for one in bucket)
                if parallel.is_exact:  # each rank sums a part of the nodes of all ranks
                    part = FLOAT32 * -(-numbers // ranks.size)
                    self._add(ranks, "all_to_all", self._nodes * ranks.size * part)
                    self._add(ranks, "all_gather", part)
                else:
                    self._add(ranks, "all_reduce", FLOAT32 * numbers)

    @property
    def _nodes(self) -> int:
        """Number of nodes of the tree of an exact sum that the device sums by itself."""
        mesh = self.parallel
        own = share_of(mesh.parts, mesh.replicas, mesh.replica(self.rank))
        return len(nodes_of(own.start, own.stop))


def _shard(weight: nn.Parameter, ways: int) -> int:
    """Number of elements in the first of `ways` shards of a weight, which are divided by rows."""
    return -(-len(weight) // ways) * weight.shape[1:].numel()
