"""Scoring bodies: log-probabilities of given tokens with a frozen model.

A scoring body has the modules of a training body, so a model scores with the bits that it trains
with. It has no optimizer, and computes no gradients of weights.
"""

import torch
from torch import Tensor, nn

from workhorse.execute.body import body_of
from workhorse.execute.lower.train import train_natively
from workhorse.execute.training import compile_layers, compile_logprobs
from workhorse.native import Operators
from workhorse.nn import Decoder, TokenLogprobs
from workhorse.nn.logprobs import Logprobs
from workhorse.nn.shapes import Tokens
from workhorse.transforms.float8 import multiply_in_float8


class ScoringBody(nn.Module):
    """A decoder that computes log-probabilities of given tokens, without gradients or dropout.

    Args:
        decoder: the decoder, or a body of it.

    Attributes:
        logprobs: computes log-probabilities from the decoder's hidden states.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.logprobs = TokenLogprobs()

    @torch.no_grad()
    def forward(
        self, tokens: Tokens, targets: Tokens, *, documents: Tensor | None = None
    ) -> Logprobs:
        """Compute the log-probabilities of the targets; see `TokenLogprobs`.

        Args:
            tokens: (batch, seq) token ids.
            targets: (batch, seq) target ids, or `IGNORE`.
            documents: (batch, seq) document ids of packed rows, or None.
        """
        x = self.decoder.hidden(tokens, documents=documents)
        return self.logprobs(x, targets, self.decoder.head)


def scoring_body(
    reference: Decoder,
    operators: Operators,
    *,
    precision: str = "highest",
    exact: bool = False,
    compiled: bool = False,
    fp8: bool = False,
) -> ScoringBody:
    """Return a body that scores with the current weights of a decoder; it shares the parameters.

    Args:
        reference: the decoder on its final device, in its final dtype. It is not changed.
        operators: the native operators that a training body would use.
        precision: the precision of float32 gemms; see `train_natively`.
        exact: True for the bits of an exact decoding step; see `train_natively`.
        compiled: True if PyTorch compiles the layers and the log-probabilities.
        fp8: True if linear layers multiply in float8.
    """
    body = ScoringBody(body_of(reference))
    if fp8:
        multiply_in_float8(body.decoder)
    freeze(body, operators, precision=precision, exact=exact, compiled=compiled)
    return body


def freeze(
    body: ScoringBody, operators: Operators, *, precision: str, exact: bool, compiled: bool
) -> None:
    """Prepare a model that is never trained for passes without gradients, in place.

    For the arguments see `scoring_body`.
    """
    body.eval()
    if operators != Operators():
        train_natively(body, operators, precision=precision, exact=exact)
    if compiled:
        compile_layers(body.decoder)
        compile_logprobs(body)
