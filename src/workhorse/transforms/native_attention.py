"""Attention of one query a head by our own operator, which reads the cache at memory speed."""

from typing import Any

import torch
from torch import nn

from workhorse.native import Decoding
from workhorse.nn import Decoder
from workhorse.nn.attention.kernels import Sdpa
from workhorse.nn.shapes import AttentionOutput, Keys, Queries, Values
from workhorse.transforms.record import check, record
from workhorse.transforms.replace import become, replace_modules


def attend_natively(decoder: Decoder, decoding: Decoding) -> None:
    """Let the layers of a decoder that use `sdpa` decode with `Decoding.attend`.

    Prompts, training and biased scores go on as before.

    Args:
        decoder: on the CPU.
        decoding: the operators.
    """
    check(decoder, "attend_natively")
    threads = torch.get_num_threads()

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is Sdpa:
            return become(module, DecodingSdpa, decoding=decoding, threads=threads)
        return module

    replace_modules(decoder, choose)
    record(decoder, "attend_natively", threads=threads)


class DecodingSdpa(Sdpa):
    """`Sdpa`, with an operator of its own where one query a head meets a cache."""

    decoding: Decoding
    threads: int
    """That work on it, each on whole heads of keys: with fewer heads PyTorch is faster."""

    def forward(self, q: Queries, k: Keys, v: Values, mask: Any) -> AttentionOutput:
        allowed, is_causal = mask
        one_query = q.shape[2] == 1 and not is_causal and not torch.is_grad_enabled()
        plain = allowed is None or allowed.dtype == torch.bool
        enough = k.shape[0] * k.shape[1] >= self.threads
        if one_query and plain and enough and q.dtype in (torch.bfloat16, torch.float32):
            return self.decoding.attend(q, k, v, allowed, self.scoring.scale)
        return super().forward(q, k, v, mask)
