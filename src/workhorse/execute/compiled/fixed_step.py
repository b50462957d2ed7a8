"""Decoding steps of fixed shape, and their execution as CUDA graphs.

A step adds one token to each sequence of a `PagedView`. In speculative decoding it also adds draft
tokens, up to the number of tokens that the cache can remove again. Its tensor shapes do not depend
on the length of the sequences. It can therefore be compiled, or captured as a CUDA graph, once for
all lengths.

A GPU finishes a small model's step before Python has launched its hundreds of kernels. A step of
fixed shape launches the same kernels at every token, on tensors at the same addresses. So they are
captured once. Before each replay, the step's tokens, lengths and block tables are copied to the
addresses that the graph reads.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from workhorse.errors import WorkhorseError
from workhorse.execute.backend import Backend, Snapshot, Views
from workhorse.nn import Decoder
from workhorse.nn.cache.fixed import CacheTensors, FixedCache, Layout, layout_of, tensors_of
from workhorse.nn.cache.paged import EMPTY
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.surgery import HookWatch


class Variant(NamedTuple):
    """The properties of a decoding step that its compiled program depends on."""

    layout: Layout
    batched: bool
    """True for two or more sequences (any number), False for one."""
    guessed: bool
    """True for two or more tokens per sequence (one and draft tokens), False for one."""


def check_fixed(decoder: Decoder, what: str) -> None:
    """Raise an error if a decoder's steps differ in shape or constants from token to token.

    Args:
        decoder: the decoder.
        what: the intended execution, such as "compiled"; used in the error message.

    Raises:
        WorkhorseError: see `why_not_fixed`.
    """
    if reason := why_not_fixed(decoder):
        raise WorkhorseError(f"{reason}, so steps cannot be {what}; choose execution=auto")


def why_not_fixed(decoder: Decoder) -> str:
    """Reason why a decoder's steps differ in shape or constants from token to token; or empty.

    Reasons are a mixture of experts, and RoPE angles that depend on the sequence length.
    """
    blocks = decoder.config.blocks.values()
    if any(block.mixture for block in blocks):
        return "a mixture of experts changes its tensor shapes at every token"
    if any(block.rope and block.rope.depends_on_length for block in blocks):
        return "rope scaling dynamic_ntk and longrope depend on the sequence length"
    return ""


def fixed_step(decoder: Decoder, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
    """Compute the logits of a decoding step with the decoder's modules.

    Args:
        decoder: the decoder, in evaluation mode.
        variant: the variant of the step.
        tokens: (batch, seq), the new tokens.
        tensors: tensors of the cache; `lengths` is incremented by seq in place.
    """
    return decoder.forward(tokens, cache=FixedCache(variant.layout, tensors))


FixedStep = Callable[[Variant, Tensor, CacheTensors], Tensor]
"""`fixed_step` of a decoder, or a faster function with the same arguments and result."""


class FixedStepBackend(Backend):
    """Computes decoding steps over a `PagedView` by a function of fixed shape.

    A step adds one token to each sequence. In speculative decoding it also adds draft tokens, up to
    the number of tokens that the cache can remove again. All other passes, and all passes while the
    decoder has hooks, use another backend.

    Args:
        fallback: the backend for other passes.
        step: computes the steps of its decoder.
        name: how the steps are computed, for `announcement`.
    """

    has_whole_steps = True

    def __init__(self, fallback: Backend, step: FixedStep, name: str) -> None:
        super().__init__(fallback.decoder, fallback.operators)
        self.fallback = fallback
        self.step = step
        self.name = name
        self.watch = HookWatch(self.decoder.modules())

    def logits(self, tokens: Tensor, views: Views, wanted: Sequence[int]) -> Tensor:
        view, seq = views[0]
        if len(views) > 1 or set(wanted) != {seq} or not self._is_step(view, seq):
            return self.fallback.logits(tokens, views, wanted)
        rows = len(view.sequences)
        view.reserve([seq] * rows)
        variant = Variant(layout_of(view), batched=rows > 1, guessed=seq > 1)
        logits = self.step(variant, tokens.view(rows, seq), tensors_of(view))
        view.advance(seq)
        return logits.flatten(0, 1)

    @property
    def announcement(self) -> str:
        return f"decode: {self.name}, whole steps"

    def _is_step(self, view: PagedView, seq: int) -> bool:
        if torch.is_grad_enabled() or self.watch.sees_hooks:
            return False
        return seq <= view.slack + 1 and all(one.length for one in view.sequences)


log = logging.getLogger(__name__)

NARROWEST = 16
"""Smallest width of a block table in a CUDA graph; for longer sequences the width doubles."""
MOST_RECORDINGS = 32
"""Maximum number of captured steps per decoder; the oldest one is deleted first."""

Replay = tuple[Callable[[], object], Tensor]
"""A function that replays a captured function, and the tensor that then holds the result."""
Recorder = Callable[[Callable[[], Tensor]], Replay]


class CudaGraphs:
    """Captures CUDA graphs on the current device; they share the memory of their activations."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> Replay:
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # libraries allocate and choose kernels in their first call
            function()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function()
        self._pool = graph.pool()
        return graph.replay, result


