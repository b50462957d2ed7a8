"""The kernels of attention and dropout that a GPU would use, for a decoder without data.

On the device `meta` PyTorch writes whole matrices of scores, and keeps dropout's mask in the dtype
of its input. A GPU does neither.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from workhorse.nn.attention.kernels import Sdpa
from workhorse.nn.shapes import AttentionOutput, Keys, Queries, Values
from workhorse.transforms.replace import become, replace_modules

Module = TypeVar("Module", bound=nn.Module)
aten = torch.ops.aten


def with_gpu_kernels(module: Module) -> Module:
    """Change a module on the device `meta`, in place, to allocate as on a GPU."""

    def choose(part: nn.Module) -> nn.Module:
        if type(part) is Sdpa:
            return become(part, FusedSdpa)
        return become(part, FusedDropout) if type(part) is nn.Dropout else part

    replace_modules(module, choose)
    return module


class FusedDropout(nn.Dropout):
    """Dropout that keeps a mask of one byte for each element."""

    def forward(self, input: Tensor) -> Tensor:
        return aten.native_dropout(input, self.p, self.training)[0] if self.training else input


class FusedSdpa(Sdpa):
    """Flash attention without a mask, in 16 bits and with equal widths of queries and values.

    Otherwise the kernel of xFormers. Both keep queries, keys, values, the output, and a log-sum-exp
    for each query and head.
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
