"""Simulated time of a training step on several devices, with computation and communication.

The time of a layer is computed from its FLOPs and the memory traffic of its activations. The time
of a collective comes from `Cluster`. Pipeline stages run their passes in the order of
`one_forward_one_backward`. As in training, FSDP communication overlaps with computation, and
computation waits for all other communication.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch

from workhorse.memory.account import is_of_layer
from workhorse.memory.device_memory import DeviceMemory, device_memory
from workhorse.memory.step_memory import PlannedStep
from workhorse.models.describe import SCORES, components_of, forward_flops
from workhorse.parallel.config import ParallelismConfig, share_of
from workhorse.parallel.division.stages import Turn, one_forward_one_backward
from workhorse.plan.devices import Cluster, DeviceConfig, Ring, cluster_of
from workhorse.transforms.adapters import trained_parameters

FORWARD_PASSES, BACKWARD_PASSES = 2, 4
"""Number of memory accesses per saved activation in a pass: one operator writes it and the next one
reads it. The backward pass also accesses its gradient."""
UPDATE_PASSES = 2
"""Number of memory accesses per element of weights, gradients and optimizer state in an update: one
read, one write."""
STEADY = 3
"""Number of micro-batches per pipeline stage after which each additional micro-batch takes the same
time."""
FLOAT32 = 4
"""Bytes per element of summed gradients and of optimizer state."""
STATE = 4
"""Number of float32 elements per weight in an update: the float32 weight (bfloat16 and its low
bits), two optimizer moments and the gradient."""


@dataclass(frozen=True)
class Pass:
    """Times of a forward or a backward pass through a layer or a pipeline stage."""

    computes: float = 0.0
    """Seconds of computation."""
    waits: float = 0.0
    """Seconds of communication of activations, during which computation waits."""
    fetches: float = 0.0
    """Seconds of FSDP communication of weights and gradients."""

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def times(self, number: float) -> "Pass":
        return Pass(*(number * seconds for seconds in astuple(self)))

    def seconds(self, *, aside: bool) -> float:
        """Total seconds; if `aside` is True, FSDP communication overlaps with everything else."""
        rest = self.computes + self.waits
        return max(rest, self.fetches) if aside else rest + self.fetches


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on its slowest pipeline stage.

    Attributes:
        compute: arithmetic and memory traffic, including recomputed activations.
        activation_exchange: communication of tensor, context and expert parallelism.
        exposed_fsdp: FSDP communication that does not overlap with computation.
        pipeline_bubble: idle time while the pipeline fills, drains or waits for a slower stage.
        gradient_sync: all-reduce of gradients after the backward passes.
        optimizer: the optimizer's update.
    """

    compute: float
    activation_exchange: float
    exposed_fsdp: float
    pipeline_bubble: float
    gradient_sync: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(vars(self).values())


def simulated_step(step: PlannedStep, device: DeviceConfig) -> StepTime:
    """Simulate the time of a training step on devices with known links.

    The size of saved activations is recorded on a model with one period of the layer pattern.

    Args:
        step: the step on a GPU; its `micro_batch_size` must not be `auto`.
        device: the type of all devices; its `links` must be known.
    """
    config, parallel = step.config, step.parallel
    period = len(config.pattern or config.blocks)
    rows = step.train.micro_batches(parallel).size
    recorded = replace(
        step,
        config=config.replace(n_layers=period, pattern=config.pattern[:period]),
        parallel=ParallelismConfig(context=parallel.context, tensor=parallel.tensor),
    ).with_train(batch_size=rows, micro_batch_size=None, activation_checkpointing=False)
    return step_time(step, cluster_of(device, step.train), device_memory(recorded, updates=False))


def step_time(step: PlannedStep, cluster: Cluster, memory: DeviceMemory) -> StepTime:
    """Simulate the time of a training step on a cluster, as in `simulated_step`.

    Only the sizes of the activations in `memory` are used, which are without checkpointing.
    """
    work = _Work(step, cluster, memory)
    stages = [work.of_stage(stage) for stage in range(step.parallel.pipeline)]
    count = work.micro_batches
    seconds = partial(Pass.seconds, aside=cluster.sends_aside)
    of_pass = [(seconds(forward), seconds(backward)) for forward, backward in stages]
    total = pipeline_seconds(of_pass, count, work.transfer)
    slowest = max(of_pass, key=sum)
    forward, backward = stages[of_pass.index(slowest)]
    both = (forward + backward).times(count)
    busy = sum(slowest) * count
    return StepTime(
        compute=both.computes,
        activation_exchange=both.waits,
        exposed_fsdp=max(0.0, busy - both.computes - both.waits),
        pipeline_bubble=max(0.0, total - busy),
        gradient_sync=work.add_gradients(),
        optimizer=work.update(),
    )


