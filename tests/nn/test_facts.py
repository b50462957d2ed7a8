"""A norm that declares its facts is known to all parts that compute norms by other means."""

import copy

import pytest
import torch
from torch import nn

from tests.native.machine import OPERATORS, needs
from tests.nn.paged import paged
from workhorse.execute.choose import decoding_body
from workhorse.execute.native_training import train_natively
from workhorse.execute.native_training.norms import NativeNorm
from workhorse.models.families.llama import llama
from workhorse.models.parameters import components_of
from workhorse.nn import Decoder
from workhorse.nn.norms import NormFacts, RMSNorm, RMSNormMultipliedFirst
from workhorse.transforms.replace import become, replace_modules


class CentredRMSNorm(RMSNormMultipliedFirst):
    """RMSNorm of what remains after the mean was subtracted: a new norm, as one would add it."""

    facts = NormFacts(centred=True, rounds_gain=False)

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return super().normalise(x - x.mean(-1, keepdim=True))


class Undeclared(RMSNorm):
    """A norm of somebody else, who declares nothing and changes `forward`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def decoder_with(kind: type[RMSNorm]) -> Decoder:
    decoder = llama(d_model=64, n_layers=2, n_heads=2, d_ff=64, vocab_size=64).build()
    replace_modules(
        decoder, lambda module: become(module, kind) if type(module) is RMSNorm else module
    )
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1, std=0.2)
    return decoder.eval()


@needs("steps")
@torch.no_grad()
@pytest.mark.parametrize(("kind", "whole"), [(CentredRMSNorm, True), (Undeclared, False)])
def test_it_decodes_natively(kind: type[RMSNorm], whole: bool) -> None:
    reference = decoder_with(kind)
    body = decoding_body(reference, wait=True)
    assert body.announcement.endswith("whole steps") is whole
    tokens = torch.randint(64, (2, 6))
    found = []
    for decoder in (reference, body.decoder):
        view = paged(decoder, 2, 6)
        found.append([decoder.next_logits(one, cache=view) for one in tokens.split(1, dim=1)])
    for plain, native in zip(*found, strict=True):
        torch.testing.assert_close(native, plain, rtol=1e-4, atol=1e-4)


@needs("training")
@pytest.mark.parametrize(("kind", "native"), [(CentredRMSNorm, True), (Undeclared, False)])
def test_it_trains_natively(kind: type[RMSNorm], native: bool) -> None:
    plain, quick = decoder_with(kind), None
    quick = copy.deepcopy(plain)
    train_natively(quick, OPERATORS)
    assert isinstance(quick.final_norm, NativeNorm) is native
    tokens = torch.randint(64, (2, 6))
    for decoder in (plain, quick):
        decoder(tokens).square().mean().backward()
    for one, other in zip(plain.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5)


def test_its_weights_are_counted_as_those_of_norms() -> None:
    found = components_of(decoder_with(CentredRMSNorm))
    assert found["layers.0.attention_norm.weight"] == found["final_norm.weight"] == "norms"
