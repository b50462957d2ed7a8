"""The memory of a training step, measured by running the step on tensors without data.

On the device `meta`, PyTorch allocates full matrices of attention scores and keeps dropout masks in
the dtype of their input. A GPU does neither, so `with_gpu_kernels` replaces attention and dropout.
"""

from array import array
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.data import Batch
from workhorse.devices.names import training_dtype
from workhorse.devices.tape import Tape, stand_in, without_data
from workhorse.errors import WorkhorseError
from workhorse.models.describe import components_of, tensors_of
from workhorse.nn import Decoder, DecoderConfig, TokenLogprobs
from workhorse.nn.attention.kernels import KernelName, Sdpa
from workhorse.nn.shapes import AttentionOutput, Keys, Queries, Values
from workhorse.nn.surgery import as_subclass, replace_modules
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig
from workhorse.parallel.division.stages import one_forward_one_backward
from workhorse.parallel.division.teams import Teams, absent_teams
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import build_step
from workhorse.train.step.step import TrainingStep

Module = TypeVar("Module", bound=nn.Module)
aten = torch.ops.aten


def with_gpu_kernels(module: Module) -> Module:
    """Change a module on the device `meta`, in place, so that it allocates memory as on a GPU."""

    def choose(part: nn.Module) -> nn.Module:
        if type(part) is Sdpa:
            return as_subclass(part, FusedSdpa)
        return as_subclass(part, FusedDropout) if type(part) is nn.Dropout else part

    replace_modules(module, choose)
    return module


class FusedDropout(nn.Dropout):
    """Dropout that stores a mask of one byte per element."""

    def forward(self, input: Tensor) -> Tensor:
        return aten.native_dropout(input, self.p, self.training)[0] if self.training else input


class FusedSdpa(Sdpa):
    """Attention with the kernel that PyTorch selects on a GPU.

    This is flash attention if the mask is None, the dtype has 16 bits, and queries and values have
    the same width; otherwise the xFormers kernel. Both keep queries, keys, values, the output, and
    a log-sum-exp for each query and head.
    """

    def forward(
        self, q: Queries, k: Keys, v: Values, mask: tuple[Tensor | None, bool]
    ) -> AttentionOutput:
        attn_mask, is_causal = mask
        dropout = self.scoring.dropout if self.training else 0.0
        scale = self.scoring.scale
        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        in_16_bits = q.element_size() == 2  # noqa: PLR2004
        if attn_mask is None and in_16_bits and q.shape[-1] == v.shape[-1]:
            return aten._scaled_dot_product_flash_attention(
                q, k, v, dropout, is_causal, scale=scale
            )[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
            attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout, is_causal, scale=scale
        )[0]


