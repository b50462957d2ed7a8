"""The memory of one of several processes: a step recorded on what it has of model and batch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from workhorse.config.base import ConfigError
from workhorse.memory.account import Moment, moments_of_part, ways_of, whole_at_once
from workhorse.memory.step_memory import Kind, Place, StepMemory, step_memory
from workhorse.nn import DecoderConfig
from workhorse.parallel.config import UNDIVIDED, ExactConfig, ParallelismConfig, share_of
from workhorse.parallel.division.parts import check_divisible

if TYPE_CHECKING:  # which imports this package
    from workhorse.train.recipe.recipe import TrainConfig

HELD: tuple[Kind, ...] = ("weights", "low_bits", "optimizer")
_RECORDS: dict[str, StepMemory] = {}
MOST_RECORDS = 64
"""More are not remembered: one of a large model takes megabytes."""


@dataclass(frozen=True)
class DeviceMemory:
    """What the fullest of several devices needs for a training step, in bytes.

    Attributes:
        stage: of the pipeline, from 0, that the device belongs to.
        held: between steps, by kind and place in the model.
        activations: of one micro-batch, by part of the model that this device has.
        in_flight: micro-batches whose activations are kept at once.
        gathered: weights and gradients of other devices that are here at once, at most.
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
    train: "TrainConfig",
    device: torch.device,
    parallel: ParallelismConfig = UNDIVIDED,
    *,
    packed: bool = False,
    updates: bool = True,
) -> DeviceMemory:
    """The account of the fullest device, from a step recorded on the part of the model it has.

    - `data`, `shard`: the rows of the batch are divided. `shard` divides what is held too; a few
      layers, and what is in none, are whole for a while (`whole_at_once`).
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
        train: how it is trained, all devices together; `micro_batch_size` is a number or None.
        device: the kind.
        parallel: how the work is divided among them.
        packed: whether rows hold several documents.
        updates: whether the update is recorded too.

    Raises:
        ConfigError: the model or its batches cannot be divided like this.
    """
    check_divisible(config, train.kernel, parallel)
    try:
        parallel.check_batch(train.batch_size, train.seq_len)
    except ConfigError as error:
        raise error.below("parallel") from None
    own = train.micro_batches(parallel)
    if parallel.is_exact:
        recorded = train.replace(batch_size=own.rows * own.parts)
        divided = ParallelismConfig(reduction=ExactConfig(logical_shards=own.parts))
    else:
        recorded = _as_recorded(train.replace(batch_size=own.rows, micro_batch_size=own.size))
        divided = parallel
    record = partial(_recorded, config, recorded, device, packed=packed, updates=updates)
    found = [
        _of_stage(
            record(divided, stage), parallel, stage, own.count, device.type, tied=config.head.tied
        )
        for stage in _distinct_stages(config, parallel.pipeline)
    ]
    return max(found, key=lambda memory: memory.total)


def _distinct_stages(config: DecoderConfig, stages: int) -> list[int]:
    """The last, and of the others the first with the same layers: it waits longest."""
    names = config.layer_names()
    first_of: dict[Any, int] = {}
    for stage in range(stages):
        own = tuple(names[layer] for layer in share_of(len(names), stages, stage))
        first_of.setdefault((own, stage == stages - 1), stage)
    return list(first_of.values())


def _of_stage(
    step: StepMemory,
    parallel: ParallelismConfig,
    stage: int,
    micro_batches: int,
    device_type: str,
    *,
    tied: bool,
) -> DeviceMemory:
    """What a device of a stage holds of a step that was recorded there."""
    shards, expert = parallel.weight_parts, parallel.expert
    held: dict[Kind, dict[Place, int]] = {
        kind: {place: -(-size // ways_of(place, shards, expert)) for place, size in sizes.items()}
        for kind, sizes in step.held.items()
    }
    shares: dict[Kind, float] = {kind: _share(held[kind], step.held[kind]) for kind in HELD}
    shares["gradients"] = shares["sums"] = shares["weights"]
    if parallel.is_exact and parallel.reshard == "step":  # each adds up whole gradients by itself
        shares["sums"] = 1.0
    ahead = parallel.pipeline - stage - 1
    others = [min(ahead, max(0, micro_batches - passed)) for passed in (1, 2)]
    each = sum(step.activations.values())
    waiting = others[0] * each, others[1] * each
    gathered = None
    if shards > 1:
        has_head = stage == parallel.pipeline - 1
        gathered = whole_at_once(step, parallel, device_type, tied=tied, has_head=has_head)
    return DeviceMemory(
        stage,
        held,
        step.activations,
        1 + others[0],
        max(map(gathered, step.spans)) if gathered else 0,
        list(moments_of_part(step, shares, waiting, gathered, parallel)),
    )


def _recorded(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    parallel: ParallelismConfig,
    stage: int,
    *,
    packed: bool,
    updates: bool,
) -> StepMemory:
    """The record of a step, made once: all with the same part of the model share it."""
    parallel = parallel.replace(data=1, shard=1, expert=1)
    parts = [config.to_dict(), train.to_dict(), str(device), parallel.to_dict(), stage, packed]
    key = json.dumps(parts)
    found = _RECORDS.get(key)
    if found is None or (updates and found.spans[-1].phase != "update"):
        found = _RECORDS[key] = step_memory(
            config, train, device, packed=packed, updates=updates, parallel=parallel, stage=stage
        )
        if len(_RECORDS) > MOST_RECORDS:
            del _RECORDS[next(iter(_RECORDS))]  # the oldest
    return found if updates else found.without_update


def _as_recorded(train: "TrainConfig") -> "TrainConfig":
    """Settings with the same record are made equal: more than two micro-batches are like two."""
    size = train.micro_batch_size
    if not isinstance(size, int) or size >= train.batch_size:
        return train.replace(micro_batch_size=None)
    return train.replace(batch_size=min(train.batch_size, 2 * size))


def _share(part: Mapping[Any, int], whole: Mapping[Any, int]) -> float:
    return sum(part.values()) / (sum(whole.values()) or 1)
