"""The memory of one rank in parallel training, estimated from a recorded step."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workhorse.config.base import ConfigError
from workhorse.memory.account import Moment, is_of_layer, moments_of_part, ways_of, whole_at_once
from workhorse.memory.step_memory import Kind, Place, PlannedStep, StepMemory, step_memory
from workhorse.nn import DecoderConfig
from workhorse.parallel.config import ExactConfig, ParallelismConfig, share_of
from workhorse.parallel.division.parts import check_divisible

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


def device_memory(step: PlannedStep, *, updates: bool = True) -> DeviceMemory:
    """The memory of a training step on the device that needs the most.

    A step is recorded with the device's part of the model, which depends on `step.parallel`:

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
        step: the step; its `micro_batch_size` is a number or None.
        updates: True to also record the weight update.

    Raises:
        ConfigError: the model or its batches cannot be divided by these settings.
    """
    config, train, parallel = step.config, step.train, step.parallel
    check_divisible(config, train.kernel, parallel)
    if step.adapter is not None:
        step.adapter.check_parallel(parallel)
    try:
        parallel.check_batch(train.batch_size, train.seq_len)
    except ConfigError as error:
        raise error.below("parallel") from None
    own = train.micro_batches(parallel)
    if parallel.is_exact:
        exact = ParallelismConfig(reduction=ExactConfig(logical_shards=own.parts))
        recorded = replace(step, parallel=exact).with_train(batch_size=own.rows * own.parts)
    else:
        recorded = _as_recorded(step.with_train(batch_size=own.rows, micro_batch_size=own.size))
    found = [
        _of_stage(_recorded(recorded, stage, updates=updates), step, stage, own.count)
        for stage in _distinct_stages(config, parallel.pipeline)
    ]
    return max(found, key=lambda memory: memory.total)


def peak_of_passes(step: PlannedStep) -> int:
    """Peak bytes of the forward and backward passes, without the weight update.

    For a deep model it is extrapolated from two models with few layers, which takes less time. Both
    have the first and the last layers of the model. The bytes at each point of a step, such as the
    backward pass of the last layer but one, grow by the same amount with each further layer. Points
    in the layers between are never the peak, since their bytes rise or fall from layer to layer.
    """
    config, adapter = step.config, step.adapter
    period = len(config.pattern or config.blocks)
    ends = 2 * period
    few = 2 * ends + config.n_layers % period
    alike = step.parallel.pipeline == 1 and (adapter is None or not adapter.names_a_layer)
    if 2 * few + period >= config.n_layers or not alike:
        return device_memory(step, updates=False).total
    shallow = (replace(step, config=config.replace(n_layers=n)) for n in (few, few + period))
    fewer, larger = (
        _peaks(device_memory(one, updates=False), one.config.n_layers, ends) for one in shallow
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
    step: StepMemory, planned: PlannedStep, stage: int, micro_batches: int
) -> DeviceMemory:
    """The memory of a device in a pipeline stage, from a step recorded for that stage."""
    parallel, tied = planned.parallel, planned.config.head.tied
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
        kind = planned.device.type
        gathered = whole_at_once(step, parallel, kind, tied=tied, has_head=has_head)
    return DeviceMemory(
        stage,
        held,
        step.activations,
        1 + others[0],
        max(map(gathered, step.spans)) if gathered else 0,
        list(moments_of_part(step, shares, waiting, gathered, parallel)),
    )


def _recorded(step: PlannedStep, stage: int, *, updates: bool) -> StepMemory:
    """The cached record of a step, shared by all ranks with the same part of the model."""
    step = replace(step, parallel=step.parallel.replace(data=1, shard=1, expert=1))
    configs = (step.config, step.train, step.parallel, step.adapter)
    parts = [config and config.to_dict() for config in configs]
    key = json.dumps([*parts, str(step.device), step.packed, stage])
    found = _RECORDS.get(key)
    if found is None or (updates and found.spans[-1].phase != "update"):
        found = _RECORDS[key] = step_memory(step, updates=updates, stage=stage)
        if len(_RECORDS) > MOST_RECORDS:
            del _RECORDS[next(iter(_RECORDS))]  # the oldest
    return found if updates else found.without_update


def _as_recorded(step: PlannedStep) -> PlannedStep:
    """Reduce the batch to at most two micro-batches; further ones need no additional memory.

    Settings that differ only in further micro-batches can then use the same cached record.
    """
    size, rows = step.train.micro_batch_size, step.train.batch_size
    if not isinstance(size, int) or size >= rows:
        return step.with_train(micro_batch_size=None)
    return step.with_train(batch_size=min(rows, 2 * size))


def _share(part: Mapping[Any, int], whole: Mapping[Any, int]) -> float:
    return sum(part.values()) / (sum(whole.values()) or 1)
