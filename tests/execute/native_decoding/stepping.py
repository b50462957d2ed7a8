"""Decoders that step natively, for tests."""

import torch
from torch import Tensor

from tests.execute.windowed import local_and_global
from tests.native.machine import DECODING, OPERATORS
from tests.nn.paged import paged
from workhorse.execute.native_decoding.layers import attend_natively, stream_weights
from workhorse.execute.native_decoding.native_step import SteppingDecoder, step_natively
from workhorse.nn import Decoder
from workhorse.transforms.quantization import FormatName, quantize


def built(seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 64) -> Decoder:
    torch.manual_seed(seed)
    return local_and_global(width).build(dtype=dtype).eval()


def quick(
    decoder: Decoder, format: FormatName | None = None, *, exact: bool = False
) -> SteppingDecoder:
    """A decoder prepared as for inference."""
    return step_natively(without_steps(decoder, format), OPERATORS, exact=exact)


def without_steps(decoder: Decoder, format: FormatName | None = None) -> Decoder:
    if format is not None:
        quantize(decoder, format)
    stream_weights(decoder, OPERATORS)
    attend_natively(decoder, DECODING)
    return decoder


@torch.no_grad()
def along(decoder: Decoder, prompts: Tensor, tokens: Tensor) -> Tensor:
    """Logits of each further token, after prompts of unequal lengths."""
    rows, further = tokens.shape
    seq = prompts.shape[1]
    positions = torch.arange(seq)[None] - torch.arange(rows)[:, None]
    cache = paged(decoder, rows, seq + further)
    decoder(prompts[:rows], positions=positions.clamp(min=-1), cache=cache)
    each = [decoder.next_logits(tokens[:, n : n + 1], cache=cache) for n in range(further)]
    return torch.stack(each, dim=1)
