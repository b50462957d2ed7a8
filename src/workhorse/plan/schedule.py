"""How long a training step takes on several devices: its passes, and what they send each other.

Arithmetic and the traffic of activations give the time of a layer; what is sent, its bytes by the
bandwidth of a ring, and a latency for each hop (2104.04473 §3). The passes of a pipeline follow
`one_forward_one_backward`. FSDP sends while layers compute; everything else waits, as in training.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from workhorse.models.flops import SCORES, forward_flops
from workhorse.models.parameters import count_parameters
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.grouped import AttentionConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.division.part import share_of
from workhorse.parallel.division.turns import Turn, one_forward_one_backward
from workhorse.plan.devices import GIGA, DeviceConfig
from workhorse.train.recipe.recipe import TrainConfig
from workhorse.train.step.device_memory import DeviceMemory, device_memory

FORWARD_PASSES, BACKWARD_PASSES = 2, 4
"""How often what a layer keeps is read or written by its operators, all of which go through
memory: each writes what the next reads, and in the backward pass gradients as well."""
UPDATE_PASSES = 2
"""Of weights, gradients and optimizer: each is read and written once."""
MEMORY_REACHED = 0.8
"""The part of their bandwidth that memory and links reach."""
NEAR_LATENCY, FAR_LATENCY = 5e-6, 10e-6
"""Seconds of a message inside a node and between nodes, as libraries send them."""
GRADIENT = 4
"""Bytes of a number of a gradient that processes add up."""


class Link(NamedTuple):
    """A way from a device to others."""

    bandwidth: float
    """Bytes a second that it sends, while it receives as many."""
    latency: float
    """Seconds of a message."""


class Machine(NamedTuple):
    """What of a device and its links is reached."""

    flops: float
    """Of matrix products, a second."""
    bandwidth: float
    """Of its memory, bytes a second."""
    near: Link
    """To the devices of its node."""
    far: Link
    """To all others."""
    node: int
    """How many devices share near links."""


class Group(NamedTuple):
    """Devices that exchange something: so many, each `stride` from the next in their order."""

    size: int
    stride: int


class Collectives:
    """Seconds of what groups of devices exchange by rings."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def gather(self, group: Group, n_bytes: float) -> float:
        """All get so many bytes, of which each has a part; also to add up and keep a part."""
        here = max(1, min(group.size, self.machine.node // group.stride))
        nodes = -(-group.size // here)
        near, far = self.machine.near, self.machine.far
        bandwidth = near.bandwidth if nodes == 1 else min(near.bandwidth, here * far.bandwidth)
        hops = near.latency * (here - 1) + far.latency * (nodes - 1)
        return n_bytes * (group.size - 1) / group.size / bandwidth + hops

    def add(self, group: Group, n_bytes: float) -> float:
        """All get the sum of so many bytes."""
        return 2 * self.gather(group, n_bytes)

    def send(self, stride: int, n_bytes: float) -> float:
        """One device sends another so many bytes."""
        link = self.machine.near if stride < self.machine.node else self.machine.far
        return n_bytes / link.bandwidth + link.latency


class Pass(NamedTuple):
    """Seconds of a layer, or of a stage, in one direction."""

    computes: float = 0.0
    waits: float = 0.0
    """For activations that others send, or take."""
    fetches: float = 0.0
    """For weights and gradients that FSDP sends beside it."""

    def __add__(self, other: "Pass") -> "Pass":  # type: ignore[override]
        return Pass(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: float) -> "Pass":
        return Pass(*(number * part for part in self))

    @property
    def seconds(self) -> float:
        """Of all: what FSDP sends takes time only if it takes longer than the rest."""
        return max(self.computes + self.waits, self.fetches)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, on its slowest stage.

    Attributes:
        computes: arithmetic and memory, what checkpointing repeats included.
        exchanges: activations of divided layers, sequences and experts.
        fetches: weights and gradients, beyond the time that layers compute meanwhile.
        idles: while a pipeline fills and empties, or waits for a slower stage.
        adds: gradients, after the passes.
        updates: the weights.
    """

    computes: float
    exchanges: float
    fetches: float
    idles: float
    adds: float
    updates: float

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())


def step_time(
    config: DecoderConfig,
    train: TrainConfig,
    parallel: ParallelismConfig,
    machine: Machine,
    memory: DeviceMemory,
) -> StepTime:
    """How long a step takes.

    Args:
        config: of the whole decoder.
        train: how it is trained, by all devices together; `micro_batch_size` is a number or None.
        parallel: how the work is divided among them.
        machine: the devices.
        memory: of the fullest device, without checkpointing; what layers keep is read from it.
    """
    work = _Work(config, train, parallel, machine, memory)
    stages = [work.of_stage(stage) for stage in range(parallel.pipeline)]
    count = work.micro_batches
    of_pass = [(forward.seconds, backward.seconds) for forward, backward in stages]
    total = pipeline_seconds(of_pass, count, work.transfer)
    forward, backward = max(stages, key=lambda both: both[0].seconds + both[1].seconds)
    both = (forward + backward).times(count)
    busy = (forward.seconds + backward.seconds) * count
    return StepTime(
        computes=both.computes,
        exchanges=both.waits,
        fetches=max(0.0, busy - both.computes - both.waits),
        idles=max(0.0, total - busy),
        adds=work.add_gradients(),
        updates=work.update(),
    )


def simulated_step(
    config: DecoderConfig,
    train: TrainConfig,
    parallel: ParallelismConfig,
    device: DeviceConfig,
    *,
    packed: bool = False,
) -> StepTime:
    """How long a step takes on devices whose links are known.

    What a layer keeps is recorded on one layer of each kind.
    """
    period = len(config.pattern or config.blocks)
    rows = parallel.rows_at_once(train.batch_size)
    rows = min(rows, int(train.micro_batch_size or rows))
    memory = device_memory(
        config.replace(n_layers=period, pattern=config.pattern[:period]),
        train.replace(
            batch_size=rows * parallel.replicas,
            micro_batch_size=None,
            activation_checkpointing=False,
        ),
        torch.device("cuda"),
        parallel.replace(pipeline=1),
        packed=packed,
        updates=False,
    )
    return step_time(config, train, parallel, machine_of(device, train), memory)


def machine_of(device: DeviceConfig, train: TrainConfig) -> Machine:
    """What of a device whose links are known is reached in training."""
    assert device.link is not None
    assert device.network is not None
    assert device.reached is not None
    peak = device.peak(getattr(torch, train.dtype), tf32=train.matmul_precision == "high")
    reached = MEMORY_REACHED * GIGA
    return Machine(
        flops=device.reached * peak,
        bandwidth=reached * device.bandwidth,
        near=Link(reached * device.link, NEAR_LATENCY),
        far=Link(reached * device.network, FAR_LATENCY),
        node=device.node,
    )


def pipeline_seconds(
    stages: list[tuple[float, float]], micro_batches: int, transfer: float = 0.0
) -> float:
    """From the first pass of a step to the last.

    Args:
        stages: seconds of a forward and of a backward pass of each.
        micro_batches: how many pass.
        transfer: seconds from one stage to the next.
    """
    last = len(stages) - 1
    turns = [
        list(one_forward_one_backward(micro_batches, len(stages), stage))
        for stage in range(len(stages))
    ]
    done: dict[tuple[int, Turn], float] = {}
    clocks, nexts = [0.0] * len(stages), [0] * len(stages)
    waiting = list(range(len(stages)))
    while waiting:
        stage = waiting.pop()
        while nexts[stage] < len(turns[stage]):
            turn = turns[stage][nexts[stage]]
            other = stage - 1 if turn.forward else stage + 1
            arrives = 0.0
            if 0 <= other <= last:
                if (other, turn) not in done:
                    break  # whoever makes it asks this stage again
                arrives = done[other, turn] + transfer
            seconds = stages[stage][0 if turn.forward else 1]
            clocks[stage] = done[stage, turn] = max(clocks[stage], arrives) + seconds
            nexts[stage] += 1
            after = stage + 1 if turn.forward else stage - 1
            if 0 <= after <= last and after not in waiting:
                waiting.append(after)
    return max(clocks)


class _Work:
    """What a device does in a step, and how long it takes."""

    def __init__(
        self,
        config: DecoderConfig,
        train: TrainConfig,
        parallel: ParallelismConfig,
        machine: Machine,
        memory: DeviceMemory,
    ) -> None:
        self.config, self.train, self.parallel = config, train, parallel
        self.machine, self.collectives = machine, Collectives(machine)
        self.item = getattr(torch, train.dtype).itemsize
        size = train.micro_batch_size
        assert size != "auto", "determined before"
        rows = -(-train.batch_size // parallel.parts)
        at_once = min(rows, size or parallel.rows_at_once(train.batch_size))
        self.micro_batches = -(-rows // at_once)
        self.tokens = at_once * train.seq_len // parallel.context
        """Of a micro-batch, of those that divide layers together."""
        tensor, context = parallel.tensor, parallel.context
        self.of_tensor = Group(tensor, 1)
        self.of_context = Group(context, tensor)
        self.of_shard = Group(parallel.weight_parts, tensor)
        self.of_data = Group(parallel.replicas * context // parallel.weight_parts, tensor)
        if parallel.shard > 1:
            self.of_data = Group(parallel.data, tensor * parallel.weight_parts)
        self.of_experts = Group(parallel.expert, parallel.team)
        self.keeps = _mean_of_layers(memory)
        counts = count_parameters(config)
        per_token = forward_flops(config.build(device="meta"), train.seq_len)
        if train.kernel != "eager":  # the others leave out what a causal mask hides
            per_token[SCORES] = per_token.get(SCORES, 0) // 2
        self.head_flops = per_token.get("head", 0)
        layers = sum(per_token.values()) - self.head_flops
        self.layer_flops = layers / config.n_layers
        outside = counts["embedding"] + counts.get("head", 0)
        self.layer_weights = (counts["total"] - outside) / config.n_layers
        self.outside_weights = outside

    @property
    def transfer(self) -> float:
        """Seconds from one stage to the next: each device's own tokens."""
        tokens = self.tokens / self.parallel.tensor
        stride = self.parallel.processes // self.parallel.pipeline
        return self.collectives.send(stride, tokens * self.config.d_model * self.item)

    def of_stage(self, stage: int) -> tuple[Pass, Pass]:
        """The two passes of a micro-batch."""
        own = share_of(self.config.n_layers, self.parallel.pipeline, stage)
        forward, backward = (
            self.of_layer(backward=backward).times(len(own)) for backward in (False, True)
        )
        if stage == self.parallel.pipeline - 1:
            flops = self.head_flops * self.tokens / self.parallel.tensor
            waits = self.collectives.gather(self.of_tensor, self._residual)
            forward += Pass(flops / self.machine.flops, waits)
            backward += Pass(2 * flops / self.machine.flops, waits)
        return forward, backward

    def of_layer(self, *, backward: bool) -> Pass:
        """A layer of average size; with checkpointing its forward pass comes twice."""
        flops = self.layer_flops * self.tokens / self.parallel.tensor
        computes = flops / self.machine.flops * (2 if backward else 1)
        passes = BACKWARD_PASSES if backward else FORWARD_PASSES
        computes += passes * self.keeps / self.machine.bandwidth
        weights = self.layer_weights / self.parallel.tensor
        fetches = 0.0
        if self.of_shard.size > 1:
            fetches = self.collectives.gather(self.of_shard, weights * self.item)
            if backward:
                fetches += self.collectives.gather(self.of_shard, weights * GRADIENT)
        own = Pass(computes, self._sent_in_layer(), fetches)
        if backward and self.train.activation_checkpointing:
            again = self.of_layer(backward=False)
            return Pass(own.computes + again.computes, own.waits + again.waits, own.fetches)
        return own

    @property
    def _residual(self) -> float:
        """Bytes of the residual stream of a micro-batch."""
        return self.tokens * self.config.d_model * self.item

    def _sent_in_layer(self) -> float:
        """Seconds that a layer waits for others, in either direction."""
        seconds = 0.0
        if self.of_tensor.size > 1:  # taken in and given out, by each half
            seconds += 4 * self.collectives.gather(self.of_tensor, self._residual)
        if self.of_context.size > 1:
            whole = self.tokens * self.parallel.context * self._width_of_keys * self.item
            seconds += self.collectives.gather(self.of_context, whole)
        if self.of_experts.size > 1:
            seconds += 2 * self._chosen * self.collectives.gather(self.of_experts, self._residual)
        return seconds

    @property
    def _width_of_keys(self) -> float:
        """Of keys and values of a token together, on one device, in an average layer."""
        widths: list[float] = []
        for name in self.config.layer_names():
            attention = self.config.blocks[name].attention
            if isinstance(attention, AttentionConfig):
                heads = attention.n_kv_heads or attention.n_heads
                heads = max(1, heads // self.parallel.tensor)
            else:
                heads = attention.n_heads // self.parallel.tensor
            widths.append(2 * heads * attention.key_dim(self.config.d_model))
        return sum(widths) / len(widths)

    @property
    def _chosen(self) -> float:
        """Experts of a token, in an average layer."""
        parts = [self.config.blocks[name].feed_forward for name in self.config.layer_names()]
        return sum(part.top_k for part in parts if isinstance(part, MoEConfig)) / len(parts)

    @property
    def _own_weights(self) -> float:
        """Numbers of the largest stage's layers, and of embedding or head, on one device."""
        layers = -(-self.config.n_layers // self.parallel.pipeline) * self.layer_weights
        outside = self.outside_weights / min(2, self.parallel.pipeline)
        return (layers + outside) / self.parallel.tensor

    def add_gradients(self) -> float:
        """Seconds in which copies of the model add up their gradients."""
        if self.of_data.size == 1:
            return 0.0
        own = self._own_weights / self.parallel.weight_parts
        return self.collectives.add(self.of_data, own * GRADIENT)

    def update(self) -> float:
        """Seconds of the optimizer: weights, their low bits, two moments and a gradient."""
        own = self._own_weights / self.parallel.weight_parts
        return UPDATE_PASSES * own * 4 * GRADIENT / self.machine.bandwidth


def _mean_of_layers(memory: DeviceMemory) -> float:
    """Bytes that a layer keeps of a micro-batch."""
    kept = list(_of_layers(memory.activations))
    return sum(kept) / max(len(kept), 1)


def _of_layers(activations: Mapping[str, int]) -> Iterator[int]:
    for part, size in activations.items():
        if part.startswith("layers."):
            yield size
