"""The memory of one rank in parallel training, estimated from a recorded step."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch

from workhorse.config.base import ConfigError
from workhorse.memory.account import Moment, is_of_layer, moments_of_part, ways_of, whole_at_once
from workhorse.memory.step_memory import Kind, Place, StepMemory, StepOptions, step_memory
from workhorse.nn import DecoderConfig
from workhorse.parallel.config import UNDIVIDED, ExactConfig, ParallelismConfig, share_of
from workhorse.parallel.division.parts import check_divisible

if TYPE_CHECKING:  # avoids a circular import
    from workhorse.train.recipe.training import TrainConfig

HELD: tuple[Kind, ...] = ("weights", "low_bits", "optimizer")
_RECORDS: dict[str, StepMemory] = {}
MOST_RECORDS = 64
"""Maximum number of step records in the cache `_RECORDS`. The record of a large model takes
megabytes."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a training step on the device that needs the most, in bytes.

    Attributes:
        stage: the device's pipeline stage, from 0.
        held: bytes held between steps, by kind and place in the model.
        activations: bytes of one micro-batch's activations, by part of the model on this device.
        in_flight: number of micro-batches that keep their activations at once.
        gathered: maximum bytes of weights and gradients gathered from other devices at once.
        moments: the memory during each operator of the step.
    """

    stage: int
    held: dict[Kind, dict[Place, int]]
    activations: dict[str, int]
    in_flight: int
    gathered: int
    moments: list[Moment]

    @property
    def peak(self) -> Moment:
        """The moment with the most memory."""
        return max(self.moments, key=lambda moment: sum(moment.kinds.values()))

    @property
    def total(self) -> int:
        """Peak bytes of the step."""
        return sum(self.peak.kinds.values())

    @property
    def update(self) -> int:
        """Peak bytes of the weight update, independent of the batch; 0 if it was not recorded."""
        return max(
            (sum(one.kinds.values()) for one in self.moments if one.phase == "update"), default=0
        )


def device_memory(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    parallel: ParallelismConfig = UNDIVIDED,
    *,
    updates: bool = True,
    **options: Unpack[StepOptions],
) -> DeviceMemory:
    """The memory of a training step on the device that needs the most.

    A step is recorded with the device's part of the model, which depends on `parallel`:

    - `data`, `shard`: the rows of the batch are divided. `shard` also divides weights and optimizer
      state; some of them are gathered temporarily (`whole_at_once`).
    - `tensor`: a device has `1 / tensor` of heads, hidden features and vocabulary. Between layers
      it has that fraction of each sequence (2205.05198 §4.2.2).
    - `pipeline`: stage s of p keeps the activations of p - s micro-batches (2205.05198 §4.2.3). The
      first stage has the embedding, the last the head and the loss.
    - `expert`: routed experts are divided; `shard` does not divide them further. Tokens are assumed
      to be spread evenly.
    - `context`: sequences are divided. The last chunk needs the keys and values of all chunks, and
      each layer keeps them for its backward pass.

    Args:
        config: the config of the whole decoder.
        train: the training settings of all devices; `micro_batch_size` is a number or None.
        device: the type of device.
        parallel: the parallelism settings.
        updates: True to also record the weight update.
        options: see `StepOptions`.

    Raises:
        ConfigError: the model or its batches cannot be divided by these settings.
    """
    check_divisible(config, train.kernel, parallel)
    if adapter := options.get("adapter"):
        adapter.check_parallel(parallel)
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
    record = partial(_recorded, config, recorded, device, updates=updates, **options)
    found = [
        _of_stage(
            record(divided, stage), parallel, stage, own.count, device.type, tied=config.head.tied
        )
        for stage in _distinct_stages(config, parallel.pipeline)
    ]
    return max(found, key=lambda memory: memory.total)


def peak_of_passes(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    parallel: ParallelismConfig,
    **options: Unpack[StepOptions],
) -> int:
    """Peak bytes of the forward and backward passes, without the weight update.

    For a deep model it is extrapolated from two models with few layers, which takes less time. Both
    have the first and the last layers of the model. The bytes at each point of a step, such as the
    backward pass of the last layer but one, grow by the same amount with each further layer. Points
    in the layers between are never the peak, since their bytes rise or fall from layer to layer.

    The arguments are the same as in `device_memory`.
    """
    record = partial(device_memory, updates=False, **options)
    adapter = options.get("adapter")
    period = len(config.pattern or config.blocks)
    ends = 2 * period
    few = 2 * ends + config.n_layers % period
    alike = parallel.pipeline == 1 and (adapter is None or not adapter.names_a_layer)
    if 2 * few + period >= config.n_layers or not alike:
        return record(config, train, device, parallel).total
    fewer, larger = (
        _peaks(record(config.replace(n_layers=n), train, device, parallel), n, ends)
        for n in (few, few + period)
    )
    more = (config.n_layers - few) // period
    return max(peak + more * (larger[point] - peak) for point, peak in fewer.items())


def _peaks(memory: DeviceMemory, n_layers: int, ends: int) -> dict[tuple[int, str, str], int]:
    """The peak bytes at each point of a step: pass, phase, and part of the model.

    All layers except the first `ends` are counted from the end.
    """
    found: Counter[tuple[int, str, str]] = Counter()
    number, before = 0, ""
    for phase, part, kinds in memory.moments:
        number += part == "embedding" != before and phase == "forward"
        before, name = part, part
        if is_of_layer(part):
            layer = int(part.rpartition(".")[2])
            name = f"{layer - n_layers if layer >= ends else layer}"
        point = number, phase, name
        found[point] = max(found[point], sum(kinds.values()))
    return found


def _distinct_stages(config: DecoderConfig, stages: int) -> list[int]:
    """The pipeline stages to record: the last, and the first of all stages with equal layers.

    The first needs the most memory, because it keeps the activations of the most micro-batches.
    """
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
    """The memory of a device in a pipeline stage, from a step recorded for that stage."""
    shards, expert = parallel.weight_parts, parallel.expert
    held: dict[Kind, dict[Place, int]] = {
        kind: {place: -(-size // ways_of(place, shards, expert)) for place, size in sizes.items()}
        for kind, sizes in step.held.items()
    }
    shares: dict[Kind, float] = {kind: _share(held[kind], step.held[kind]) for kind in HELD}
    shares["gradients"] = shares["sums"] = shares["weights"]
    if parallel.is_exact and parallel.reshard == "step":  # each rank sums unsharded gradients
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
    updates: bool,
    **options: Unpack[StepOptions],
) -> StepMemory:
    """The cached record of a step, shared by all ranks with the same part of the model."""
    parallel = parallel.replace(data=1, shard=1, expert=1)
    packed, adapter = options.get("packed", False), options.get("adapter")
    parts = [config.to_dict(), train.to_dict(), str(device), parallel.to_dict(), stage, packed]
    key = json.dumps([*parts, adapter and adapter.to_dict()])
    found = _RECORDS.get(key)
    if found is None or (updates and found.spans[-1].phase != "update"):
        found = _RECORDS[key] = step_memory(
            config, train, device, updates=updates, parallel=parallel, stage=stage, **options
        )
        if len(_RECORDS) > MOST_RECORDS:
            del _RECORDS[next(iter(_RECORDS))]  # the oldest
    return found if updates else found.without_update


def _as_recorded(train: "TrainConfig") -> "TrainConfig":
    """Reduce the batch to at most two micro-batches; further ones need no additional memory.

    Settings that differ only in further micro-batches can then use the same cached record.
    """
    size = train.micro_batch_size
    if not isinstance(size, int) or size >= train.batch_size:
        return train.replace(micro_batch_size=None)
    return train.replace(batch_size=min(train.batch_size, 2 * size))


def _share(part: Mapping[Any, int], whole: Mapping[Any, int]) -> float:
    return sum(part.values()) / (sum(whole.values()) or 1)