Kind = Literal[
    "weights",
    "teacher",
    "low_bits",
    "optimizer",
    "sums",
    "gradients",
    "activations",
    "loss",
    "temporary",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds of memory, in the order of the chart of `plan`.

- `weights`, `teacher` (weights of a frozen teacher, which ranks do not divide), `low_bits` (lower
  halves of float32 master weights of bfloat16 weights), `optimizer`: held between steps.
- `gradients`; `sums`: gradients summed over several micro-batches, in float32.
- `activations`: tensors that the forward pass of the layers keeps for the backward pass.
- `loss`: allocations of the head and the loss in the forward pass: logits and their gradient.
- `temporary`: everything else.
"""
Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class PlannedStep:
    """A training step, described before anything is allocated for it.

    Attributes:
        config: the config of the whole decoder.
        train: the training settings of all devices.
        device: the device; only its type matters, and this machine need not have it.
        parallel: the parallelism settings.
        packed: True if rows hold several documents, separated by a mask.
        adapter: the adapter to train; None to train all weights.
    """

    config: DecoderConfig
    train: TrainConfig
    device: torch.device
    parallel: ParallelismConfig = UNDIVIDED
    packed: bool = False
    adapter: AdapterConfig | None = None

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: DecoderConfig, device: torch.device
    ) -> "PlannedStep":
        """The step of a recipe whose decoder has the given config."""
        packed = recipe.data.packed
        return cls(config, recipe.train, device, recipe.parallel, packed, recipe.adapter)

    def with_train(self, **fields: Any) -> "PlannedStep":
        """The step with changed fields of `train`."""
        return replace(self, train=self.train.replace(**fields))

    def synthetic(self, rows: int, device: torch.device) -> Batch:
        """Make a batch of `rows` rows for the step."""
        tokens = torch.zeros(rows, self.train.seq_len, dtype=torch.int64, device=device)
        return self.train.objective.synthetic(tokens, tokens if self.packed else None)


class Place(NamedTuple):
    """The part and the component of a model that a parameter belongs to."""

    part: str
    """A layer such as `layers.3`; for a parameter outside the layers, the component."""
    component: str
    """The component, such as `experts`; see `components_of`."""


class Span(NamedTuple):
    """A period of the step in which one part of the model runs; it ends when the next begins."""

    begin: int
    """Index of the first operator."""
    part: str
    """`embedding`, `layers.3`, `final_norm`, `head` or `update`."""
    phase: Phase


@dataclass(frozen=True)
class StepMemory:
    """The memory of a training step, in bytes.

    Attributes:
        held: bytes held before and after the step, by kind and place in the model.
        activations: bytes of a micro-batch's activations, by part of the model.
        timeline: bytes of each kind during each operator of the step. The first value is from
            before the first operator, the last value from after the last operator.
        spans: the periods of the step in which one part of the model runs, in order.
    """

    held: dict[Kind, dict[Place, int]]
    activations: dict[str, int]
    timeline: dict[Kind, "array[int]"]
    spans: list[Span]

    @property
    def totals(self) -> list[int]:
        """The bytes of all kinds together, at each point of the timeline."""
        return [sum(values) for values in zip(*self.timeline.values(), strict=True)]

    @property
    def without_update(self) -> "StepMemory":
        """The record without the weight update."""
        begin = next((span.begin for span in self.spans if span.phase == "update"), None)
        if begin is None:
            return self
        timeline = {kind: values[: begin + 1] for kind, values in self.timeline.items()}
        spans = [span for span in self.spans if span.phase != "update"]
        return replace(self, timeline=timeline, spans=spans)


def step_memory(
    planned: PlannedStep, *, updates: bool = True, stage: int | None = None
) -> StepMemory:
    """Record the memory of a training step on tensors without data.

    At most two micro-batches are recorded; further ones allocate the same as the second. With
    `reduction: exact` the whole step is recorded, as one process executes it.

    For a CPU, the step runs with this machine's native operators if it has them. For any other
    device, it runs with PyTorch's own operators. Features that cannot run without data are replaced
    by others that need at least as much memory: FlexAttention by SDPA, 8-bit matmuls by 16-bit
    ones, compiled layers by uncompiled ones.

    Args:
        planned: the step; its `micro_batch_size` is a number or None, and its `dtype` is not `auto`
            unless this machine has the device.
        updates: True to also record the weight update, which does not depend on the batch.
        stage: the pipeline stage; None for the last. If several micro-batches wait for their
            backward pass at once, only one of them is recorded.
    """
    config, train, parallel = planned.config, planned.train, planned.parallel
    rows = train.batch_size
    if not parallel.is_exact:
        own = train.micro_batches(parallel)
        rows = min(own.rows, 2 * own.size)
    here = stand_in(planned.device)
    with without_data(here) as tape:
        step = build_without_data(planned, absent_teams(parallel, config.vocab_size, stage), here)
        decoder = step.objective.decoder
        step.turns = one_forward_one_backward  # without overlap of micro-batches, for any stage
        optimizer, places = step.optimizer, _places(decoder)
        weights = tensors_of(decoder)
        if train.objective.reference == "token" and planned.adapter is None:
            dtype = training_dtype(train.dtype, planned.device)
            initial = config.build(_kernel(train), device=here, dtype=dtype)
            weights |= {f"initial.{name}": one for name, one in tensors_of(initial).items()}
            places |= {f"initial.{name}": place for name, place in _places(initial).items()}
        teacher = {
            f"teacher.{name}": one
            for model in step.objective.frozen_models()
            for name, one in tensors_of(model).items()
        }
        places |= dict.fromkeys(teacher, Place("teacher", "teacher"))
        held: dict[Kind, dict[str, Tensor]] = {
            "weights": weights,
            "teacher": teacher,
            "low_bits": dict(optimizer.masters.low_bits),
            "optimizer": optimizer.tensors(),
        }
        for kind, tensors in held.items():
            tape.mark(tensors.values(), kind)
        recorder = _Recorder(tape, step.objective, decoder)
        begin = tape.now
        batch = planned.synthetic(rows, here)
        loss, count = step.backward(batch)
        tape.mark(optimizer.masters.sums.values(), "sums")
        if updates:
            recorder.enter("update", "update")
            step.update(loss, count, schedule=1.0)
        end = tape.now
        by_place: dict[Kind, dict[Place, int]] = {
            kind: _by_place(held[kind], places) for kind in held
        }
    return _recorded_memory(tape, recorder, by_place, begin, end)


def build_without_data(planned: PlannedStep, teams: Teams, here: torch.device) -> TrainingStep:
    """Build a step on tensors without data, within `without_data(here)`; see `step_memory`."""
    config, train, adapter = planned.config, planned.train, planned.adapter
    kernel = _kernel(train)
    execution = "auto" if train.execution == "compiled" else train.execution
    train = train.replace(kernel=kernel, fp8=False, execution=execution)
    if adapter is None:
        decoder = teams.build(config, kernel, here)
    else:
        dtype = training_dtype(train.dtype, planned.device)
        decoder = adapter.trainable(config, kernel, here, dtype)
    if here.type == "meta":
        decoder = with_gpu_kernels(decoder)
    return build_step(decoder, train, here, parallel=planned.parallel, teams=teams, whole=config)


def _kernel(train: TrainConfig) -> KernelName:
    return "sdpa" if train.kernel.startswith("flex") else train.kernel


class _Recorder:
    """Records the spans of a step and the kind of each allocation."""

    def __init__(self, tape: Tape, objective: nn.Module, decoder: Decoder) -> None:
        self.tape = tape
        self.spans: list[Span] = []
        self.phase: Phase = "forward"
        self.begun = 0
        objective.register_forward_pre_hook(self._begin)
        objective.register_forward_hook(self._end_of_forward)
        layers = dict(decoder.layers.named_children())
        first, *_, last = [*layers, *layers]
        for name, layer in layers.items():
            layer.register_forward_pre_hook(self._before(f"layers.{name}", name == first))
            layer.register_forward_hook(self._after(f"layers.{name}", name == last))
        for part in objective.modules():
            if isinstance(part, TokenLogprobs):
                part.register_forward_pre_hook(lambda *_: self.enter("head", "forward"))
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._keep_gradient)

    def enter(self, part: str, phase: Phase) -> None:
        self.tape.part, self.phase = part, phase
        self.spans.append(Span(self.tape.now, part, phase))

    def _begin(self, *_: Any) -> None:
        for allocation in self.tape.alive:  # only gradient sums survive from pass to pass
            if self.begun and allocation.born > self.begun and not allocation.kind:
                allocation.kind = "sums"
        self.begun = self.tape.now
        self.enter("embedding", "forward")

    def _before(self, part: str, first: bool) -> Any:
        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if first and self.phase == "forward" and inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: self.enter("embedding", "backward"))
            self.enter(part, self.phase)

        return enter

    def _after(self, part: str, last: bool) -> Any:
        def leave(_: nn.Module, __: Any, output: Tensor) -> None:
            if self.phase == "forward":
                if output.requires_grad:
                    output.register_hook(lambda _: self.enter(part, "backward"))
                if last:
                    self.enter("final_norm", "forward")

        return leave

    def _end_of_forward(self, *_: Any) -> None:
        for allocation in self.tape.alive:
            if allocation.born > self.begun and not allocation.kind:
                allocation.kind = "loss" if allocation.part == "head" else "activations"
        self.enter("head", "backward")

    def _keep_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.tape.mark([parameter.grad], "gradients")


def _places(decoder: Decoder) -> dict[str, Place]:
    """Map the name of each parameter and buffer to its part and component of the model."""
    return {
        name: Place(".".join(name.split(".")[:2]) if name.startswith("layers.") else own, own)
        for name, own in components_of(decoder).items()
    }


def _by_place(tensors: dict[str, Tensor], places: dict[str, Place]) -> dict[Place, int]:
    """Sum the bytes of weights or optimizer state by place in the model.

    The name of an optimizer state tensor begins with the name of its parameter. Parameters of the
    objective, outside the decoder, count as part of the head.
    """
    sizes: dict[Place, int] = defaultdict(int)
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) not in seen:  # a tied matrix has two names
            seen.add(id(tensor))
            parameter = name if name in places else name.rpartition(".")[0]
            sizes[places.get(parameter, Place("head", "head"))] += tensor.nbytes
    return dict(sizes)


def _recorded_memory(
    tape: Tape,
    recorder: _Recorder,
    held: dict[Kind, dict[Place, int]],
    begin: int,
    end: int,
) -> StepMemory:
    changes: dict[Kind, list[int]] = {kind: [0] * (end - begin + 2) for kind in KINDS}
    activations: dict[str, int] = defaultdict(int)
    for one in tape.allocations:
        kind = cast(Kind, one.kind or "temporary")
        if one.born > end or (one.died is not None and one.died <= begin):
            continue
        changes[kind][max(one.born - begin, 0)] += one.n_bytes
        if one.died is not None and one.died <= end:
            changes[kind][one.died - begin + 1] -= one.n_bytes  # freed after that operator
        if kind == "activations" and one.born > recorder.begun:  # only the last micro-batch
            activations[one.part] += one.n_bytes
    try:
        sizes: dict[Kind, array[int]] = {
            kind: array("q", accumulate(change)) for kind, change in changes.items()
        }
    except OverflowError:
        raise WorkhorseError(
            "a step needs 2^63 bytes or more; use a smaller model or batch"
        ) from None
    return StepMemory(
        held,
        dict(activations),
        sizes,
        [span._replace(begin=span.begin - begin) for span in recorder.spans],
    )
