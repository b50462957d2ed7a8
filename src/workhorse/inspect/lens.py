"""The residual stream, layer by layer: next-token guesses, norms and statistics of activations."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.config.arguments import integer, token_ids
from workhorse.errors import WorkhorseError
from workhorse.inspect.trace import Trace
from workhorse.nn import Decoder
from workhorse.nn.logprobs import log_probabilities


@dataclass(frozen=True)
class Lens:
    """The most probable next tokens according to every residual stream.

    Attributes:
        names: names of the streams, in order; the last one gives the decoder's own prediction.
        ids: token ids, most probable first, (streams, batch, seq, top).
        logprobs: their log-probabilities, of the same shape.
        ranks: rank of the decoder's own most probable token, 0 for the first, (streams, batch,
            seq).
        entropies: entropy of each distribution in nats, (streams, batch, seq).
    """

    names: list[str]
    ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    entropies: Tensor


class Statistics(NamedTuple):
    """Statistics of one tensor.

    Attributes:
        mean: mean of all elements.
        std: their standard deviation.
        rms: root of their mean square.
        max_abs: largest absolute value.
        near_zero: fraction of elements up to 1 % of `rms` in absolute value.
        dead: fraction of features (indices of the last dimension) that are near zero everywhere.
    """

    mean: float
    std: float
    rms: float
    max_abs: float
    near_zero: float
    dead: float


def streams(decoder: Decoder) -> list[str]:
    """Names of the residual stream before the first layer and after every layer."""
    return ["embedding", *(f"layers.{number}" for number in range(len(decoder.layers)))]


@torch.no_grad()
def logit_lens(decoder: Decoder, run: Trace, top: int = 5) -> Lens:
    """Apply the final norm and the head to every residual stream of a pass.

    Post: interpreting GPT: the logit lens (nostalgebraist, 2020).

    Args:
        decoder: the traced decoder.
        run: a pass that kept the tensors of `streams(decoder)`.
        top: number of tokens to return per position, at most the vocabulary size.

    Raises:
        WorkhorseError: a stream was not kept; or `top` is negative.
    """
    names, top = streams(decoder), integer("top", top, 0)
    own = run.logits.argmax(-1, keepdim=True)
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for name in names:  # one at a time: all logits together may not fit into memory
        logprobs = log_probabilities(decoder.head(decoder.final_norm(run[name])).float())
        best = logprobs.topk(min(top, logprobs.shape[-1]))
        rank = (logprobs > logprobs.gather(-1, own)).sum(-1)
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
        rows.append((best.indices, best.values, rank, entropy))
    ids, logprobs, ranks, entropies = (torch.stack(each) for each in zip(*rows, strict=True))
    return Lens(names, ids, logprobs, ranks, entropies)


def stream_norms(decoder: Decoder, run: Trace) -> Tensor:
    """Euclidean norms of the residual streams, (streams, batch, seq)."""
    return torch.stack([run[name].float().norm(dim=-1) for name in streams(decoder)])


def statistics(run: Trace) -> dict[str, Statistics]:
    """Statistics of every recorded tensor, by name, in the order of the pass.

    Tensors of integers are omitted. Attention scores of hidden keys count as 0.
    """
    return {name: _statistics(x) for name, x in run.items() if x.is_floating_point()}


def _statistics(x: Tensor) -> Statistics:
    x = x.detach().double().masked_fill(x <= torch.finfo(x.dtype).min, 0.0)
    rms = x.square().mean().sqrt()
    zero = x.abs() <= rms / 100
    return Statistics(
        mean=x.mean().item(),
        std=x.std(correction=0).item(),
        rms=rms.item(),
        max_abs=x.abs().max().item(),
        near_zero=zero.double().mean().item(),
        dead=zero.flatten(0, -2).all(0).double().mean().item(),
    )


@torch.no_grad()
def neighbours(decoder: Decoder, token: int, top: int = 10) -> tuple[Tensor, Tensor]:
    """The tokens with the most similar embeddings.

    Returns:
        Their ids, and the cosines of their vectors with the token's, both (top), largest first.
        The token itself is omitted.

    Raises:
        WorkhorseError: `token` is not a token id of the decoder; or `top` is negative.
    """
    vocab = decoder.config.vocab_size
    (token,) = token_ids([token], "token is an integer", f"choose one from 0 to {vocab - 1}")
    if not 0 <= token < vocab:
        raise WorkhorseError(f"token={token} is not a token id; choose one from 0 to {vocab - 1}")
    table = torch.nn.functional.normalize(decoder.embedding.tokens.weight.float(), dim=-1)
    cosines = table @ table[token]
    cosines[token] = -torch.inf
    best = cosines.topk(min(integer("top", top, 0), vocab - 1))
    return best.indices, best.values
