"""Layers that decode natively: linear layers limited by memory bandwidth, and paged attention.

Decoding computes one row per text, so a layer takes as long as reading its weights; PyTorch's
`linear` reaches a half to two thirds of the memory's bandwidth. The many rows of a prompt are a
gemm, for which there are operators too: on the matrix unit of some CPUs and in the vectors of
others. A CPU without instructions for bfloat16, or with slow ones, multiplies it as float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor, nn

from workhorse.devices.instructions import cpu_has, widens
from workhorse.native import Decoding, Operators
from workhorse.nn import Decoder
from workhorse.nn.attention.kernels import Sdpa
from workhorse.nn.attention.masks import AttentionPattern, Placement
from workhorse.nn.attention.self_attention import SelfAttention
from workhorse.nn.cache.paged import InBlocks
from workhorse.nn.shapes import AttentionOutput, Keys, Queries, Values
from workhorse.transforms.record import become, replace_modules


def attend_natively(decoder: Decoder, decoding: Decoding) -> None:
    """Let a decoder's layers with `sdpa` decode from a paged cache with `Decoding.attend`.

    Prompts, training, biased scores and other caches are computed as before.

    Args:
        decoder: on the CPU.
        decoding: the operators.
    """
    attentions = (part for part in decoder.modules() if isinstance(part, SelfAttention))
    served = {part.kernel for part in attentions if part.attends_to_stored}

    def choose(module: nn.Module) -> nn.Module:
        replaced = type(module) is Sdpa and module in served
        return become(module, DecodingSdpa, decoding=decoding) if replaced else module

    replace_modules(decoder, choose)


MOST_QUERIES = 32
"""The most queries per head for the operator; for more, as in a prompt, a gemm is faster."""
ATTENDED = (torch.bfloat16, torch.float32)


class Seen(NamedTuple):
    """The slots that each query of a pass sees, counted through the blocks of its row."""

    first: Int64[Tensor, "batch seq"]
    last: Int64[Tensor, "batch seq"]
    """The slot after the last one seen."""


class DecodingSdpa(Sdpa):
    """`Sdpa` with a native operator for a few queries per head over blocks of keys."""

    reads_blocks = True
    decoding: Decoding

    @staticmethod
    def render(pattern: AttentionPattern, place: Placement, dtype: torch.dtype) -> Any:
        """The visible slots if the operator applies, else what `Sdpa` reads."""
        few = place.in_blocks and place.queries.shape[1] <= MOST_QUERIES
        if not few or dtype not in ATTENDED or pattern.alibi_slopes or torch.is_grad_enabled():
            return Sdpa.render(pattern, place, dtype)
        last = place.queries + 1  # padding stands at -1 and sees nothing
        first = torch.zeros_like(last)
        if pattern.window is not None:
            first = (last - pattern.window).clamp(min=0)
        if pattern.chunk is not None:
            first = (last - 1).clamp(min=0) // pattern.chunk * pattern.chunk
        return Seen(first.contiguous(), last.contiguous())

    def forward(
        self, q: Queries, k: Keys | InBlocks, v: Values | InBlocks, mask: Any
    ) -> AttentionOutput:
        if isinstance(k, InBlocks) and isinstance(v, InBlocks):
            if isinstance(mask, Seen):
                seen = {"table": k.table, "first": mask.first, "last": mask.last}
                return self.decoding.attend(q, k.blocks, v.blocks, **seen, scale=self.scoring.scale)
            k, v = k.gathered(), v.gathered()
        return super().forward(q, cast(Keys, k), cast(Values, v), mask)


DOT_ROWS = {torch.bfloat16: 64, torch.float32: 16}
"""The most rows for which dot products (`Decoding.linear`) beat PyTorch's `linear`, by dtype of the
weights."""
DOT_ROWS_BESIDE_GEMM = {torch.bfloat16: 64, torch.float32: 32}
"""The same where many rows have a gemm of their own. On the matrix unit the two were equally fast
for 64 to 128, in vectors for 24 to 48, for bfloat16 as float32 in MKL for 16 to 64."""
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`F.linear`, and what computes the same."""


class StreamedLinear(nn.Linear):
    """`nn.Linear` by a native operator, for a few rows and without gradients."""

    decoding: Decoding
    few_rows: int
    many_rows: Linear

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        known = input.dtype == self.weight.dtype and input.dtype in DOT_ROWS
        whole = self.weight.is_contiguous() and (self.bias is None or self.bias.is_contiguous())
        if torch.is_grad_enabled() or not known or not whole:
            return F.linear(input, self.weight, self.bias)
        if rows <= self.few_rows:
            return self.decoding.linear(input, self.weight, self.bias)
        return self.many_rows(input, self.weight, self.bias)


def stream_weights(model: nn.Module, operators: Operators) -> None:
    """Let a model's `nn.Linear` on the CPU read their weights at the speed of memory.

    In place; parameters keep their names, values, sharing and memory.

    Sums are in float32 but in another order than PyTorch's, so results differ by rounding. Apply
    this after transforms that replace or join linear layers, and after moving or casting the model.

    Args:
        model: to change.
        operators: of decoding, without which nothing is replaced, and those of many rows.
    """
    decoding = operators.decoding
    if decoding is None:
        return

    gemms = {dtype: _gemm(dtype, operators) for dtype in DOT_ROWS}

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is not nn.Linear or not _streams(module):
            return module
        dtype = module.weight.dtype
        gemm = gemms[dtype]
        few_rows = (DOT_ROWS if gemm is None else DOT_ROWS_BESIDE_GEMM)[dtype]
        return become(
            module,
            StreamedLinear,
            decoding=decoding,
            few_rows=few_rows,
            many_rows=F.linear if gemm is None else gemm,
        )

    replace_modules(model, choose)


def decoding_operators(decoder: nn.Module) -> Decoding | None:
    """The native operators by which a decoder decodes; None: it has none."""
    found = (getattr(module, "decoding", None) for module in decoder.modules())
    return next((one for one in found if isinstance(one, Decoding)), None)


def _gemm(dtype: torch.dtype, operators: Operators) -> Linear | None:
    """What multiplies many rows in place of PyTorch's `linear`; None for that itself."""
    narrow = dtype == torch.bfloat16
    if narrow and operators.matrix_unit is not None:
        return operators.matrix_unit.linear
    if operators.vectors is not None:
        return operators.vectors.linear
    # PyTorch's is slow where operators widen: up to three times as slow. Measured on x86 alone.
    if narrow and cpu_has("sse4_2") and widens():
        return _widened
    return None


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product of bfloat16 by PyTorch's of float32, rounded once."""
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)


def _streams(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.device.type == "cpu" and weight.dtype in DOT_ROWS and weight.is_contiguous()