class Recording(NamedTuple):
    """A captured decoding step, and the buffers from which it reads its inputs."""

    tokens: Tensor
    lengths: Tensor
    tables: list[Tensor]
    """Block tables with the width that was captured; unused entries hold `EMPTY`."""
    replay: Callable[[], object]
    logits: Tensor

    def __call__(self, tokens: Tensor, tensors: CacheTensors) -> Tensor:
        """Copy the inputs to the buffers, replay the step, and return its logits."""
        self.tokens.copy_(tokens)
        self.lengths.copy_(tensors.lengths)
        for own, table in zip(self.tables, tensors.tables, strict=True):
            own.fill_(EMPTY)[:, : table.shape[1]].copy_(table)
        self.replay()
        return self.logits.clone()


class Recordings:
    """The captured steps of a decoder.

    They are valid until its modules, weights or active adapters are replaced.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._snapshot = Snapshot(decoder)
        self._tensors = [*decoder.parameters(), *decoder.buffers()]
        self._addresses = self._current_addresses()
        self.by_shape: dict[Any, Recording] = {}

    @property
    def valid(self) -> bool:
        """True if no module or weight was replaced or moved since the steps were captured."""
        return self._snapshot.unchanged and self._addresses == self._current_addresses()

    def _current_addresses(self) -> list[int]:
        return [one.data_ptr() for one in self._tensors]


class CapturedStep:
    """A `FixedStep` that runs as a CUDA graph.

    A CUDA graph is captured for each batch size, number of new tokens and cache. If sequences grow
    beyond its block tables, another one is captured with tables of twice the width. Steps that
    cannot be captured run without CUDA graphs. If weights or modules are replaced later, or another
    adapter is set, steps are captured again.

    Args:
        decoder: the decoder in evaluation mode, after the other inference transforms.
        step: computes the steps of the decoder, for example a `CompiledStep`; None: `fixed_step`.
        recorder: captures a function of no arguments; None for CUDA graphs.

    Raises:
        WorkhorseError: the model has a mixture of experts, or RoPE angles that depend on the
            sequence length.
    """

    def __init__(
        self, decoder: Decoder, step: FixedStep | None = None, recorder: Recorder | None = None
    ) -> None:
        check_fixed(decoder, "captured as CUDA graphs")
        self.decoder = decoder
        self.step = step or partial(fixed_step, decoder)
        self.recorder = recorder or CudaGraphs()
        self.recordings: Recordings | None = None
        self.records = True

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, without the captured steps, because they contain memory addresses."""
        return vars(self) | {"recordings": None}

    def __call__(self, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
        if not self.records:
            return self.step(variant, tokens, tensors)
        if self.recordings is None or not self.recordings.valid:
            self.recordings = Recordings(self.decoder)
        known = self.recordings.by_shape
        widths = tuple(_width(table) for table in tensors.tables)
        stores = tuple((one.data_ptr(), one.shape) for one in (*tensors.keys, *tensors.values))
        shape = variant.layout, tokens.shape, widths, stores
        recording = known.get(shape)
        if recording is None:
            step = partial(self.step, variant)
            try:
                recording = known[shape] = record_step(step, tokens, tensors, self.recorder)
            except RuntimeError as error:
                self.records = False
                log.warning("cannot capture steps as CUDA graphs; they run without: %s", error)
                return step(tokens, tensors)
            if len(known) > MOST_RECORDINGS:
                del known[next(iter(known))]
        logits = recording(tokens, tensors)
        tensors.lengths.add_(tokens.shape[1])
        return logits


@torch.inference_mode(False)
@torch.no_grad()
def record_step(
    step: Callable[[Tensor, CacheTensors], Tensor],
    tokens: Tensor,
    tensors: CacheTensors,
    recorder: Recorder,
) -> Recording:
    """Capture a decoding step. `step` increments `lengths`, but a replay of the recording does not.

    Args:
        step: the function of the step.
        tokens: example tokens.
        tensors: example tensors of the cache.
        recorder: captures a function of no arguments.
    """
    lengths, tokens = tensors.lengths.clone(), tokens.clone()
    tables = [
        functional.pad(table, (0, _width(table) - table.shape[1]), value=EMPTY)
        for table in tensors.tables
    ]

    def from_here() -> Tensor:
        return step(tokens, tensors._replace(lengths=lengths.clone(), tables=tables))

    with torch.cuda.device_of(tokens):  # capture on the device where its kernels run
        return Recording(tokens, lengths, tables, *recorder(from_here))


def _width(table: Tensor) -> int:
    """Width of a captured block table into which the contents of `table` fit."""
    width = NARROWEST
    while width < table.shape[1]:
        width *= 2
    return width
