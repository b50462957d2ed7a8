"""A new norm or attention that declares its facts works in every part of the project."""

import copy

import pytest
import torch
from torch import nn

from tests.execute.passes import last_logits
from tests.native.machine import OPERATORS, needs
from tests.nn.paged import paged
from workhorse.execute.backend import backend_of
from workhorse.execute.choose import decoding_backend
from workhorse.execute.lower.train import train_natively
from workhorse.execute.native_training.norms import NativeNorm
from workhorse.generate import GenerationConfig, generate
from workhorse.models.describe import components_of, forward_flops
from workhorse.models.families.llama import llama
from workhorse.nn import Decoder
from workhorse.nn.attention.kernels import Scoring, make_kernel
from workhorse.nn.attention.masks import AttentionPattern
from workhorse.nn.attention.self_attention import SelfAttention, split_heads
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.context import context_alone
from workhorse.nn.norms import NormFacts, RMSNorm, RMSNormMultipliedFirst
from workhorse.nn.surgery import as_subclass, replace_modules
from workhorse.transforms.quantization import QuantizedLinear, quantize


class CentredRMSNorm(RMSNormMultipliedFirst):
    """RMSNorm after subtraction of the mean: an example of a new norm."""

    facts = NormFacts(centred=True, rounds_gain=False)

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return super().normalise(x - x.mean(-1, keepdim=True))


class Undeclared(RMSNorm):
    """A third-party norm that overrides `forward` and does not declare `facts`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def decoder_with(kind: type[RMSNorm]) -> Decoder:
    decoder = llama(d_model=64, n_layers=2, n_heads=2, d_ff=64, vocab_size=64).build()
    replace_modules(
        decoder, lambda module: as_subclass(module, kind) if type(module) is RMSNorm else module
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
    backend = decoding_backend(reference, wait=True)
    assert backend.announcement.endswith("whole steps") is whole
    tokens = torch.randint(64, (2, 6))
    found = []
    for one in (backend_of(reference), backend):
        view = paged(one.decoder, 2, 6)
        found.append([last_logits(one, token, view) for token in tokens.split(1, dim=1)])
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


class SharedKeyAttention(SelfAttention):
    """An example of a new attention: all heads share one key projection.

    It absorbs this projection's weight into the queries, and caches the inputs instead of keys.
    """

    multiplied_here = ("k_proj",)

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.d_model, self.n_heads = d_model, n_heads
        self.head_dim = self.value_dim = d_model
        self.pattern = AttentionPattern()
        self.kernel = make_kernel("auto", self.pattern, Scoring(scale=d_model**-0.5), n_heads)
        self.q_proj = nn.Linear(d_model, n_heads * d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(n_heads * d_model, d_model, bias=False)

    def forward(self, x, context=None, cache=None):
        context = context or context_alone(x, self.d_model, cache)
        return self.out_proj(context.by_part(self.mix, self.q_proj(x), x, cache=cache))

    def mix(self, q, x, context, cache):
        q = split_heads(q, self.n_heads) @ self.k_proj.weight
        k = v = x[:, None]
        if cache is not None:
            k, v = cache.update(k, v)
        y = self.kernel(q, k, v, context.mask(self.pattern, self.kernel, q.dtype))
        return y.transpose(1, 2).flatten(2)


def with_new_attention() -> Decoder:
    decoder = decoder_with(RMSNorm)
    for layer in decoder.layers:
        layer.attention = SharedKeyAttention(64, 2)
        for part in layer.attention.children():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.1)
    return decoder.eval()


@torch.no_grad()
def test_a_new_attention_decodes_in_every_body():
    """Adding the class is enough."""
    reference = with_new_attention()
    tokens = torch.randint(64, (1, 12))
    expected = reference(tokens)[0, [3, 11]]
    for backend in (backend_of(reference), decoding_backend(reference, wait=True)):
        decoder = backend.decoder
        cache = decoder.new_paged_cache(tokens=64, sequences=2)
        first, second = cache.new_sequence(), cache.new_sequence()
        decoder(tokens[:, :11], cache=PagedView(cache, [first]))
        views = [(PagedView(cache, [second]), 4), (PagedView(cache, [first]), 1)]
        packed = torch.cat((tokens[0, :4], tokens[0, 11:]))
        found = backend.logits(packed, views, [1, 1])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    completions = generate(reference, [tokens[0].tolist()], GenerationConfig(max_new_tokens=3))
    assert len(completions[0].tokens) == 3


def test_a_new_attention_is_counted_and_quantised():
    decoder = with_new_attention()
    assert forward_flops(decoder, 10)["scores"] == 2 * 2 * 2 * (64 + 64) * 10
    assert components_of(decoder)["layers.0.attention.q_proj.weight"] == "attention"
    quantised = quantize(decoder, "int8")
    assert isinstance(quantised.layers[0].attention.q_proj, QuantizedLinear)
    assert type(quantised.layers[0].attention.k_proj) is nn.Linear


@needs("training")
def test_a_new_attention_trains_natively():
    plain = with_new_attention()
    quick = copy.deepcopy(plain)
    train_natively(quick, OPERATORS)
    tokens = torch.randint(64, (2, 6))
    for decoder in (plain, quick):
        decoder(tokens).square().mean().backward()
    for one, other in zip(plain.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5)
