"""Native layers for decoding on a CPU: linear layers limited by memory bandwidth, paged attention.

Decoding computes one row per sequence, so a layer takes as long as reading its weights. PyTorch's
`linear` reaches a half to two thirds of the memory's bandwidth. A prompt has many rows, so it needs
gemms. There are native gemms too: for the matrix unit of some CPUs, and for vector instructions. If
a CPU's bfloat16 instructions are missing or slow, bfloat16 is multiplied as float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from workhorse.devices.instructions import cpu_has, widens
from workhorse.execute.body import NativeModule
from workhorse.native import Decoding, Operators
from workhorse.nn import Decoder
from workhorse.nn.attention.kernels import Sdpa
from workhorse.nn.attention.masks import AttentionPattern, Placement, slopes_of_distance
from workhorse.nn.blocks import Block
from workhorse.nn.cache.paged import InBlocks
from workhorse.nn.shapes import AttentionOutput, Keys, Queries, Values
from workhorse.nn.surgery import as_subclass, replace_modules


def attend_natively(decoder: Decoder, decoding: Decoding) -> None:
    """Make a CPU decoder's `sdpa` attention use `Decoding.attend` for decoding with a paged cache.

    Training, other caches, and prompts without ALiBi still use PyTorch.
    """
    attentions = [cast(Block, block).attention for block in decoder.layers]
    served = {attention.kernel for attention in attentions if attention.attends_to_stored}

    def choose(module: nn.Module) -> nn.Module:
        replaced = type(module) is Sdpa and module in served
        return as_subclass(module, DecodingSdpa, decoding=decoding) if replaced else module

    replace_modules(decoder, choose)


MOST_QUERIES = 32
"""Maximum queries per head for which `Decoding.attend` is used. For more, gemms are faster."""
BLOCK = 16
"""Number of keys in a block of `attend_to_all`; `Decoding.attend` needs a multiple of 16."""
ATTENDED = (torch.bfloat16, torch.float32)


class Seen(NamedTuple):
    """The range of cache slots that each query sees, counted from the start of its sequence."""

    first: Int64[Tensor, "batch seq"]
    last: Int64[Tensor, "batch seq"]
    """The slot after the last visible one."""
    slopes: Float32[Tensor, " heads"] | None
    """See `Decoding.attend`."""


class DecodingSdpa(NativeModule, Sdpa):
    """`Sdpa` that uses a native operator for few queries per head over a paged cache."""

    reads_blocks = True
    decoding: Decoding

    @staticmethod
    def render(pattern: AttentionPattern, place: Placement, dtype: torch.dtype) -> Any:
        """Return the visible slots if the native operator can be used, else `Sdpa`'s mask."""
        slopes, few = slopes_of_distance(pattern), place.queries.shape[1] <= MOST_QUERIES
        can = place.in_blocks and few
        if pattern.alibi_slopes:  # only a matrix unit saves more than a mask for PyTorch costs
            faster = few or dtype == torch.float32 or not cpu_has("amx_bf16")
            readable = place.in_blocks or (place.aligned and pattern.reach is None)
            can = faster and readable and slopes is not None
        if not can or dtype not in ATTENDED or torch.is_grad_enabled():
            return Sdpa.render(pattern, place, dtype)
        last = place.queries + 1  # padding has position -1 and sees nothing
        first = torch.zeros_like(last)
        if pattern.window is not None:
            first = (last - pattern.window).clamp(min=0)
        if pattern.chunk is not None:
            first = (last - 1).clamp(min=0) // pattern.chunk * pattern.chunk
        return Seen(first.contiguous(), last.contiguous(), slopes)

    def forward(
        self, q: Queries, k: Keys | InBlocks, v: Values | InBlocks, mask: Any
    ) -> AttentionOutput:
        if isinstance(k, InBlocks) and isinstance(v, InBlocks):
            if isinstance(mask, Seen):
                seen = mask._asdict() | {"table": k.table}
                return self.decoding.attend(q, k.blocks, v.blocks, **seen, scale=self.scoring.scale)
            k, v = k.gathered(), v.gathered()
        if isinstance(mask, Seen):
            how = {"causal": True, "slopes": mask.slopes, "scale": self.scoring.scale}
            return attend_to_all(self.decoding, q, cast(Keys, k), cast(Values, v), **how)
        return super().forward(q, cast(Keys, k), cast(Values, v), mask)


def attend_to_all(
    decoding: Decoding, q: Queries, k: Keys, v: Values, *, causal: bool, **how: Any
) -> AttentionOutput:
    """Compute attention without a cache. The bits of a result depend on no other query."""
    batch, _, seq, _ = q.shape
    blocks = -(-seq // BLOCK)
    table = torch.arange(batch * blocks).view(batch, blocks)
    last = (torch.arange(1, seq + 1) if causal else torch.full((seq,), seq)).repeat(batch, 1)

    def in_blocks(x: Tensor) -> Tensor:
        whole = F.pad(x, (0, 0, 0, blocks * BLOCK - seq))
        return whole.transpose(0, 1).reshape(x.shape[1], -1, BLOCK, x.shape[3])

    seen = {"first": torch.zeros_like(last), "last": last}
    return decoding.attend(q, in_blocks(k), in_blocks(v), table=table, **seen, **how)


DOT_ROWS = {torch.bfloat16: 64, torch.float32: 16}
"""Maximum rows for which dot products (`Decoding.linear`) are faster than PyTorch's `linear`, by
the dtype of the weights. It applies if there are no native gemms."""
DOT_ROWS_BESIDE_GEMM = {torch.bfloat16: 64, torch.float32: 32}
"""Maximum rows for which dot products (`Decoding.linear`) are faster than native gemms, by the
dtype of the weights. Measured break-even points: 64 to 128 rows on the matrix unit, 24 to 48 with
vector instructions, and 16 to 64 with bfloat16 as float32 in MKL."""
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`F.linear`, or a function with the same arguments and result."""


class StreamedLinear(NativeModule, nn.Linear):
    """`nn.Linear` that uses `Decoding.linear` for few rows if no gradients are needed."""

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
    """Make a model's `nn.Linear` layers on the CPU read their weights at memory bandwidth.

    The model is changed in place. Parameters keep their names, values, sharing and memory.

    Sums are in float32 but in another order than PyTorch's, so results differ by rounding. Apply
    this after transforms that replace or join linear layers, and after moving or casting the model.

    Args:
        model: the model.
        operators: the native operators. Without `decoding`, nothing is replaced. `matrix_unit` and
            `vectors` are used for many rows.
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
        return as_subclass(
            module,
            StreamedLinear,
            decoding=decoding,
            few_rows=few_rows,
            many_rows=F.linear if gemm is None else gemm,
        )

    replace_modules(model, choose)


def _gemm(dtype: torch.dtype, operators: Operators) -> Linear | None:
    """Return the native function for linear layers of many rows; None: PyTorch's `linear`."""
    narrow = dtype == torch.bfloat16
    if narrow and operators.matrix_unit is not None:
        return operators.matrix_unit.linear
    if operators.vectors is not None:
        return operators.vectors.linear
    # PyTorch is up to three times slower here than widening. Measured on x86 only.
    if narrow and cpu_has("sse4_2") and widens():
        return _widened
    return None


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A bfloat16 matmul computed by PyTorch in float32 and rounded once."""
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)


def _streams(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.device.type == "cpu" and weight.dtype in DOT_ROWS and weight.is_contiguous()