def pipeline_seconds(
    stages: list[tuple[float, float]], micro_batches: int, transfer: float = 0.0
) -> float:
    """Seconds of all forward and backward passes of a step in a pipeline, including idle time.

    Args:
        stages: for each stage, seconds of a forward and of a backward pass of one micro-batch.
        micro_batches: number of micro-batches.
        transfer: seconds to send activations from one stage to the next.
    """
    steady = STEADY * len(stages)
    if micro_batches > steady:  # each further micro-batch takes the same time
        settled = _followed(stages, steady, transfer)
        more = settled - _followed(stages, steady - 1, transfer)
        return settled + (micro_batches - steady) * more
    return _followed(stages, micro_batches, transfer)


def _followed(stages: list[tuple[float, float]], micro_batches: int, transfer: float) -> float:
    """Seconds of all passes in a pipeline, like `pipeline_seconds`, with every pass simulated."""
    count = len(stages)
    if count == 1:
        return micro_batches * sum(stages[0])
    pending = [
        deque(one_forward_one_backward(micro_batches, count, stage)) for stage in range(count)
    ]
    done: dict[tuple[int, Turn], float] = {}
    clocks = [0.0] * count
    while any(pending):
        for stage, turns in enumerate(pending):
            while turns:
                before = stage - 1 if turns[0].forward else stage + 1
                if 0 <= before < count and (before, turns[0]) not in done:
                    break
                turn = turns.popleft()
                arrives = done.get((before, turn), -transfer) + transfer
                seconds = stages[stage][0 if turn.forward else 1]
                clocks[stage] = done[stage, turn] = max(clocks[stage], arrives) + seconds
    return max(clocks)


