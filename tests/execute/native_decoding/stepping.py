"""Decoders that step natively, for tests."""

import torch
from torch import Tensor

from tests.execute.passes import last_logits
from tests.execute.windowed import local_and_global
from tests.native.machine import DECODING, OPERATORS, WITHOUT_SCORES
from tests.nn.paged import paged
from workhorse.execute.backend import Backend, ModuleBackend, backend_of
from workhorse.execute.native_decoding.layers import attend_natively, stream_weights
from workhorse.execute.native_decoding.native_step import NativeStepBackend
from workhorse.nn import Decoder
from workhorse.transforms.quantization import FormatName, quantize


def built(seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 64) -> Decoder:
    torch.manual_seed(seed)
    return local_and_global(width).build(dtype=dtype).eval()


def quick(
    decoder: Decoder, format: FormatName | None = None, *, exact: bool = False
) -> NativeStepBackend:
    """A decoder prepared as for inference."""
    modules = ModuleBackend(without_steps(decoder, format), WITHOUT_SCORES)
    return NativeStepBackend(modules, WITHOUT_SCORES, exact=exact)


def without_steps(decoder: Decoder, format: FormatName | None = None) -> Decoder:
    if format is not None:
        quantize(decoder, format)
    stream_weights(decoder, OPERATORS)
    attend_natively(decoder, DECODING)
    return decoder


@torch.no_grad()
def along(model: Decoder | Backend, prompts: Tensor, tokens: Tensor) -> Tensor:
    """Logits of each further token, after prompts of unequal lengths."""
    decoder = backend_of(model).decoder
    rows, further = tokens.shape
    seq = prompts.shape[1]
    positions = torch.arange(seq)[None] - torch.arange(rows)[:, None]
    cache = paged(decoder, rows, seq + further)
    decoder(prompts[:rows], positions=positions.clamp(min=-1), cache=cache)
    each = [last_logits(model, token, cache) for token in tokens.split(1, dim=1)]
    return torch.stack(each, dim=1)
