"""Attention of a few queries per head by a native operator, which reads a paged cache in place."""

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from workhorse.native import Decoding
from workhorse.nn import Decoder
from workhorse.nn.attention.kernels import Sdpa
from workhorse.nn.attention.masks import AttentionPattern, Placement
from workhorse.nn.attention.self_attention import SelfAttention
from workhorse.nn.cache.blocks import InBlocks
from workhorse.nn.shapes import AttentionOutput, Keys, Queries, Values
from workhorse.transforms.replace import become, replace_modules


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