class _Work:
    """Computes the times of a device's work in a training step.

    Attributes named `of_...` are the groups of devices that communicate, as `Ring`. The other
    attributes are numbers of tokens, FLOPs, bytes or weights.
    """

    def __init__(self, step: PlannedStep, cluster: Cluster, memory: DeviceMemory) -> None:
        config, train, parallel = step.config, step.train, step.parallel
        self.config, self.train, self.parallel = config, train, parallel
        self.cluster = cluster
        self.item = getattr(torch, train.dtype).itemsize
        own = train.micro_batches(parallel)
        self.micro_batches = own.count
        self.tokens = own.size * train.seq_len // parallel.context
        """Number of tokens per micro-batch in one tensor-parallel group."""
        tensor, context = parallel.tensor, parallel.context
        self.of_tensor = Ring(tensor, 1)
        self.of_context = Ring(context, tensor)
        self.of_shard = Ring(parallel.weight_parts, tensor)
        copies = parallel.replicas * context // parallel.weight_parts
        self.of_data = Ring(copies, tensor * parallel.weight_parts)
        self.of_experts = Ring(parallel.expert, parallel.team)
        kept = [size for part, size in memory.activations.items() if is_of_layer(part)]
        self.keeps = sum(kept) / len(kept)
        """Average bytes of activations that a layer saves per micro-batch on one device."""
        whole = config.build(device="meta")
        per_token = forward_flops(whole, train.seq_len)
        if train.kernel != "eager":  # other kernels skip the scores that a causal mask hides
            per_token[SCORES] = per_token.get(SCORES, 0) // 2
        self.head_flops = per_token.get("head", 0)
        layers = sum(per_token.values()) - self.head_flops
        self.layer_flops = layers / config.n_layers
        self.gradients = 2 if step.adapter is None else 1
        """Gradients of each matmul with a weight: of its input, and of the weight if trained."""
        scores = per_token.get(SCORES, 0)  # no weights: both inputs have a gradient
        self.layer_backward = (self.gradients * (layers - scores) + 2 * scores) / config.n_layers
        numbers: Counter[str] = Counter()
        components = components_of(whole)
        for name, weight in whole.named_parameters():
            of_experts = parallel.expert > 1 and components[name] == "experts"
            place = "experts" if of_experts else "layers" if is_of_layer(name) else "outside"
            numbers[place] += weight.numel()
        self.layer_weights = numbers["layers"] / config.n_layers
        """Average number of weights per layer, without experts if expert parallelism divides
        them."""
        self.layer_experts = numbers["experts"] / config.n_layers / parallel.expert
        self.outside_weights = numbers["outside"]
        self.trained = None
        if step.adapter is not None:
            self.trained = trained_parameters(step.adapter.adapt(whole, seed=0))

    @property
    def transfer(self) -> float:
        """Seconds to send a micro-batch's activations to the next pipeline stage.

        The devices of a tensor-parallel group each send an equal part of the tokens.
        """
        tokens = self.tokens / self.parallel.tensor
        stride = self.parallel.processes // self.parallel.pipeline
        return self.cluster.send(stride, tokens * self.config.d_model * self.item)

    def of_stage(self, stage: int) -> tuple[Pass, Pass]:
        """Times of the forward and of the backward pass of a micro-batch through a stage."""
        own = share_of(self.config.n_layers, self.parallel.pipeline, stage)
        forward, backward = (
            self.of_layer(backward=backward).times(len(own)) for backward in (False, True)
        )
        if stage == self.parallel.pipeline - 1:
            flops = self.head_flops * self.tokens / self.parallel.tensor
            waits = self.cluster.all_gather(self.of_tensor, self._residual)
            forward += Pass(flops / self.cluster.flops, waits)
            backward += Pass(self.gradients * flops / self.cluster.flops, waits)
        if stage in {0, self.parallel.pipeline - 1}:
            forward += Pass(fetches=self._fetches(self._outside, backward=False))
            backward += Pass(fetches=self._fetches(self._outside, backward=True, whole=True))
        return forward, backward

    def of_layer(self, *, backward: bool) -> Pass:
        """Times of a micro-batch's pass through an average layer.

        With activation checkpointing, the backward pass includes a second forward pass.
        """
        flops = self.layer_backward if backward else self.layer_flops
        computes = flops * self.tokens / self.parallel.tensor / self.cluster.flops
        passes = BACKWARD_PASSES if backward else FORWARD_PASSES
        computes += passes * self.keeps / self.cluster.bandwidth
        fetches = self._fetches(self.layer_weights, backward=backward)
        own = Pass(computes, self._sent_in_layer(), fetches)
        if backward and self.train.activation_checkpointing:
            return own + replace(self.of_layer(backward=False), fetches=0.0)
        return own

    def _fetches(self, weights: float, *, backward: bool, whole: bool = False) -> float:
        """Seconds for FSDP to gather weights and, in the backward pass, reduce-scatter gradients.

        Args:
            weights: number of weights, summed over a tensor-parallel group.
            backward: True for the backward pass, False for the forward pass.
            whole: True if the weights stay gathered from the forward to the backward pass.
        """
        if self.of_shard.size == 1:
            return 0.0
        weights /= self.parallel.tensor
        gathers = 0.0 if backward and whole else 1.0
        if self.parallel.reshard == "step":  # gathers weights only once per step
            gathers = 0.0 if backward else 1 / self.micro_batches
        seconds = gathers * self.cluster.all_gather(self.of_shard, weights * self.item)
        if backward:
            seconds += self.cluster.all_gather(self.of_shard, weights * FLOAT32)
        return seconds

    @property
    def _outside(self) -> float:
        """Number of weights outside the layers (embedding, head, final norm) in one pipeline stage.

        With several stages, the first and the last are assumed to hold half of them each.
        """
        return self.outside_weights / min(2, self.parallel.pipeline)

    @property
    def _residual(self) -> float:
        """Bytes of the residual stream of a micro-batch in one tensor-parallel group."""
        return self.tokens * self.config.d_model * self.item

    def _sent_in_layer(self) -> float:
        """Seconds of the communication that computation waits for, in one pass of a layer."""
        seconds = 0.0
        if self.of_tensor.size > 1:  # each of two sub-layers gathers and reduce-scatters
            seconds += 4 * self.cluster.all_gather(self.of_tensor, self._residual)
        if self.of_context.size > 1:
            whole = self.tokens * self.parallel.context * self._width_of_keys * self.item
            seconds += self.cluster.all_gather(self.of_context, whole)
        if self.of_experts.size > 1:
            seconds += 2 * self._chosen * self.cluster.all_gather(self.of_experts, self._residual)
        return seconds

    @property
    def _width_of_keys(self) -> float:
        """Number of key and value elements per token on one device, averaged over the layers."""
        widths: list[float] = []
        for name in self.config.layer_names():
            block = self.config.blocks[name]
            n_kv_heads = block.grouped.n_kv_heads if block.grouped is not None else None
            heads = max(1, (n_kv_heads or block.attention.n_heads) // self.parallel.tensor)
            widths.append(2 * heads * block.attention.key_dim(self.config.d_model))
        return sum(widths) / len(widths)

    @property
    def _chosen(self) -> float:
        """Number of chosen experts per token, averaged over all layers."""
        parts = [self.config.blocks[name].mixture for name in self.config.layer_names()]
        return sum(part.top_k for part in parts if part) / len(parts)

    def _own_weights(self) -> Iterator[tuple[Ring, float]]:
        """Yield the numbers of trained weights on one device of the largest stage.

        Each number comes with the group of devices that hold the same weights.
        """
        if self.trained is not None:
            yield self.of_data, self.trained
            return
        layers = -(-self.config.n_layers // self.parallel.pipeline)
        shared = (layers * self.layer_weights + self._outside) / self.parallel.tensor
        yield self.of_data, shared / self.parallel.weight_parts
        if self.layer_experts:
            copies = self.parallel.replicas * self.parallel.context // self.parallel.expert
            own = Ring(copies, self.parallel.expert * self.parallel.team)
            yield own, layers * self.layer_experts / self.parallel.tensor

    def add_gradients(self) -> float:
        """Seconds of the all-reduce of gradients over the devices that hold the same weights."""
        return sum(
            self.cluster.all_reduce(ring, numbers * FLOAT32)
            for ring, numbers in self._own_weights()
            if ring.size > 1
        )

    def update(self) -> float:
        """Seconds of the optimizer's update."""
        own = sum(numbers for _, numbers in self._own_weights())
        return UPDATE_PASSES * own * STATE * FLOAT32 / self.cluster.bandwidth
