"""The memory of one device of a mesh: a recorded step, divided among the devices."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workhorse.nn import DecoderConfig
from workhorse.parallel.config import ParallelismConfig
from workhorse.plan.mesh import MeshConfig, check_mesh, stage_of_model
from workhorse.train.recipe.recipe import TrainConfig
from workhorse.train.step.account import Moment, moments_of_part, ways_of, whole_at_once
from workhorse.train.step.step_memory import (
    Kind,
    Place,
    StepMemory,
    step_memory,
)

HELD: tuple[Kind, ...] = ("weights", "low_bits", "optimizer")
_RECORDS: dict[str, StepMemory] = {}
MOST_RECORDS = 16
"""More are not remembered: one of a large model takes megabytes."""


@dataclass(frozen=True)
class DeviceMemory:
    """What the fullest device of a mesh needs for a training step, in bytes.

    Attributes:
        stage: of the pipeline, from 0, that the device belongs to.
        held: between steps, by kind and place in the model.
        activations: of one micro-batch, by part of the model that this device has.
        in_flight: micro-batches whose activations are kept at once.
        gathered: weights and gradients of other devices that a layer needs for a moment.
        moments: while each operator of the step runs.
    """

    stage: int
    held: dict[Kind, dict[Place, int]]
    activations: dict[str, int]
    in_flight: int
    gathered: int
    moments: list[Moment]

    @property
    def peak(self) -> Moment:
        """The moment at which it holds most."""
        return max(self.moments, key=lambda moment: sum(moment.kinds.values()))

    @property
    def total(self) -> int:
        """Bytes at that moment."""
        return sum(self.peak.kinds.values())

    @property
    def update(self) -> int:
        """The most bytes during the update, which no batch changes; 0 if it was not recorded."""
        return max(
            (sum(one.kinds.values()) for one in self.moments if one.phase == "update"), default=0
        )


def device_memory(
    config: DecoderConfig,
    train: TrainConfig,
    device: torch.device,
    mesh: MeshConfig | None = None,
    *,
    packed: bool = False,
    updates: bool = True,
) -> DeviceMemory:
    """The account of the fullest device, from a step recorded on the part of the model it has.

    - `data`, `shard`: the rows of the batch are divided. `shard` divides what is held too, and two
      layers' weights and one's gradient are whole for a moment (prefetching, 2304.11277 §3).
    - `tensor`: a device has `1 / tensor` of heads, hidden features and vocabulary, and between
      layers of each sequence (2205.05198 §4.2.2).
    - `pipeline`: stage s of p keeps p - s micro-batches (2205.05198 §4.2.3); the first has the
      embedding, the last the head and the loss.
    - `expert`: routed experts are divided, by no more with `shard`; tokens are assumed to spread
      evenly among them.
    - `context`: sequences are divided; the last part needs the keys and values of all, which each
      layer keeps for its backward pass.

    Args:
        config: of the whole decoder.
        train: how it is trained, all devices together.
        device: the kind.
        mesh: None for one device.
        packed: whether rows hold several documents.
        updates: whether the update is recorded too.

    Raises:
        ConfigError: the mesh does not divide the model or its batches evenly.
    """
    mesh = mesh or MeshConfig()
    check_mesh(mesh, config, train)
    local = _of_one_device(train, mesh)
    stages = _distinct_stages(config, mesh)
    found = [
        _of_stage(config, local, device, mesh, stage, packed=packed, updates=updates)
        for stage in stages
    ]
    return max(found, key=lambda memory: memory.total)


def _of_one_device(train: TrainConfig, mesh: MeshConfig) -> TrainConfig:
    rows = train.batch_size // mesh.replicas
    size = train.micro_batch_size
    return train.replace(
        batch_size=rows,
        micro_batch_size=min(size, rows) if isinstance(size, int) else size,
    )


def _distinct_stages(config: DecoderConfig, mesh: MeshConfig) -> list[int]:
    """The first and the last, and of the others the first of each sequence of layers."""
    names, length = config.layer_names(), config.n_layers // mesh.pipeline
    first_of: dict[Any, int] = {}
    for stage in range(mesh.pipeline):
        own = tuple(names[stage * length : (stage + 1) * length])
        first_of.setdefault((own, stage == mesh.pipeline - 1), stage)
    return sorted(first_of.values())


def _of_stage(
    config: DecoderConfig,
    train: TrainConfig,
    device: torch.device,
    mesh: MeshConfig,
    stage: int,
    *,
    packed: bool,
    updates: bool,
) -> DeviceMemory:
    part = stage_of_model(config, mesh, stage)
    step = _recorded(part, train, device, mesh, packed=packed, updates=updates)
    shards = mesh.shard * mesh.context if mesh.shard > 1 else 1
    missing = set(_missing(config, mesh, stage))
    held: dict[Kind, dict[Place, int]] = {
        kind: {
            place: -(-size // ways_of(place, shards, mesh.expert))
            for place, size in sizes.items()
            if place.part not in missing
        }
        for kind, sizes in step.held.items()
    }
    shares: dict[Kind, float] = {kind: _share(held[kind], step.held[kind]) for kind in HELD}
    shares["gradients"] = shares["sums"] = shares["weights"]
    shares["loss"] = float("head" not in missing)
    activations = {part: size for part, size in step.activations.items() if part not in missing}
    shares["activations"] = _share(activations, step.activations)
    in_flight = min(mesh.pipeline - stage, _micro_batches(train))
    gathered = whole_at_once(step, mesh.expert) if shards > 1 else 0
    earlier = (in_flight - 1) * sum(activations.values())
    return DeviceMemory(
        stage,
        held,
        activations,
        in_flight,
        gathered,
        list(moments_of_part(step, shares, earlier, gathered)),
    )


def _recorded(
    config: DecoderConfig,
    train: TrainConfig,
    device: torch.device,
    mesh: MeshConfig,
    *,
    packed: bool,
    updates: bool,
) -> StepMemory:
    """The record of a step, made once: meshes with the same part of the model share it."""
    train = _as_recorded(train)
    parallel = ParallelismConfig(context=mesh.context, tensor=mesh.tensor)
    key = json.dumps([config.to_dict(), train.to_dict(), str(device), parallel.to_dict(), packed])
    found = _RECORDS.get(key)
    if found is None or (updates and found.spans[-1].phase != "update"):
        found = _RECORDS[key] = step_memory(
            config, train, device, packed=packed, updates=updates, parallel=parallel
        )
        if len(_RECORDS) > MOST_RECORDS:
            del _RECORDS[next(iter(_RECORDS))]  # the oldest
    return found if updates else found.passes


def _as_recorded(train: TrainConfig) -> TrainConfig:
    """Settings with the same record are made equal: more than two micro-batches are like two."""
    size = train.micro_batch_size
    if not isinstance(size, int) or size >= train.batch_size:
        return train.replace(micro_batch_size=None)
    return train.replace(batch_size=min(train.batch_size, 2 * size))


def _missing(config: DecoderConfig, mesh: MeshConfig, stage: int) -> Iterator[str]:
    """The parts that a stage of the pipeline is recorded with and does not have."""
    if stage > 0 and not (config.head.tied and stage == mesh.pipeline - 1):
        yield "embedding"
    if stage < mesh.pipeline - 1:
        yield from ("head", "final_norm")


def _share(part: Mapping[Any, int], whole: Mapping[Any, int]) -> float:
    return sum(part.values()) / (sum(whole.values()) or 1)


def _micro_batches(train: TrainConfig) -> int:
    size = train.micro_batch_size
    return -(-train.batch_size // size) if isinstance(size, int) else 1
